"""`shufl doctor`: looks whether a site of a deployment can do its part, and says what mends it."""

from __future__ import annotations

import datetime
import email.utils
import http.client
import importlib.metadata
import resource
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
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


_Look = Callable[[], object]


def examine(folder: Path) -> list[Finding]:
    """Looks at everything that a site needs.

    Raises:
        ConfigError: it is no site's.
    """
    looks = {"server.toml": _server, "shuffler.toml": _shuffler, "node.toml": _node}
    found = [name for name in looks if (folder / name).exists()]
    if len(found) != 1:
        raise ConfigError(
            f"{folder} is not a site's folder: it must hold exactly one of {', '.join(looks)}"
        )
    here = folder.absolute()
    findings = []
    role = found[0].removesuffix(".toml")
    for what, look, fix in (*_machine(here, role), *looks[found[0]](here)):
        try:
            look()
        except _Trouble as trouble:
            findings.append(Finding(what, one_line(trouble), trouble.fix or fix))
        except ModuleNotFoundError as error:
            findings.append(
                Finding(what, f"{error.name} is needed to look, and missing", _install(role))
            )
        except (OSError, ValueError, http.client.HTTPException) as error:
            findings.append(Finding(what, one_line(error), fix))
        else:
            findings.append(Finding(what))
    return findings


_Looks = Iterator[tuple[str, _Look, str]]


def _install(role: str) -> str:
    what = f"'.[{role}]'" if role in _EXTRAS else "."
    return f"pip install --constraint constraints.txt {what} in shufl's repository"


def _machine(folder: Path, role: str) -> _Looks:
    yield "versions", lambda: _versions(role), _install(role)
    yield "disk", lambda: _disk(folder), f"make room on the disk of {folder}"
    yield "descriptors", _descriptors, "LimitNOFILE=65536 in the unit, or `ulimit -Hn` as root"


def _server(folder: Path) -> _Looks:
    keys = folder / "keys"
    yield from _certificate(keys, "server", Role.SERVER, 0)
    yield (
        "SuperLink's certificate",
        lambda: _days_left(keys / "superlink.pem"),
        _new(keys, "superlink"),
    )
    yield "plan", lambda: _plan(folder), "put run.toml back as `shufl provision` made it"
    site = load_site(folder / "server.toml", ServerSite)
    yield "nodes", lambda: _agreed(site), "put back what `shufl provision` wrote to nodes"
    yield from _shufflers(site)
    address = _superlink_address(folder / "flower" / "config.toml")
    yield from _superlink(keys, address, "systemctl start shufl-superlink")


def _superlink_address(path: Path) -> str:
    """Of the connection that Flower takes by default.

    Raises:
        ConfigError: the file has none.
    """
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


def _shuffler(folder: Path) -> _Looks:
    path = folder / "shuffler.toml"
    try:
        name = Path(read_toml(path)["tls"]["certificate"]).stem
    except (KeyError, TypeError):
        load_config(path)  # which says what is wrong, unless it is in plaintext
        raise ConfigError(f"{path}: tls is missing, a site's shuffler needs it") from None
    yield "keys", lambda: _key_pair(folder / "keys", name), _new(folder / "keys", name)
    yield (
        "certificate's days",
        lambda: _days_left(folder / "keys" / f"{name}.pem"),
        _new(folder / "keys", name),
    )
    yield "configuration", lambda: _read_config(path), f"mend {path}"
    yield "port", lambda: _port(path), "systemctl status shufl-shuffler; or another port"


def _node(folder: Path) -> _Looks:
    site = load_site(folder / "node.toml", NodeSite)
    keys, name = folder / "keys", Path(site.certificate).stem
    yield from _certificate(keys, name, Role.NODE, site.users)
    yield "key for Flower", lambda: _there(keys / "flower.key"), "shufl keys flower keys"
    yield "plan", lambda: _plan(folder), "put run.toml back as `shufl provision` made it"
    yield "model and records", lambda: _records(site, folder), "mend data in node.toml"
    yield (
        "owner's limits",
        lambda: _limits(site),
        "read run.toml, and mend device.toml if you agree",
    )
    yield "socket", lambda: _socket(site), "move the folder to a shorter path, such as /srv/shufl"
    yield from _shufflers(site)
    fix = "ask who runs the server: SuperLink, nginx, firewall"
    yield from _superlink(keys, site.superlink, fix)


def _certificate(keys: Path, name: str, role: Role, users: int) -> _Looks:
    fix = _new(keys, name)
    yield "keys", lambda: _key_pair(keys, name), fix
    yield "certificate's role", lambda: _role(keys / f"{name}.pem", role, users), fix
    yield "certificate's days", lambda: _days_left(keys / f"{name}.pem"), fix


def _shufflers(site: ServerSite | NodeSite) -> _Looks:
    for address in site.shufflers:

        def look(address: str = address) -> None:
            if trouble := health_of(address, site.credentials):
                raise _Trouble(trouble)

        yield f"shuffler {address}", look, "ask who runs it; then its firewall, and yours"


def _superlink(keys: Path, address: str, fix: str) -> _Looks:
    yield f"SuperLink {address}", lambda: _answer_date(keys, address), fix
    yield "clock", lambda: _clock(keys, address), "systemctl enable --now systemd-timesyncd"


def _new(keys: Path, name: str) -> str:
    return (
        f"shufl keys request {keys} --name {name}, after the old {name}.* are moved away; send "
        f"{name}.csr to whoever provisions"
    )


def _versions(role: str) -> None:
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


def _disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _LEAST_FREE:
        raise _Trouble(f"{free / 1e9:.2f} GB are free, at least 1 GB are needed")


def _descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _LEAST_DESCRIPTORS:
        raise _Trouble(f"{hard} open files are allowed, at least {_LEAST_DESCRIPTORS} are needed")


def _there(path: Path) -> None:
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        raise _Trouble(f"{path} is readable for others, mode {mode:04o}", f"chmod 600 {path}")


def _key_pair(keys: Path, name: str) -> None:
    if (keys / f"{name}.csr").exists() and not (keys / f"{name}.pem").exists():
        fix = f"send {keys}/{name}.csr to whoever provisions, and put the {name}.pem there"
        raise _Trouble(f"{keys}/{name}.pem has not come back yet", fix)
    Credentials.read(keys, name)
    _there(keys / f"{name}.key")


def _role(path: Path, role: Role, users: int) -> None:
    caller = caller_of(path.read_bytes())
    if caller is None or (caller.role, caller.users) != (role, users):
        found = "none of ours" if caller is None else f"for a {caller.role} of {caller.users} users"
        raise _Trouble(f"{path} is {found}, it must be for a {role} of {users} users")


def _days_left(path: Path) -> None:
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


def _plan(folder: Path) -> None:
    from shufl.deploy.node import agreed_plan  # it needs torch, as the looks below

    agreed_plan(load(str(folder / "run.toml")))


def _records(site: NodeSite, folder: Path) -> None:
    from shufl.deploy.node import check_data

    check_data(site, folder, load(site.config))


def _limits(site: NodeSite) -> None:
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


def _socket(site: NodeSite) -> None:
    if len(site.socket) > LONGEST_SOCKET:
        raise _Trouble(
            f"{site.socket} has {len(site.socket)} characters, {LONGEST_SOCKET} are allowed"
        )


def _read_config(path: Path) -> None:
    config = load_config(path)
    if config.tls is not None and config.tls.revoked is not None:
        config.tls.revoked.read_text()


def _port(path: Path) -> None:
    host, port, *_ = parse_address(load_config(path).listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != 98:  # in use: by the shuffler itself, if it runs
                raise


def _agreed(site: ServerSite) -> None:
    if len(site.agreed) < site.least_nodes:
        raise _Trouble(f"least_nodes is {site.least_nodes}, {len(site.agreed)} nodes were agreed")


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


def _clock(keys: Path, address: str) -> None:
    before = datetime.datetime.now(datetime.UTC)
    try:
        theirs = _answer_date(keys, address)
    except (OSError, http.client.HTTPException):
        raise _Trouble("is not known while the SuperLink cannot be asked", "as above") from None
    ahead = (before - theirs).total_seconds() - 1.0  # their answer has whole seconds
    behind = (theirs - datetime.datetime.now(datetime.UTC)).total_seconds()
    if ahead > _MOST_AHEAD:
        raise _Trouble(f"{ahead:.0f} s ahead of the SuperLink's machine")
    if behind > _MOST_BEHIND:
        raise _Trouble(f"{behind:.0f} s behind the SuperLink's machine")
