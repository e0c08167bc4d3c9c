"""`shufl doctor`: looks whether a site of a deployment can do its part, and says what mends it."""

from __future__ import annotations

import datetime
import email.utils
import errno
import http.client
import importlib.metadata
import os
import re
import resource
import shutil
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from packaging.requirements import Requirement

from shufl.accounting import rounds_within_budget
from shufl.clients.device_ledger import RunOffered, read_device, runs_of
from shufl.deploy.deployment import LONGEST_SOCKET
from shufl.deploy.run_status import ask_health
from shufl.deploy.server_site import ServerSite, flower_connection
from shufl.deploy.site_files import NodeSite, load_site, role_of
from shufl.deploy.site_templates import changed
from shufl.learning.config import load
from shufl.learning.your_code import make_importable, one_line
from shufl.protocol import shuffler_of
from shufl.protocol.validation import ConfigError, read_toml
from shufl.shuffler import Credentials, Refusal, ShufflerRefused, ShufflerUnavailable
from shufl.shuffler.callers import Role, caller_of
from shufl.shuffler.config import load_config
from shufl.shuffler.credentials import read_certificate, renew_from
from shufl.shuffler.wire.channel import parse_address, probe

_EXTRAS = {"node": ("node",), "server": ("node", "server")}  # what a role installs with shufl
_ETC = Path("/etc")
_LEAST_FREE = 10**9
_LEAST_DESCRIPTORS = 4096
_TAKEN = {
    "shuffler": ", and systemctl kill --signal HUP {unit}-shuffler",
    "server": " (superlink: nginx -s reload; and restart {unit}-superlink when no run goes on)",
    "node": "",
}
_SET_CLOCK = "systemctl enable --now systemd-timesyncd"
_TRUSTING = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # where the clock is wrong nothing is valid
_TRUSTING.check_hostname, _TRUSTING.verify_mode = False, ssl.CERT_NONE
_ANY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the same for gRPC, which asks for a protocol
_ANY.check_hostname, _ANY.verify_mode = False, ssl.CERT_NONE
_ANY.set_alpn_protocols(["h2", "http/1.1"])
_LOCAL = {"": "127.0.0.1", "*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "localhost"}
_OTHER_HOST = 62  # X509_V_ERR_HOSTNAME_MISMATCH
_MOST_AHEAD, _MOST_BEHIND = 3.0, 60.0  # seconds; Flower refuses 5 and 305
_SECONDS = 5.0


@dataclass(frozen=True)
class Finding:
    """What one look found.

    Attributes:
        what: what was looked at.
        trouble: what is wrong; empty: nothing.
        fix: the command or the action that mends it.
    """

    what: str
    trouble: str = ""
    fix: str = ""


class _Trouble(Exception):
    """What is wrong, and what mends it."""

    def __init__(self, trouble: str, fix: str = ""):
        super().__init__(trouble)
        self.fix = fix


class _Examination:
    """Looks at one thing after another; each is a `with` block that raises what is wrong."""

    def __init__(self, folder: Path, role: str):
        self.findings: list[Finding] = []
        self._folder, self._keys, self._role = folder, folder / "keys", role
        self._plays_code = False

    @contextmanager
    def look(self, what: str, fix: str = "") -> Iterator[list[str]]:
        """Adds a finding when the block ends; a `_Trouble`'s own fix replaces `fix`.

        What the block adds to the list is shown after `what`.
        """
        shown = [what]
        try:
            yield shown
            trouble = ""
        except _Trouble as error:
            trouble, fix = one_line(error), error.fix or fix
        except ModuleNotFoundError as error:
            trouble, fix = f"{error.name} is needed to look, and missing", self._install
        except (OSError, ValueError, http.client.HTTPException) as error:
            trouble = one_line(error)
        self.findings.append(Finding(" ".join(shown), trouble, fix if trouble else ""))

    @property
    def _install(self) -> str:
        what = f"'.[{self._role}]'" if self._role in _EXTRAS else "."
        return f"pip install --constraint constraints.txt {what} in shufl's repository"

    def machine(self) -> None:
        """What every site needs."""
        with self.look("versions", self._install):
            _check_versions(self._role)
        self._disk("disk", self._folder)
        with self.look("descriptors", "LimitNOFILE=65536 in the unit, or `ulimit -Hn` as root"):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if 0 <= hard < _LEAST_DESCRIPTORS:
                raise _Trouble(
                    f"{hard} open files are allowed, at least {_LEAST_DESCRIPTORS} are needed"
                )

    def root(self) -> None:
        """What root runs or reads of this folder: as this release makes it, installed, loaded.

        Code of the folder is played only if it is so, and by the account alone that has the folder.
        """
        fix = "read what is different, and why: root runs it; or have it made anew"
        with self.look("files for root", fix):
            for each in changed(self._folder, self._role):
                raise _Trouble(f"not as this release makes them: {each}")
            self._plays_code = os.geteuid() == self._folder.stat().st_uid
            unit = next(self._folder.glob("*.service")).read_text()
            (place,) = re.findall("^WorkingDirectory=(.+)$", unit, re.MULTILINE)
            if place != str(self._folder):
                fix = f"copy it to {place}, and ask there"
                raise _Trouble(f"they are for the folder {place}, this is {self._folder}", fix)
        if self._plays_code:
            make_importable([self._folder])
        prefix, nginx = self._folder.name, "conf.d" if self._role == "server" else "shufl"
        own = {path: f"systemd/system/{path.name}" for path in self._folder.glob("*.service")}
        own[rules := self._folder / "nftables.conf"] = f"shufl/{prefix}.nft"
        own[self._folder / "nginx.conf"] = f"nginx/{nginx}/{prefix}.conf"
        installed = {path: _ETC / place for path, place in own.items() if path.exists()}
        if not any(place.exists() for place in installed.values()):
            return  # not yet, or a container
        with self.look("installed files", "sudo sh install.sh; then restart what has changed"):
            for path, place in installed.items():
                text = path.read_text()
                if path.name == "nginx.conf" and self._role == "shuffler":  # as install.sh has it
                    text = re.sub(r"^(stream \{|\})\n", "", text, flags=re.MULTILINE)
                if place.read_text().rstrip("\n") != text.rstrip("\n"):
                    raise _Trouble(f"{place} is not what {path} says")
        if rules in installed:
            with self.look("firewall", f"sudo nft --file {installed[rules]}"):
                _check_loaded(rules.read_text())

    def _check_code(self, names: Sequence[str]) -> None:
        if own := [name for name in names if ":" in name and not self._plays_code]:
            why = "which runs where files for root are ok, and as the folder's owner alone"
            again = "after install.sh, sudo -u shufl .venv/bin/shufl doctor ."
            raise _Trouble(f"not looked at: {own[0]} is code, {why}", again)

    def _disk(self, what: str, path: Path) -> None:
        with self.look(what, f"make room on the disk of {path}"):
            there = next(each for each in (path, *path.parents) if each.exists())
            if (free := shutil.disk_usage(there).free) < _LEAST_FREE:
                raise _Trouble(f"{free / 1e9:.2f} GB are free, at least 1 GB are needed")

    def server(self) -> None:
        """The server's site."""
        _, address = flower_connection(self._folder)
        self._certificate("server", Role.SERVER, 0)
        self._days("superlink", "SuperLink's certificate")
        self._plan()
        with self.look("test records", "put back what data.dataset in run.toml names"):
            from shufl.learning.data.datasets import load_dataset

            config = load(str(self._folder / "run.toml"))
            self._check_code(config.own_code)
            load_dataset(config.data.dataset)
        site = load_site(self._folder / "server.toml", ServerSite)
        with self.look("nodes", "put back what `shufl provision` wrote to nodes"):
            if not site.agreed:
                raise _Trouble("no node was agreed")
        with self.look("nodes at Flower", "shufl register, once the SuperLink runs"):
            if new := [each.name for each in site.agreed.values() if each.flower is None]:
                raise _Trouble(f"the SuperLink was not told of {', '.join(new)}")
        self._shufflers(site, site.shufflers)
        self._superlink(address, f"systemctl start {self._folder.name}-superlink")
        self._nginx("superlink")

    def shuffler(self) -> None:
        """A shuffler's site."""
        path = self._folder / "shuffler.toml"
        try:
            name = Path(read_toml(path)["tls"]["certificate"]).stem
        except (KeyError, TypeError):
            load_config(path)  # which says what is wrong
            raise
        self._key_pair(name)
        self._days(name)
        config = None
        with self.look("configuration", f"mend {path}"):
            config = load_config(path)
            if config.tls.revoked is not None:
                config.tls.revoked.read_text()
        if config is None:
            return
        if config.directory is not None:
            self._disk("disk of the reports", config.directory)
        host, port, *_ = parse_address(config.listen)
        if port == 0:  # whatever is free, as in a simulation
            return
        with self.look("port", f"systemctl status {self._folder.name}-shuffler; or another port"):
            try:
                probe(host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                self._check_presented(host, port, name)
            else:
                fix = f"systemctl start {self._folder.name}-shuffler"
                raise _Trouble(f"nobody listens at {config.listen}", fix)
        if not self.findings[-1].trouble:
            self._nginx(name)

    def node(self) -> None:
        """A node's site."""
        site = load_site(self._folder / "node.toml", NodeSite)
        self._certificate(Path(site.certificate).stem, Role.NODE, site.users)
        with self.look("key for Flower", "shufl keys flower keys"):
            _check_private(self._keys / "flower.key")
        self._plan()
        with self.look("model and records", "mend the records, or data in node.toml") as shown:
            from shufl.deploy.node import NodeWork, users_told

            self._check_code([*load(site.config).own_code, site.data])
            work = NodeWork.checked(site, self._folder)
            shown.append(f"of {users_told(site, work.config)}")
            with self.look("link") as shown:
                shown.append(f"must carry {work.link():.2g} Mbit/s")
            fix = "a longer window.work_until, or mend data in node.toml"
            with self.look("work", fix) as shown:
                shown.append(f"needs a window.work_until of {work.seconds():.2g} s")
        accept = f"shufl device accept {site.config} {self._folder}"
        fix = f"nothing, if no further run is meant; else {accept}, if its owner agrees"
        with self.look("owner's limits", fix):
            _check_limits(site)
        with self.look("socket", "move the folder to a shorter path, such as /srv/shufl"):
            if (length := len(site.socket)) > LONGEST_SOCKET:
                raise _Trouble(
                    f"{site.socket} has {length} characters, {LONGEST_SOCKET} are allowed"
                )
            with socket.socket(socket.AF_UNIX) as own:
                try:
                    own.connect(site.socket)
                except (FileNotFoundError, ConnectionRefusedError) as error:
                    fix = f"sudo systemctl start {self._folder.name}-node"
                    raise _Trouble("this node's own process is not running", fix) from error
        self._shufflers(site, [site.shufflers[shuffler_of(site.number, len(site.shufflers))]])
        fix = "check superlink in node.toml; ask who runs the server: SuperLink, nginx, firewall"
        self._superlink(site.superlink, fix)

    def _nginx(self, name: str) -> None:
        """Looks whether this site's key answers where its nginx listens, if it has one."""
        if not (path := self._folder / "nginx.conf").exists():
            return
        with self.look("nginx", "nginx -t, and systemctl restart nginx"):
            found = re.findall(r"^\s*listen\s+(?:(\S+):)?(\d+)\b", path.read_text(), re.MULTILINE)
            trouble = _Trouble(f"no line of {path} says where it listens", f"look at {path}")
            for host, port in found:  # one of them may be for something else
                try:
                    self._check_presented(_LOCAL.get(host, host.strip("[]")), int(port), name)
                except _Trouble as error:
                    trouble = error
                else:
                    return
            raise trouble

    def _check_presented(self, host: str, port: int, name: str) -> None:
        """Refuses another program in the place of this site's: whoever has not its key."""
        own = read_certificate(self._keys / f"{name}.pem")
        asked = host
        for each in own.extensions:  # nginx may serve others at the port
            if isinstance(each.value, x509.SubjectAlternativeName):
                asked = next(iter(each.value.get_values_for_type(x509.DNSName)), host)
        try:
            plain = socket.create_connection((host, port), _SECONDS)
        except OSError as error:
            raise _Trouble(f"nobody answers at port {port}: {error.strerror or error}") from error
        try:
            with plain, _ANY.wrap_socket(plain, server_hostname=asked) as tls:
                presented = tls.getpeercert(binary_form=True)
        except OSError as error:
            raise _Trouble(f"no certificate comes from port {port}: {one_line(error)}") from error
        assert presented is not None
        if x509.load_der_x509_certificate(presented).public_key() != own.public_key():
            raise _Trouble(f"another program has port {port}: it has not the key of {name}.pem")

    def _certificate(self, name: str, role: Role, users: int) -> None:
        self._key_pair(name)
        path, fix = self._keys / f"{name}.pem", self._renew(name)
        with self.look("certificate's role", fix):
            caller = caller_of(path.read_bytes())
            if caller is None or (caller.role, caller.users) != (role, users):
                found = f"for a {caller.role} of {caller.users} users" if caller else "none of ours"
                raise _Trouble(f"{path} is {found}, it must be for a {role} of {users} users")
        self._days(name)

    def _key_pair(self, name: str) -> None:
        request, certificate = (self._keys / f"{name}.{kind}" for kind in ("csr", "pem"))
        with self.look("keys", self._renew(name)):
            if request.exists() and not certificate.exists():
                fix = f"send {request} to whoever provisions, and put the {name}.pem there"
                raise _Trouble(f"{certificate} has not come back yet", fix)
            try:
                Credentials.read(self._keys, name)
            except ValueError as error:
                if "not issued by" not in str(error):
                    raise
                fix = "put the authority.pem of the authority that signed it back, as `shufl "
                fix += f"provision` wrote it; if there is a new authority, {self._renew(name)}"
                raise _Trouble(str(error), fix) from error
            _check_private(self._keys / f"{name}.key")

    def _renew(self, name: str) -> str:
        ask = "renew" if (self._keys / f"{name}.key").exists() else "request"
        return (
            f"shufl keys {ask} {self._keys} --name {name}; send {name}.csr to whoever provisions, "
            f"and put the {name}.pem that comes back in place of the old one"
            + _TAKEN[self._role].format(unit=self._folder.name)
        )

    def _days(self, name: str, what: str = "certificate's days") -> None:
        """Looks whether a certificate is valid, and for how long."""
        path, fix = self._keys / f"{name}.pem", self._renew(name)
        with self.look(what, fix):
            certificate, now = read_certificate(path), datetime.datetime.now(datetime.UTC)
            begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            if not begins <= now <= ends:
                raise _Trouble(
                    f"{path} is valid from {begins:%F %T} to {ends:%F %T}, here it is {now:%F %T}",
                    f"{_SET_CLOCK}, if that is not the time; else {fix}",
                )
            if now > renew_from(certificate):
                raise _Trouble(f"{path} is valid for {(ends - now).days} days more")

    def _plan(self) -> None:
        with self.look("plan", "put run.toml back as `shufl provision` made it"):
            from shufl.deploy.node import agreed_plan  # it needs torch

            agreed_plan(load(str(self._folder / "run.toml")))

    def _shufflers(self, site: ServerSite | NodeSite, addresses: Sequence[str]) -> None:
        for address in addresses:
            fix = f"check shufflers in {self._role}.toml; ask who runs it; its firewall, and yours"
            with self.look(f"shuffler {address}", fix):
                try:
                    ask_health(address, site.credentials)
                except ConfigError as error:  # of files here
                    raise _Trouble(str(error), "as above") from error
                except ShufflerRefused as error:
                    if error.reason is Refusal.STORAGE_FULL:
                        raise _Trouble(str(error), "ask who runs it to make room") from error
                    fix = "it is withdrawn there, has ended (see above), or names another shuffler"
                    why = f"takes no calls with this certificate: {error}"
                    raise _Trouble(why, f"ask who runs it: {fix}") from error
                except ShufflerUnavailable as error:
                    raise _Trouble(str(error), self._remedy(str(error))) from error

    def _remedy(self, refused: str) -> str:
        """What mends TLS, by the text of its error; empty: the error is another one."""
        if "expired" in refused or "not yet valid" in refused:
            return f"{_SET_CLOCK}, if this clock is wrong; else its certificate has to be renewed"
        if "certificate" in refused.lower():
            return "put the authorities' certificates in keys, as `shufl provision` wrote them"
        if any(each.trouble and "certificate" in each.what for each in self.findings):
            return "as above: it ends calls whose certificate is not valid"
        return ""

    def _superlink(self, address: str, fix: str) -> None:
        with self.look(f"SuperLink {address}", fix):
            authority = str(self._keys / "flower-authority.pem")
            try:
                _answer_date(address, ssl.create_default_context(cafile=authority))
            except ssl.SSLCertVerificationError as error:
                remedy = self._remedy(error.verify_message)
                if error.verify_code == _OTHER_HOST:
                    remedy = "server.host in deployment.toml must be the name that nodes use"
                raise _Trouble(f"its certificate: {error.verify_message}", remedy) from error
        with self.look("clock", "as above"):
            before = datetime.datetime.now(datetime.UTC)
            theirs = _answer_date(address, _TRUSTING)
            ahead = (before - theirs).total_seconds() - 1.0  # their answer has whole seconds
            behind = (theirs - datetime.datetime.now(datetime.UTC)).total_seconds()
            if ahead > _MOST_AHEAD:
                raise _Trouble(f"{ahead:.0f} s ahead of the SuperLink's machine", _SET_CLOCK)
            if behind > _MOST_BEHIND:
                raise _Trouble(f"{behind:.0f} s behind the SuperLink's machine", _SET_CLOCK)


def examine(folder: Path) -> list[Finding]:
    """Looks at everything that a site needs."""
    role = role_of(folder)
    examination = _Examination(folder.absolute(), role)
    examination.machine()
    examination.root()
    getattr(examination, role)()
    return examination.findings


def _check_versions(role: str) -> None:
    extras = ("", *_EXTRAS.get(role, ()))
    for text in importlib.metadata.requires("shufl") or []:
        wanted = Requirement(text)
        if wanted.marker and not any(wanted.marker.evaluate({"extra": each}) for each in extras):
            continue
        needed = f"a {role} needs {wanted.name}{wanted.specifier}"
        try:
            installed = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            raise _Trouble(f"{wanted.name} is not installed, {needed}") from None
        if not wanted.specifier.contains(installed, prereleases=True):
            raise _Trouble(f"{wanted.name} {installed} is installed, {needed}")


def _check_loaded(rules: str) -> None:
    """Asks the firewall itself, for only root may read it: some version of these rules is loaded.

    The rule that answers proves itself alone, and not those beside it.
    """
    probed = re.search(r"ip daddr (\S+) tcp dport (\d+) reject", rules)
    if probed is None:
        raise _Trouble("nftables.conf has no rule that answers", "have it made anew")
    try:
        socket.create_connection((probed[1], int(probed[2])), _SECONDS).close()
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return
    raise _Trouble("its rules are not loaded: every account here can submit code to Flower")


def _check_private(path: Path) -> None:
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        raise _Trouble(f"{path} is readable for others, mode {mode:04o}", f"chmod 600 {path}")


def _check_limits(site: NodeSite) -> None:
    from shufl.deploy.node import agreed_plan

    (path, limits), plan = read_device(Path(site.device)), agreed_plan(load(site.config))
    runs = runs_of(path, limits)
    limits.check(plan, runs)
    if new := not any(run.plan == plan and run.offered < run.allotted for run in runs):
        runs.append(RunOffered(len(runs) + 1, "", plan, rounds_within_budget(plan)))
    limits.check_runs(runs, new)


def _answer_date(address: str, tls: ssl.SSLContext) -> datetime.datetime:
    """The time on the SuperLink's machine."""
    host, port, *_ = parse_address(address)
    connection = http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=tls)
    try:
        connection.request("GET", "/")
        date = connection.getresponse().headers["Date"]
    finally:
        connection.close()
    return email.utils.parsedate_to_datetime(date)
