"""Enrolment: the authorities of a deployment, what they have signed, and for which keys.

Nothing is signed for a key that nobody has approved. A party that asks anew with the key that was
signed for it last is known already. Everything the authority did is a line of its `log.jsonl`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from cryptography import x509

from shufl.deploy.deployment import Deployment, Site
from shufl.deploy.server_site import LOG_FILE, append_log
from shufl.protocol.files import write_whole
from shufl.protocol.validation import ConfigError
from shufl.shuffler.callers import Role
from shufl.shuffler.credentials import fingerprint_of, read_certificate, renew_from
from shufl.shuffler.keys import Authority, Request

Approve = Callable[[str, str], bool]
"""Given a key's name and SHA-256, says whether its party has read out the same SHA-256."""

AGREED_FILE = "nodes/agreed.toml"
"""In the server's folder: which nodes there are by now; their keys for Flower are beside it."""

_SPREAD = 0.1  # of its days by which a certificate may end earlier, so that not all end at once


@dataclass
class Provisioned:
    """What a call of `provision` did.

    Attributes:
        sites: all of them.
        made: sites whose folders are new.
        changed: by site, files that are made anew, which nobody has changed since they were made.
        kept: files that would be others by now, and stay as they are.
        short: by shuffler, how many users its nodes speak for, where no release is made of so few.
        signed: requests that were signed, and Flower keys that the server is told of.
        unapproved: fingerprints of keys that have come but are not approved, by name.
        waiting: requests that have not come.
        ending: when certificates end that do so soon, by name.
        to_withdraw: fingerprints of valid certificates of forgotten keys, and of those that say
            something else than the name's new one; none of shufflers and the SuperLink: nobody who
            is shown one asks whether it is withdrawn.
    """

    sites: list[Site] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    changed: dict[str, list[str]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    short: dict[str, int] = field(default_factory=dict)
    signed: list[str] = field(default_factory=list)
    unapproved: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    ending: dict[str, datetime.datetime] = field(default_factory=dict)
    to_withdraw: list[str] = field(default_factory=list)


class Enrolment:
    """The two authorities in a folder, of the parties' certificates and of the SuperLink's.

    Attributes:
        done: so far.
    """

    def __init__(self, deployment: Deployment, out: Path, approve: Approve, days: float):
        """Makes authorities where there are none.

        Certificates are valid for at most `days`.

        Raises:
            ValueError, OSError: they, or their log, cannot be read or made; or two nodes have one
                key for Flower.
        """
        _check_flower_keys(out, deployment)
        self.done = Provisioned()
        self._deployment, self._out, self._approve, self._days = deployment, out, approve, days
        self._hosts = {each.name: each.host for each in deployment.shufflers}
        self._hosts["superlink"] = deployment.server.host
        self._log_folder = out / "authority"
        self._lines = _read_lines(self._log_folder / LOG_FILE)
        self._parties = self._authority("authority")
        self._flower = self._authority("authority-flower")

    @property
    def _known(self) -> dict[str, str]:
        """The key that was signed last for each name, unless it is forgotten."""
        known: dict[str, str] = {}
        for each in self._lines:
            if each["did"] == "signed":
                known[each["name"]] = each["key"]
            if each["did"] == "forgot":
                known.pop(each["name"], None)
        return known

    def forget(self, name: str) -> None:
        """Treats the key that was signed last for a name as a stranger's from now on.

        Raises:
            ConfigError: no key was signed for it.
        """
        known = self._known
        if name not in known:
            names = ", ".join(known) or "none yet"
            raise ConfigError(f"--forget must name a key that was signed ({names}), got {name}")
        self._log("forgot", name=name, key=known[name])

    def write(self, site: Site) -> None:
        """Writes a site's files; one that somebody has changed since it was written stays.

        Some are written once. Of a shuffler `revoked`: its operator fills it. Of a node that was
        signed a certificate `device.toml`: its owner alone knows what the ledger has charged.
        """
        folder = self._out / site.name
        if is_new := not folder.exists():
            self.done.made.append(site.name)
        signed = {each["name"] for each in self._lines if each["did"] == "signed"}
        logged = [each["files"] for each in self._lines if each["did"] == "wrote"]
        before = {path: digest for files in logged for path, digest in files.items()}
        once = {"revoked", "device.toml"} if site.name in signed else {"revoked"}
        wrote: dict[str, str] = {}
        for name, text in site.files.items():
            path, full = folder / name, f"{site.name}/{name}"
            new = hashlib.sha256(text.encode()).hexdigest()
            here = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
            if name in once and not is_new:
                continue
            if here not in ("", new, before.get(full)):
                self.done.kept.append(full)
                continue
            if here != new:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, text.encode())
                if not is_new:
                    self.done.changed.setdefault(site.name, []).append(name)
            if before.get(full) != new:
                wrote[full] = new
        if wrote:
            self._log("wrote", name=site.name, files=wrote)

    def look_back(self) -> None:
        """Says which valid certificates of the log are no longer meant, also of earlier calls."""
        today = time.strftime("%F", time.gmtime())
        meant: dict[str, tuple[Any, ...] | None] = {}
        for each in reversed(self._lines):
            if each["did"] == "forgot":
                meant.setdefault(each["name"], None)
            if each["did"] != "signed":
                continue
            name, says = each["name"], tuple(each.get(key) for key in ("key", "users", "shuffler"))
            if meant.setdefault(name, says) == says or each["until"] < today:
                continue
            if name not in self._hosts:
                self.done.to_withdraw.insert(0, each["certificate"])

    def _log(self, did: str, **what: Any) -> None:
        append_log(self._log_folder, did, **what)
        self._lines.append({"did": did, **what})

    def sign(self, site: str, requests: Mapping[str, Role]) -> None:
        """Puts the authorities' certificates into a site's keys, and signs what it asks for.

        Raises:
            ValueError, OSError: what has come is no request of that name, or a certificate of
                another authority is there.
        """
        keys = self._out / site / "keys"
        keys.mkdir(mode=0o700, parents=True, exist_ok=True)
        _put(keys / "authority.pem", self._parties.certificate)
        _put(keys / "flower-authority.pem", self._flower.certificate)
        for name, role in requests.items():
            asked, certificate = keys / f"{name}.csr", keys / f"{name}.pem"
            if asked.exists():
                request = Request.read(asked)
                if request.name != name:
                    raise ConfigError(
                        f"{asked}: a request for {name} is due here, got {request.name}"
                    )
                self._sign(request, role, certificate)
            elif not certificate.exists():
                self.done.waiting.append(f"{site}/keys/{name}.csr")
            if certificate.exists():
                signed = read_certificate(certificate)
                if datetime.datetime.now(datetime.UTC) > renew_from(signed):
                    self.done.ending[name] = signed.not_valid_after_utc

    def tell_server(self) -> None:
        """Puts into the server's folder which nodes there are by now, and their keys for Flower."""
        folder = self._out / "server" / Path(AGREED_FILE).parent
        folder.mkdir(exist_ok=True)
        agreed = [
            {"name": node.name, "number": number, "users": node.users} | self._ends(node.name)
            for number, node in self._deployment.numbered.items()
        ]
        text = tomli_w.dumps({"nodes": agreed})
        write_whole(folder / Path(AGREED_FILE).name, text.encode())
        for node in self._deployment.nodes:
            theirs, ours = self._out / node.name / "keys/flower.pub", folder / f"{node.name}.pub"
            known = ours.read_bytes() if ours.exists() else b""
            if node.withdrawn:
                if known:
                    ours.unlink()
                    self._log("withdrew", name=node.name)
            elif theirs.exists() and (key := theirs.read_bytes()) != known:
                name, fingerprint = f"{node.name}.flower", hashlib.sha256(key).hexdigest()
                if self._approve(name, fingerprint):
                    write_whole(ours, key)
                    self._log("told the server of", name=name, key=fingerprint)
                    self.done.signed.append(name)
                else:
                    self.done.unapproved[name] = fingerprint

    def _ends(self, name: str) -> dict[str, str]:
        """Fingerprint and last day of a node's certificate, if it has one."""
        path = self._out / name / "keys" / f"{name}.pem"
        return _facts(read_certificate(path)) if path.exists() else {}

    def _sign(self, request: Request, role: Role, certificate: Path) -> None:
        """Signs a new request; the deployment decides what the certificate is for."""
        name, digest = request.name, hashlib.sha256(request.pem).hexdigest()
        signed_before = any(each.get("request") == digest for each in self._lines)
        if signed_before and certificate.exists():
            return
        known = self._known.get(name) == request.fingerprint
        if not known and not self._approve(name, request.fingerprint):
            self.done.unapproved[name] = request.fingerprint
            return
        users = {each.name: each.users for each in self._deployment.nodes}.get(name, 0)
        shuffler = self._deployment.shuffler_names.get(name, "")
        authority = self._flower if name == "superlink" else self._parties
        serves = role is Role.SHUFFLER
        pem = authority.sign(
            request,
            role,
            hosts=sorted({self._hosts[name], "127.0.0.1", "localhost"}) if serves else (),
            users=users,
            shuffler=shuffler,
            days=self._days * (1.0 - _SPREAD * _share(name)),
        )
        write_whole(certificate, pem)
        self._log(
            "signed",
            name=name,
            key=request.fingerprint,
            users=users,
            shuffler=shuffler,
            request=digest,
            **_facts(read_certificate(certificate)),
        )
        self.done.signed.append(name)

    def _authority(self, name: str) -> Authority:
        """The authority in a folder, made if there is none."""
        folder = self._out / name
        if not (folder / "authority.pem").exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            Authority.create().write(folder)
            self._log("made", name=name)
        return Authority.read(folder)


_LOGGED = {
    "signed": ("name", "key", "request", "certificate", "until"),
    "forgot": ("name", "key"),
    "wrote": ("files",),
}
"""What lines of the log have that are read again, by what was done."""


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The authority's log; none if there is no file.

    Raises:
        ConfigError: this module has not written one of its lines.
    """
    lines: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for number, written in enumerate(text.splitlines(), 1):
        try:
            line = json.loads(written)
            _ = [line[key] for key in _LOGGED.get(line["did"], ())]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path}: line {number} is damaged; remove it, or restore") from None
        lines.append(line)
    return lines


def _check_flower_keys(out: Path, deployment: Deployment) -> None:
    """Refuses a key for Flower that two nodes have, also one of a node that was withdrawn.

    Raises:
        ConfigError: names both.
    """
    holders: dict[tuple[bytes, ...], Path] = {}
    for path in (out / node.name / "keys/flower.pub" for node in deployment.nodes):
        key = tuple(path.read_bytes().split()[:2]) if path.exists() else (bytes(path),)
        if (other := holders.setdefault(key, path)) != path:
            raise ConfigError(
                f"{path} is the same key as {other}: each node makes its own (shufl keys flower)"
            )


def _share(name: str) -> float:
    """A number in [0, 1) that is a name's own."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32


def _facts(certificate: x509.Certificate) -> dict[str, str]:
    """A certificate's fingerprint and last day."""
    until = f"{certificate.not_valid_after_utc:%F}"
    return {"certificate": fingerprint_of(certificate), "until": until}


def _put(path: Path, content: bytes) -> None:
    """Writes a certificate that every site has; refuses to replace a different one.

    Raises:
        ConfigError: there is another.
    """
    if not path.exists():
        write_whole(path, content)
    elif path.read_bytes() != content:
        raise ConfigError(
            f"{path} is of another authority than the one here: put that one back, or move the "
            "sites' folders away and enrol everybody anew"
        )
