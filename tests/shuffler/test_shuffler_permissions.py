"""Who may call what; and TLS that is not what it should be."""

import signal
import ssl

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from ports import free_port
from run_world import LIMIT, wait_until
from shuffler_world import (
    ACCEPTED,
    KEY_DIGEST,
    METHODS,
    PUBLIC_KEY,
    REPORT_BYTES,
    ShufflerHere,
    World,
    listening,
    pass_days,
    plan,
    raw_channel,
    refusal,
    scrape,
    shuffler_of,
)
from shufl.protocol.files import write_whole
from shufl.shuffler import (
    ControlClient,
    Credentials,
    IntakeClient,
    Outcome,
    Refusal,
    RoundHeader,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)
from shufl.shuffler.callers import Caller, Revoked, Role, caller_of
from shufl.shuffler.keys import Authority, Request
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.connection import method_of

AUTHORITY = Authority.create()
SUBMIT, CHECK = "/shufl.v1.Intake/Submit", "/grpc.health.v1.Health/Check"
END_RUN = "/shufl.v1.Control/EndRun"
NODES = {method for method in METHODS if "Control" not in method}
SERVERS = {method for method in METHODS if "Intake" not in method}
ALLOWED = {"node": NODES, "server": SERVERS, "monitor": {CHECK}}
"""For each role, the calls that are let through."""


@pytest.fixture(scope="module")
def guarded():
    with ShufflerHere(authority=AUTHORITY) as shuffler:
        world = World(shuffler)
        yield world
        world.close()


def credentials(role, authority=AUTHORITY, **options):
    options.setdefault("users", 10 if role == "node" else 0)
    options.setdefault("hosts", ["127.0.0.1"] if role == "shuffler" else ())
    return authority.issue(Role(role), f"a-{role}", **options)


def attempt(channel, call):
    """The status that a call ends with."""
    try:
        list(channel.stream_stream(call)(iter([METHODS[call].SerializeToString()]), timeout=LIMIT))
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def is_let_through(channel, call):
    status = attempt(channel, call)
    assert status is not grpc.StatusCode.UNAVAILABLE
    return status is not grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("role", ALLOWED)
def test_each_role_may_make_its_own_calls_and_no_others(guarded, role):
    with raw_channel(guarded, credentials(role)) as channel:
        assert {call for call in METHODS if is_let_through(channel, call)} == ALLOWED[role]


@pytest.mark.parametrize(
    ("uri", "call", "good"),
    [
        ("urn:shufl:node:10:a", SUBMIT, True),
        ("urn:shufl:node:10:a:shuffler:b", SUBMIT, False),
        ("urn:shufl:node:10", SUBMIT, False),
        ("urn:shufl:node:10:a:", SUBMIT, False),
        ("urn:shufl:server:a:b", END_RUN, False),
        ("urn:shufl:server:10:a", END_RUN, False),
    ],
)
def test_a_certificate_that_says_more_than_it_should_is_nobody_s(
    guarded, monkeypatch, uri, call, good
):
    monkeypatch.setattr("shufl.shuffler.keys.uri_of", lambda *about: uri)
    issued = credentials("node")
    assert (caller_of(issued.certificate) is not None) == good
    with raw_channel(guarded, issued) as channel:
        assert is_let_through(channel, call) == good


@pytest.mark.parametrize("call", [SUBMIT, CHECK])
def test_a_node_may_call_the_shuffler_that_its_certificate_names_alone(guarded, call):
    for name in ("shuffler", "shuffler-2"):
        node = credentials("node", shuffler=name)
        assert caller_of(node.certificate) == Caller(Role.NODE, "a-node", 10, name)
        with raw_channel(guarded, node) as channel:
            assert is_let_through(channel, call) == (name == "shuffler")


def of_a_stranger():
    other = credentials("node", Authority.create())
    return Credentials(AUTHORITY.certificate, other.certificate, other.private_key)


STRANGERS = {
    "no certificate": lambda world: grpc.secure_channel(
        world.process.address, grpc.ssl_channel_credentials(AUTHORITY.certificate)
    ),
    "no TLS": lambda world: grpc.insecure_channel(world.process.address),
    "the shuffler's own": lambda world: raw_channel(world, credentials("shuffler")),
    "of another authority": lambda world: raw_channel(world, of_a_stranger()),
    "expired": lambda world: raw_channel(world, credentials("node", days=-1)),
    "expired server": lambda world: raw_channel(world, credentials("server", days=-1)),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_no_call_of_a_stranger_arrives(guarded, stranger):
    with STRANGERS[stranger](guarded) as channel:
        for call in METHODS:
            assert attempt(channel, call) is grpc.StatusCode.UNAVAILABLE, call


@pytest.mark.parametrize(
    "wrong", ["authority", "name", "expired", "role"], ids=lambda wrong: f"wrong-{wrong}"
)
def test_clients_refuse_a_shuffler_that_is_not_the_one(wrong):
    issued = {
        "authority": lambda: credentials("shuffler", Authority.create()),
        "name": lambda: credentials("shuffler", hosts=["127.0.0.2", "elsewhere.example"]),
        "expired": lambda: credentials("shuffler", days=-1),
        "role": lambda: credentials("node"),
    }[wrong]()
    shuffler = ShufflerHere(authority=AUTHORITY)
    shuffler._own = Credentials(AUTHORITY.certificate, issued.certificate, issued.private_key)
    with (
        shuffler,
        ControlClient(shuffler.address, credentials("server")) as control,
        IntakeClient(shuffler.address, credentials("node"), timeout=0.1) as intake,
    ):
        with pytest.raises(ShufflerUnavailable):
            control.create_run("run", plan(), REPORT_BYTES)
        header = RoundHeader("run", 1, "model 1", "0" * 64, KEY_DIGEST)
        with pytest.raises(ShufflerUnavailable):
            list(intake.submit(header, [(0, bytes(REPORT_BYTES))]))


def test_a_credential_reports_for_its_own_users_and_each_once(guarded):
    header = guarded.begin("users", minimum_batch=3, users=4)
    nodes = [AUTHORITY.issue(Role.NODE, name, users=2) for name in ("a", "b", "c")]
    verdicts = []
    for node in nodes:
        with IntakeClient(guarded.process.address, node) as intake:
            reports = [(user, bytes(REPORT_BYTES)) for user in (0, 0, 1, 2)]
            found = list(intake.submit(header, reports))
            verdicts.append([*sorted(found[:2]), *found[2:]])  # either of a user's may come first
    two = [Verdict.ACCEPTED, Verdict.DUPLICATE, Verdict.ACCEPTED, Verdict.BAD_SENDER]
    full = [Verdict.ROUND_FULL, Verdict.ROUND_FULL, Verdict.ROUND_FULL, Verdict.BAD_SENDER]
    assert verdicts == [two, two, full]
    # The same credential again, or a copy of its certificate: still the same sender.
    with IntakeClient(guarded.process.address, nodes[0]) as intake:
        assert list(intake.submit(header, [(1, bytes(REPORT_BYTES))])) == [Verdict.DUPLICATE]
    assert len(guarded.released(header)) == 4


def test_a_certificate_that_expires_is_nobody_s_on_an_open_connection_too(guarded, monkeypatch):
    node, server = credentials("node", days=1), credentials("server", days=1)
    header = guarded.begin("expiry")

    def reports():
        before = guarded.process.scrape()[ACCEPTED]
        yield 0, bytes(REPORT_BYTES)
        wait_until(lambda: guarded.process.scrape()[ACCEPTED] > before, LIMIT, "the first report")
        pass_days(monkeypatch, 1)
        yield 1, bytes(REPORT_BYTES)

    with (
        IntakeClient(guarded.process.address, node) as intake,
        ControlClient(guarded.process.address, server) as control,
    ):
        control.create_run("expiry-2", plan(), REPORT_BYTES)
        for call in (
            lambda: list(intake.submit(header, reports())),
            lambda: control.create_run("expiry-3", plan(), REPORT_BYTES),
            lambda: list(intake.submit(header, [(2, bytes(REPORT_BYTES))])),
        ):
            assert refusal(call) is Refusal.NOT_PERMITTED


def test_a_certificate_names_its_key_and_the_authority_s():
    """Without them Python 3.13 trusts none."""
    own, authority = (
        x509.load_pem_x509_certificate(pem).extensions
        for pem in (credentials("shuffler").certificate, AUTHORITY.certificate)
    )
    signed_by = own.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    ours, theirs = (
        each.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
        for each in (own, authority)
    )
    assert signed_by == theirs != ours


@pytest.mark.parametrize("host", ["", "a/b", "/", "a b", "a:9000", "http://a", "é", "a..b", "-a"])
def test_a_host_is_a_name_or_an_address(host):
    with pytest.raises(ValueError, match="a host is a DNS name or an IP address"):
        credentials("shuffler", hosts=[host])
    credentials("shuffler", hosts=["localhost", "a-b.example", "*.example", "::1", "10.0.0.1"])


def test_no_certificate_outlives_its_authority():
    short = Authority.create(days=2)
    (loaded, issuer) = (
        x509.load_pem_x509_certificate(pem)
        for pem in (credentials("node", short, days=30).certificate, short.certificate)
    )
    assert loaded.not_valid_after_utc == issuer.not_valid_after_utc
    with pytest.raises(ValueError, match="the authority expired on"):
        credentials("node", Authority.create(days=-1))


def opened(control):
    """Of the first round of a run."""
    digest = control.create_run("run", plan(), REPORT_BYTES)
    nonce = control.open_round("run", 1, "m", PUBLIC_KEY)
    return RoundHeader("run", 1, "m", digest, KEY_DIGEST, nonce)


def hang_up(child, log, event):
    """SIGHUP; waits until the shuffler has logged this once more."""
    known = log.read_text().count(event)
    child.send_signal(signal.SIGHUP)
    wait_until(lambda: log.read_text().count(event) > known, LIMIT, event)


WITH_REVOKED = """directory = "directory"
log_file = "log"
[tls]
certificate = "shuffler.pem"
key = "shuffler.key"
authority = "authority.pem"
revoked = "revoked"
"""


@pytest.mark.slow
def test_a_withdrawn_credential_is_nobody_s_on_an_open_connection_too(tmp_path):
    config, revoked, log = tmp_path / "c.toml", tmp_path / "revoked", tmp_path / "log"
    metrics = f"127.0.0.1:{free_port()}"
    config.write_text(f'metrics = "{metrics}"\n{WITH_REVOKED}')
    credentials("shuffler").write(tmp_path, "shuffler")
    revoked.write_text("# nobody yet\n\n")
    phone, other, server, renewed = (
        credentials("node"),
        AUTHORITY.issue(Role.NODE, "other", users=10),
        credentials("server"),
        credentials("server"),  # renewed: of the same name
    )
    now = [server]
    with shuffler_of(config) as child:
        address = listening(child)

        def withdraw(*lines, event):
            revoked.write_text("".join(f"{line}\n" for line in lines))
            hang_up(child, log, event)

        def refused(call, *arguments):
            assert refusal(call, *arguments) is Refusal.NOT_PERMITTED

        with (
            ControlClient(address, server) as control,
            ControlClient(address, lambda: now[0]) as later,
            IntakeClient(address, phone) as intake,
            IntakeClient(address, other) as others,
            IntakeClient(address, credentials("node")) as again,
        ):
            header = opened(control)
            withdrawn = phone.fingerprint.upper()
            withdrawn = ":".join(withdrawn[at : at + 2] for at in range(0, 64, 2))

            def reports():
                yield 0, bytes(REPORT_BYTES)
                wait_until(lambda: scrape(metrics)[ACCEPTED], LIMIT, "the first report")
                withdraw(withdrawn, event="credentials read: 1")
                yield 1, bytes(REPORT_BYTES)

            verdicts = []
            refused(verdicts.extend, intake.submit(header, reports()))
            assert verdicts == [Verdict.ACCEPTED]
            refused(intake.submit, header, [(2, bytes(REPORT_BYTES))])
            accepted = [Verdict.ACCEPTED]
            assert list(others.submit(header, [(0, bytes(REPORT_BYTES))])) == accepted
            # Another certificate of the same name is still good.
            assert list(again.submit(header, [(3, bytes(REPORT_BYTES))])) == accepted
            under_way = method_of(later.connected(), "Control", "CloseRound")
            withdraw("a-node", server.fingerprint, event="credentials read: 2")
            refused(again.submit, header, [(4, bytes(REPORT_BYTES))])
            refused(control.close_round, "run", 1)
            now[0] = renewed
            with pytest.raises(ShufflerUnavailable, match="another now"), later.errors():
                under_way(shuffler_pb2.CloseRoundRequest(run_id="run", round=1))
            withdraw("other", "a b", event="line 2: not a credential's name")
            assert "a b" not in log.read_text()
            revoked.unlink()
            hang_up(child, log, "withdrawn credentials not read, those before stay: ")
            assert list(others.submit(header, [(1, bytes(REPORT_BYTES))])) == accepted
            refused(control.close_round, "run", 1)
            assert later.close_round("run", 1).outcome is Outcome.RELEASABLE


@pytest.mark.slow
def test_renewed_certificates_are_taken_while_a_round_is_open(tmp_path):
    """The shuffler's at SIGHUP, a client's at its next call; one that is damaged is not."""
    config, revoked, log = (tmp_path / name for name in ("c.toml", "revoked", "log"))
    config.write_text(WITH_REVOKED)
    credentials("shuffler").write(tmp_path, "shuffler")
    revoked.write_text("")
    before = credentials("node")
    before.write(tmp_path, "a-node")
    with shuffler_of(config) as child:
        address = listening(child)

        def renew(name, role, **options):
            request = Request.renew(tmp_path, name)
            write_whole(tmp_path / f"{name}.pem", AUTHORITY.sign(request, role, **options))
            return (tmp_path / f"{name}.pem").read_bytes()

        def shown():
            host, port = address.split(":")
            pem = ssl.get_server_certificate((host, int(port)))
            return x509.load_pem_x509_certificate(pem.encode()).fingerprint(hashes.SHA256())

        with (
            ControlClient(address, credentials("server")) as control,
            IntakeClient(address, lambda: Credentials.read(tmp_path, "a-node")) as intake,
        ):
            header = opened(control)

            def submit(user):
                return list(intake.submit(header, [(user, bytes(REPORT_BYTES))]))

            assert submit(0) == [Verdict.ACCEPTED]
            renewed = renew("a-node", Role.NODE, users=10)
            revoked.write_text(before.fingerprint + "\n")
            hang_up(child, log, "credentials read: 1")
            assert submit(1) == [Verdict.ACCEPTED]
            (tmp_path / "a-node.pem").write_bytes(renewed[:100])
            assert submit(2) == [Verdict.ACCEPTED]
            own = x509.load_pem_x509_certificate((tmp_path / "shuffler.pem").read_bytes())
            assert shown() == own.fingerprint(hashes.SHA256())
            theirs = renew("shuffler", Role.SHUFFLER, hosts=["127.0.0.1"])
            hang_up(child, log, "another certificate read, valid until")
            assert shown() == x509.load_pem_x509_certificate(theirs).fingerprint(hashes.SHA256())
            assert shown() != own.fingerprint(hashes.SHA256())
            (tmp_path / "shuffler.pem").write_bytes(theirs[:100])
            hang_up(child, log, "certificate not read, the one before stays: ")
            assert shown() == x509.load_pem_x509_certificate(theirs).fingerprint(hashes.SHA256())
            write_whole(tmp_path / "a-node.pem", renewed)
            assert submit(3) == [Verdict.ACCEPTED]
            with pytest.raises(ShufflerRefused), IntakeClient(address, before) as old:
                list(old.submit(header, [(4, bytes(REPORT_BYTES))]))
            assert control.close_round("run", 1).outcome is Outcome.RELEASABLE
            another = Authority.create()
            for name in ("authority.pem", "shuffler.pem", "shuffler.key"):
                (tmp_path / name).unlink()
            its_own = another.issue(Role.SHUFFLER, "shuffler", hosts=["127.0.0.1"])
            its_own.write(tmp_path, "shuffler")
            hang_up(child, log, "another certificate read, valid until")
            # Its connection is open.
            assert refusal(control.end_round, "run", 1) is Refusal.NOT_PERMITTED
            with ControlClient(address, another.issue(Role.SERVER, "server")) as later:
                later.create_run("another", plan(), REPORT_BYTES)


def test_a_fingerprint_withdraws_however_it_is_written(tmp_path):
    caller = caller_of(credentials("node").certificate)
    with_colons = ":".join(caller.fingerprint[at : at + 2] for at in range(0, 64, 2))
    for written in (caller.fingerprint, with_colons):
        for line in (written, written.upper()):
            (tmp_path / "revoked").write_text(f" {line}\r\n")
            assert caller in Revoked(tmp_path / "revoked")


SHA_1 = b":".join([b"AB"] * 20)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "revoked"),
        (b"a/b", "revoked, line 1: "),
        (b"phone-7\n" + SHA_1, "revoked, line 2: "),
        (b"a:b", "revoked, line 1: "),
    ],
)
def test_a_list_of_withdrawn_credentials_that_cannot_be_read_is_one_line(
    command, tmp_path, content, words
):
    credentials("shuffler").write(tmp_path, "shuffler")
    if content is not None:
        (tmp_path / "revoked").write_bytes(content)
    refused = command(WITH_REVOKED, tls=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert words in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert "AB" not in refused.stderr
    assert not (tmp_path / "directory").exists()
