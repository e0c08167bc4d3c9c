"""`shufl doctor`: looks whether a site of a deployment can do its part, and says what mends it."""

from __future__ import annotations

import datetime
import email.utils
import errno
import http.client
import importlib.metadata
import resource
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from shufl.accounting import rounds_within_budget
from shufl.accounting.validation import read_toml
from shufl.clients.device import DeviceLedger, RunOffered, read_device
from shufl.deploy.plan import LONGEST_SOCKET
from shufl.deploy.sites import NodeSite, ServerSite, load_site
from shufl.deploy.status import health_of
from shufl.shuffler import Credentials
from shufl.shuffler.callers import Role, caller_of
from shufl.shuffler.config import load_config
from shufl.shuffler.keys import read_certificate
from shufl.shuffler.wire.channel import parse_address
from shufl.simulator.config import load
from shufl.simulator.section import ConfigError, one_line

_EXTRAS = {"node": ("node",), "server": ("node", "server")}  # what a role installs with shufl
_LEAST_DAYS = 14
_LEAST_FREE = 10**9
_LEAST_DESCRIPTORS = 4096
_MOST_AHEAD, _MOST_BEHIND = 3.0, 60.0  # seconds; Flower refuses 5 and 305
_SECONDS = 5.0


@dataclass(frozen=True)
class Finding:
    """What one look found.

    Attributes:
        what: was looked at.
        trouble: what is wrong; empty: nothing.
        fix: the command, or what to do, that mends it.
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
        with self.look("disk", f"make room on the disk of {self._folder}"):
            free = shutil.disk_usage(self._folder).free
            if free < _LEAST_FREE:
                raise _Trouble(f"{free / 1e9:.2f} GB are free, at least 1 GB are needed")
        with self.look("descriptors", "LimitNOFILE=65536 in the unit, or `ulimit -Hn` as root"):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if 0 <= hard < _LEAST_DESCRIPTORS:
                raise _Trouble(
                    f"{hard} open files are allowed, at least {_LEAST_DESCRIPTORS} are needed"
                )

    def server(self) -> None:
        """The server's site."""
        self._certificate("server", Role.SERVER, 0)
        with self.look("SuperLink's certificate", self._renew("superlink")):
            _check_days(self._keys / "superlink.pem")
        self._plan()
        site = load_site(self._folder / "server.toml", ServerSite)
        with self.look("nodes", "put back what `shufl provision` wrote to nodes"):
            if not site.agreed:
                raise _Trouble("no node was agreed")
        self._shufflers(site)
        address = _superlink_address(self._folder / "flower" / "config.toml")
        self._superlink(address, "systemctl start shufl-superlink")

    def shuffler(self) -> None:
        """A shuffler's site."""
        path = self._folder / "shuffler.toml"
        try:
            name = Path(read_toml(path)["tls"]["certificate"]).stem
        except (KeyError, TypeError):
            load_config(path)  # which says what is wrong
            raise
        self._key_pair(name)
        with self.look("certificate's days", self._renew(name)):
            _check_days(self._keys / f"{name}.pem")
        with self.look("configuration", f"mend {path}"):
            config = load_config(path)
            if config.tls.revoked is not None:
                config.tls.revoked.read_text()
        with self.look("port", "systemctl status shufl-shuffler; or another port"):
            host, port, *_ = parse_address(load_config(path).listen)
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:  # by the shuffler itself, if it runs
                        raise

    def node(self) -> None:
        """A node's site."""
        site = load_site(self._folder / "node.toml", NodeSite)
        self._certificate(Path(site.certificate).stem, Role.NODE, site.users)
        with self.look("key for Flower", "shufl keys flower keys"):
            _check_private(self._keys / "flower.key")
        self._plan()
        with self.look("model and records", "mend data in node.toml"):
            from shufl.deploy.node import check_data, check_work, link_needed

            config = load(site.config)
            data = check_data(site, self._folder, config)
            with self.look("link") as shown:
                shown.append(f"must carry {link_needed(site, config, *data[:2]):.2g} Mbit/s")
            with self.look("work", "a longer window.work_until, or fewer users") as shown:
                shown.append(f"of a round takes {check_work(site, *data):.2g} s")
        with self.look("owner's limits", "read run.toml, and mend device.toml if you agree"):
            _check_limits(site)
        with self.look("socket", "move the folder to a shorter path, such as /srv/shufl"):
            if (length := len(site.socket)) > LONGEST_SOCKET:
                raise _Trouble(
                    f"{site.socket} has {length} characters, {LONGEST_SOCKET} are allowed"
                )
        self._shufflers(site)
        self._superlink(site.superlink, "ask who runs the server: SuperLink, nginx, firewall")

    def _certificate(self, name: str, role: Role, users: int) -> None:
        self._key_pair(name)
        path, fix = self._keys / f"{name}.pem", self._renew(name)
        with self.look("certificate's role", fix):
            caller = caller_of(path.read_bytes())
            if caller is None or (caller.role, caller.users) != (role, users):
                found = f"for a {caller.role} of {caller.users} users" if caller else "none of ours"
                raise _Trouble(f"{path} is {found}, it must be for a {role} of {users} users")
        with self.look("certificate's days", fix):
            _check_days(path)

    def _key_pair(self, name: str) -> None:
        request, certificate = (self._keys / f"{name}.{kind}" for kind in ("csr", "pem"))
        with self.look("keys", self._renew(name)):
            if request.exists() and not certificate.exists():
                fix = f"send {request} to whoever provisions, and put the {name}.pem there"
                raise _Trouble(f"{certificate} has not come back yet", fix)
            Credentials.read(self._keys, name)
            _check_private(self._keys / f"{name}.key")

    def _renew(self, name: str) -> str:
        return (
            f"shufl keys request {self._keys} --name {name}, after the old {name}.* are moved "
            f"away; send {name}.csr to whoever provisions"
        )

    def _plan(self) -> None:
        with self.look("plan", "put run.toml back as `shufl provision` made it"):
            from shufl.deploy.node import agreed_plan  # it needs torch

            agreed_plan(load(str(self._folder / "run.toml")))

    def _shufflers(self, site: ServerSite | NodeSite) -> None:
        for address in site.shufflers:
            with self.look(f"shuffler {address}", "ask who runs it; then its firewall, and yours"):
                if trouble := health_of(address, site.credentials):
                    raise _Trouble(trouble)

    def _superlink(self, address: str, fix: str) -> None:
        theirs, before = None, datetime.datetime.now(datetime.UTC)
        with self.look(f"SuperLink {address}", fix):
            theirs = _answer_date(self._keys, address)
        with self.look("clock", "systemctl enable --now systemd-timesyncd"):
            if theirs is None:
                why = "is not known while the SuperLink cannot be asked"
                raise _Trouble(why, "as above")
            ahead = (before - theirs).total_seconds() - 1.0  # their answer has whole seconds
            behind = (theirs - datetime.datetime.now(datetime.UTC)).total_seconds()
            if ahead > _MOST_AHEAD:
                raise _Trouble(f"{ahead:.0f} s ahead of the SuperLink's machine")
            if behind > _MOST_BEHIND:
                raise _Trouble(f"{behind:.0f} s behind the SuperLink's machine")


def examine(folder: Path) -> list[Finding]:
    """Looks at everything that a site needs."""
    files = "server.toml", "shuffler.toml", "node.toml"
    roles = [name.removesuffix(".toml") for name in files if (folder / name).exists()]
    if len(roles) != 1:
        raise ConfigError(
            f"{folder} is not a site's folder: it must hold exactly one of {', '.join(files)}"
        )
    (role,) = roles
    examination = _Examination(folder.absolute(), role)
    examination.machine()
    getattr(examination, role)()
    return examination.findings


def _superlink_address(path: Path) -> str:
    """Of the connection that Flower takes by default."""
    content = read_toml(path)
    try:
        connections = content["superlink"]
        address: str = connections[connections["default"]]["address"]
        parse_address(address)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{path} must have the SuperLink's address, as `shufl provision` wrote it"
        ) from None
    return address


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


def _check_private(path: Path) -> None:
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        raise _Trouble(f"{path} is readable for others, mode {mode:04o}", f"chmod 600 {path}")


def _check_days(path: Path) -> None:
    certificate, now = read_certificate(path), datetime.datetime.now(datetime.UTC)
    if certificate.not_valid_before_utc > now:
        raise _Trouble(
            f"{path} is valid from {certificate.not_valid_before_utc:%F %T} on, here it is "
            f"{now:%F %T}",
            "set the clock",
        )
    days = (certificate.not_valid_after_utc - now).days
    if days < _LEAST_DAYS:
        raise _Trouble(f"{path} is valid for {days} days more")


def _check_limits(site: NodeSite) -> None:
    from shufl.deploy.node import agreed_plan

    (path, limits), plan = read_device(Path(site.device)), agreed_plan(load(site.config))
    limits.check(plan)
    runs = DeviceLedger(path, limits, create=False).offered() if path.exists() else []
    if any(run.plan == plan and run.offered < run.allotted for run in runs):
        return  # one goes on, whose rounds have been charged
    spent = sum(limits.charge(run) for run in runs)
    one = limits.charge(RunOffered(len(runs) + 1, "", plan, rounds_within_budget(plan)))
    if spent + one > limits.most_epsilon:
        raise _Trouble(
            f"{len(runs)} runs were charged {spent:.4g}, one more of this plan costs {one:.4g}, "
            f"most_epsilon is {limits.most_epsilon:g}",
            "nothing, if no further run is meant; the owner alone raises most_epsilon",
        )


def _answer_date(keys: Path, address: str) -> datetime.datetime:
    """When it is by the SuperLink's machine."""
    host, port, *_ = parse_address(address)
    trusted = ssl.create_default_context(cafile=str(keys / "flower-authority.pem"))
    connection = http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=trusted)
    try:
        connection.request("GET", "/")
        date = connection.getresponse().headers["Date"]
    except ssl.SSLCertVerificationError as error:
        raise _Trouble(
            f"its certificate does not fit: {error.verify_message}",
            "server.host in deployment.toml must be the name that nodes use; sign superlink anew",
        ) from error
    finally:
        connection.close()
    return email.utils.parsedate_to_datetime(date)
