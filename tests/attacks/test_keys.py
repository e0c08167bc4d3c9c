"""Certificates by request: what must not be signed, and what must not be written."""

import base64
import datetime
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from typer.testing import CliRunner

from shufl.cli.shuffler import keys_app
from shufl.shuffler import Credentials
from shufl.shuffler.callers import Caller, Role, caller_of
from shufl.shuffler.keys import Request
from tiny_disk import fill, tiny_disk_at


def keys(*arguments):
    return CliRunner().invoke(keys_app, [str(argument) for argument in arguments])


@pytest.fixture
def authority(tmp_path):
    place = tmp_path / "authority"
    assert keys("authority", place).exit_code == 0
    return place


@pytest.fixture
def csr(tmp_path):
    assert keys("request", tmp_path / "phone", "--name", "phone-7").exit_code == 0
    return tmp_path / "phone" / "phone-7.csr"


def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_key(tmp_path):
    with tiny_disk_at(tmp_path / "disk") as disk:
        filler = fill(disk)
        line = refusal(disk, "authority", disk)
        assert line == f"error: {disk / 'authority.key'}: No space left on device"
        assert "No space left on device" in refusal(disk, "request", disk, "--name", "phone-7")
        assert "No space left on device" in refusal(disk, "flower", disk)
        with filler.open("r+b") as file:  # one page: there is room for the first file alone
            file.truncate(filler.stat().st_size - 4096)
        line = refusal(disk, "authority", disk)
        assert line == f"error: {disk / 'authority.pem'}: No space left on device"
        filler.unlink()
        assert keys("authority", disk).exit_code == 0


_KILLED = """
import os, signal, sys
from pathlib import Path
from shufl.cli.shuffler import keys_app

link = Path.hardlink_to


def killed(path, file):
    if path.suffix == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    return link(path, file)


Path.hardlink_to = killed
keys_app(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "key", "other"),
    [
        (("authority",), "authority.key", "authority.pem"),
        (("request", "--name=phone-7"), "phone-7.key", "phone-7.csr"),
        (("flower",), "flower.key", "flower.pub"),
    ],
)
def test_a_command_that_is_killed_leaves_whole_files_and_the_next_one_replaces_none(
    tmp_path, command, key, other
):
    for at in (key, other):
        killed = [sys.executable, "-c", _KILLED, Path(at).suffix, *command, tmp_path]
        assert subprocess.run(killed).returncode == -signal.SIGKILL
        assert not (tmp_path / other).exists() and (tmp_path / key).exists() == (at == other)
    assert "exists already" in refusal(tmp_path, *command, tmp_path)
    (tmp_path / key).unlink()
    assert keys(*command, tmp_path).exit_code == 0
    assert (tmp_path / key).stat().st_mode & 0o777 == 0o600


def test_of_two_commands_in_one_folder_at_once_one_is_refused(tmp_path, monkeypatch):
    """The second begins when the first is about to give its files their names."""
    link, ended = Path.hardlink_to, []

    def second_first(path, file):
        monkeypatch.setattr(Path, "hardlink_to", link)
        ended.append(keys("request", tmp_path, "--name=phone-7").exit_code)
        link(path, file)

    monkeypatch.setattr(Path, "hardlink_to", second_first)
    assert (keys("request", tmp_path, "--name=phone-7").exit_code, ended) == (2, [0])
    key, csr = (tmp_path / f"phone-7.{end}" for end in ("key", "csr"))
    asked = x509.load_pem_x509_csr(csr.read_bytes()).public_key()
    assert asked == serialization.load_pem_private_key(key.read_bytes(), None).public_key()
    assert {each.name for each in tmp_path.iterdir()} == {csr.name, key.name}


NODE = ("--role=node", "--users=1")


def refusal(place, *arguments):
    """The one line of a refused command, which has left everything in the directory as it was."""
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    refused = keys(*arguments)
    assert (refused.exit_code, refused.stdout) == (2, ""), refused
    (line,) = refused.stderr.splitlines()
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    return line


def test_the_authority_signs_without_ever_having_a_party_s_key(tmp_path, authority):
    """It shows the fingerprint of the key that the party has seen, and what withdraws it."""
    phone = tmp_path / "phone"
    asked = keys("request", phone, "--name", "phone-7")
    signed = keys("sign", authority, phone / "phone-7.csr", *NODE)
    assert (asked.exit_code, asked.stderr) == (signed.exit_code, signed.stderr) == (0, "")
    path, key, withdraws = signed.stdout.splitlines()
    assert asked.stdout.splitlines()[1].split()[:2] == key.split()[:2]
    secret = (phone / "phone-7.key").read_bytes()
    made = {"authority.key", "authority.pem", "phone-7.pem"}
    assert {each.name for each in authority.iterdir()} == made
    body = b"".join(secret.splitlines()[1:-1])
    for each in (*authority.iterdir(), phone / "phone-7.csr"):
        assert body not in each.read_bytes().replace(b"\n", b"")
    assert {each.name for each in phone.iterdir()} == {"phone-7.csr", "phone-7.key"}
    shutil.copy(path, phone)
    shutil.copy(authority / "authority.pem", phone)
    issued = Credentials.read(phone, "phone-7")
    assert issued.private_key == secret and issued.fingerprint in withdraws
    assert caller_of(issued.certificate) == Caller(Role.NODE, "phone-7", 1)
    for pem, days in (("authority.pem", 3650), ("phone-7.pem", 365)):
        ends = x509.load_pem_x509_certificate((phone / pem).read_bytes()).not_valid_after_utc
        assert round((ends - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(1)) == days


def test_no_party_s_key_is_made_beside_the_authority_s(tmp_path, authority):
    line = refusal(tmp_path, "request", authority, "--name", "phone-7")
    assert (
        line == f"error: {authority} is the authority's: a party makes its key on its own machine"
    )


def test_a_request_that_was_changed_on_the_way_is_not_signed(tmp_path, authority, csr):
    """Every byte of it in turn.

    One says how many bits at the end of the signature mean nothing: there a change may mean nothing
    either.
    """
    head, *body, foot = csr.read_bytes().splitlines()
    content = base64.b64decode(b"".join(body))
    changed, sent, opened = tmp_path / "changed.csr", Request.read(csr), []
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1
        changed.write_bytes(b"\n".join([head, base64.b64encode(flipped), foot]))
        try:
            opened.append(Request.read(changed))
        except ValueError as error:
            assert str(error).startswith(f"{changed}: ")
    assert len(opened) <= 1
    assert all((each.name, each.public_key) == (sent.name, sent.public_key) for each in opened)


def test_somebody_else_s_key_under_a_known_name_is_not_signed(tmp_path, authority, csr):
    """The public key of a request, exchanged for another; its signature is still the first one."""
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    public = [
        key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        for key in (Request.read(csr).public_key, other)
    ]
    request = x509.load_pem_x509_csr(csr.read_bytes())
    content = request.public_bytes(serialization.Encoding.DER)
    assert public[0] in content
    exchanged = x509.load_der_x509_csr(content.replace(*public))
    assert exchanged.public_key() == other
    csr.write_bytes(exchanged.public_bytes(serialization.Encoding.PEM))
    line = refusal(tmp_path, "sign", authority, csr, *NODE)
    assert line == f"error: {csr}: not signed with its own key: it was changed on the way"


@pytest.mark.parametrize(
    "key",
    [
        rsa.generate_private_key(65537, 2048),
        ec.generate_private_key(ec.SECP384R1()),
        ed25519.Ed25519PrivateKey.generate(),
    ],
    ids=["rsa", "p-384", "ed25519"],
)
def test_a_key_of_another_kind_is_not_signed(tmp_path, authority, key):
    hash_ = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    path = written(tmp_path, signed(key=key, hash_=hash_))
    assert refusal(tmp_path, "sign", authority, path, *NODE).endswith("not one of P-256")


def signed(*names, extension=None, key=None, hash_=None):
    """A request with these names, `phone-7` if there are none, and perhaps an extension."""
    oid = x509.NameOID.COMMON_NAME
    subject = x509.Name([x509.NameAttribute(oid, name) for name in names or ("phone-7",)])
    builder = x509.CertificateSigningRequestBuilder(subject)
    if extension is not None:
        builder = builder.add_extension(extension, critical=False)
    if key is None:
        key, hash_ = ec.generate_private_key(ec.SECP256R1()), hashes.SHA256()
    return builder.sign(key, hash_)


def written(place, request):
    path = place / "asked.csr"
    path.write_bytes(request.public_bytes(serialization.Encoding.PEM))
    return path


ROLE = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("urn:shufl:server:phone-7")])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (signed(extension=ROLE), "a request has a common name alone"),
        (signed(extension=x509.BasicConstraints(True, 0)), "a request has a common name alone"),
        (signed("phone-7", "phone-8"), "a request has a common name alone"),
        (signed("../phone-7"), "a name has 1 to 64 letters"),
        (signed("10:phone-7"), "a name has 1 to 64 letters"),
        (signed("authority"), "authority is the authority's own name"),
    ],
)
def test_a_request_for_more_than_a_name_is_not_signed(tmp_path, authority, request_, words):
    """The role, the users and the hosts are the authority's decision."""
    path = written(tmp_path, request_)
    assert words in refusal(tmp_path, "sign", authority, path, *NODE)


def test_a_name_is_used_once(tmp_path, authority, csr):
    assert keys("sign", authority, csr, *NODE).exit_code == 0
    assert keys("request", tmp_path / "other", "--name", "phone-7").exit_code == 0
    for again in (csr, tmp_path / "other" / "phone-7.csr"):
        line = refusal(tmp_path, "sign", authority, again, *NODE)
        assert line == f"error: {authority / 'phone-7.pem'} exists already"
    key = csr.with_suffix(".key")
    for moved, left in ((csr, key), (key, csr)):
        moved.rename(tmp_path / "kept elsewhere")
        line = refusal(tmp_path, "request", csr.parent, "--name", "phone-7")
        assert line == f"error: {left} exists already"
        (tmp_path / "kept elsewhere").rename(moved)
    assert "exists already" in refusal(tmp_path, "authority", authority)
    (authority / "authority.key").rename(tmp_path / "kept elsewhere")
    assert "authority.pem exists already" in refusal(tmp_path, "authority", authority)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--role=node",), "a node's certificate needs a number of users"),
        (("--role=node", "--users=-1"), "a node's certificate needs a number of users"),
        (("--role=node", "--users=1", "--host=a"), "a shuffler's certificate needs hosts"),
        (("--role=server", "--users=1"), "a node's certificate needs a number of users"),
        (("--role=server", "--shuffler=s"), "only a node's certificate names a shuffler"),
        ((*NODE, "--shuffler=s:t"), "a name has"),
        (("--role=monitor", "--host=a"), "a shuffler's certificate needs hosts"),
        (("--role=shuffler",), "a shuffler's certificate needs hosts"),
        (("--role=authority",), "an authority is issued by none"),
        (("--role=server", "--host=a"), "a shuffler's certificate needs hosts"),
    ],
)
def test_what_does_not_fit_the_role_is_not_signed(tmp_path, authority, csr, options, words):
    assert words in refusal(tmp_path, "sign", authority, csr, *options)


@pytest.mark.parametrize("days", ["0", "-1", "inf", "-inf", "nan", "1e9", "36501"])
def test_impossible_days_are_one_line(tmp_path, authority, csr, days):
    for command in (("authority", tmp_path / "new"), ("sign", authority, csr, *NODE)):
        line = refusal(tmp_path, *command, f"--days={days}")
        assert line.startswith("error: --days lies in (0, 36500], got ")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["", "a/b", "..", "authority", "é", "x" * 65])
def test_no_request_is_made_with_a_name_that_is_none(tmp_path, name):
    assert "name" in refusal(tmp_path, "request", tmp_path / "keys", f"--name={name}")
    assert not (tmp_path / "keys").exists()


def test_an_authority_whose_key_is_not_its_own_signs_nothing(tmp_path, authority, csr):
    assert keys("authority", tmp_path / "other").exit_code == 0
    shutil.copy(tmp_path / "other" / "authority.key", authority)
    line = refusal(tmp_path, "sign", authority, csr, *NODE)
    assert line == f"error: {authority / 'authority.key'}: not the key of authority.pem"
