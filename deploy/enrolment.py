"""Enrolment: the authorities of a deployment, what they have signed, and for which keys.

Nothing is signed for a key that nobody has approved. A party that asks anew with the key that was
signed for it last is known already. Everything the authority did is a line of its `log.jsonl`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from shufl.deploy.acts import LOG_FILE, note
from shufl.deploy.plan import Deployment
from shufl.learning.section import ConfigError
from shufl.shuffler.callers import Role, fingerprint_of
from shufl.shuffler.keys import Authority, Request, read_certificate, renew_from, replace_file

Approve = Callable[[str, str], bool]
"""Given a key's name and SHA-256, says whether its party has read out the same SHA-256."""

AGREED_FILE = "nodes/agreed.toml"
"""In the server's folder: which nodes there are by now; their keys for Flower are beside it."""

_SPREAD = 0.1  # of its days by which a certificate may end earlier, so that not all end at once


@dataclass
class Enrolled:
    """What a call of `provision` did about keys.

    Attributes:
        signed: requests that were signed, and Flower keys that the server is told of.
        unapproved: fingerprints of keys that have come but are not approved, by name.
        waiting: requests that have not come.
        ending: when certificates end that do so soon, by name.
        to_withdraw: fingerprints of valid certificates of forgotten keys, and of those that say
            something else than the name's new one.
        stay_valid: last days of such certificates of shufflers and the SuperLink, by name: nobody
            who is shown one asks whether it is withdrawn.
    """

    signed: list[str] = field(default_factory=list)
    unapproved: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    ending: dict[str, datetime.datetime] = field(default_factory=dict)
    to_withdraw: list[str] = field(default_factory=list)
    stay_valid: dict[str, str] = field(default_factory=dict)


class Enrolment:
    """The two authorities in a folder, of the parties' certificates and of the SuperLink's.

    Attributes:
        done: so far.
    """

    def __init__(self, deployment: Deployment, out: Path, approve: Approve, days: float):
        """Makes authorities where there are none.

        Certificates are valid for at most `days`.

        Raises:
            ConfigError: they cannot be read or made.
        """
        self.done = Enrolled()
        self._deployment, self._out, self._approve, self._days = deployment, out, approve, days
        self._hosts = {each.name: each.host for each in deployment.shufflers}
        self._hosts["superlink"] = deployment.server.host
        self._parties = self._authority("authority")
        self._flower = self._authority("authority-flower")
        log = self._acts / LOG_FILE
        self._lines = _read_lines(log) if log.exists() else []
        self._signed = {each["request"] for each in self._lines if each["did"] == "signed"}
        self._known: dict[str, str] = {}
        for each in self._lines:
            if each["did"] == "signed":
                self._known[each["name"]] = each["key"]
            if each["did"] == "forgot":
                self._known.pop(each["name"], None)

    def forget(self, name: str) -> None:
        """Treats the key that was signed last for a name as a stranger's from now on.

        Raises:
            ConfigError: no key was signed for it.
        """
        if name not in self._known:
            known = ", ".join(self._known) or "none yet"
            raise ConfigError(f"--forget must name a key that was signed ({known}), got {name}")
        self._note("forgot", name=name, key=self._known.pop(name))

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
            if name in self._hosts:
                self.done.stay_valid.setdefault(name, each["until"])
            else:
                self.done.to_withdraw.insert(0, each["certificate"])

    def _note(self, did: str, **about: Any) -> None:
        note(self._acts, did, **about)
        self._lines.append({"did": did, **about})

    def sign(self, site: str, requests: Sequence[tuple[str, Role]]) -> None:
        """Puts the authorities' certificates into a site's keys, and signs what it asks for.

        Raises:
            ConfigError: what has come is no request of that name, or a certificate of another
                authority is there.
        """
        keys = self._out / site / "keys"
        keys.mkdir(mode=0o700, parents=True, exist_ok=True)
        _put(keys / "authority.pem", self._parties.certificate)
        _put(keys / "flower-authority.pem", self._flower.certificate)
        for name, role in requests:
            asked, certificate = keys / f"{name}.csr", keys / f"{name}.pem"
            if asked.exists():
                self._sign(_request(asked, name), role, certificate)
            elif not certificate.exists():
                self.done.waiting.append(f"{site}/keys/{name}.csr")
            if certificate.exists():
                self._look_at(name, certificate)

    def tell_server(self) -> None:
        """Puts into the server's folder which nodes there are by now, and their keys for Flower."""
        folder = self._out / "server" / Path(AGREED_FILE).parent
        folder.mkdir(exist_ok=True)
        agreed = [
            {"name": node.name, "number": number, "users": node.users} | self._ends(node.name)
            for number, node in self._deployment.numbered.items()
        ]
        text = tomli_w.dumps({"nodes": agreed})
        replace_file(folder / Path(AGREED_FILE).name, text.encode())
        for node in self._deployment.nodes:
            theirs, ours = self._out / node.name / "keys/flower.pub", folder / f"{node.name}.pub"
            if node.withdrawn:
                if ours.exists():
                    ours.unlink()
                    note(self._acts, "withdrew", name=node.name)
                continue
            key = theirs.read_bytes() if theirs.exists() else b""
            if not key or (ours.exists() and ours.read_bytes() == key):
                continue
            name, fingerprint = f"{node.name}.flower", hashlib.sha256(key).hexdigest()
            if self._approve(name, fingerprint):
                replace_file(ours, key)
                note(self._acts, "told the server of", name=name, key=fingerprint)
                self.done.signed.append(name)
            else:
                self.done.unapproved[name] = fingerprint

    def _ends(self, name: str) -> dict[str, str]:
        """Fingerprint and last day of a node's certificate, if it has one."""
        path = self._out / name / "keys" / f"{name}.pem"
        if not path.exists():
            return {}
        certificate = read_certificate(path)
        until = f"{certificate.not_valid_after_utc:%F}"
        return {"certificate": fingerprint_of(certificate), "until": until}

    def _sign(self, request: Request, role: Role, certificate: Path) -> None:
        """Signs a new request; the deployment decides what the certificate is for."""
        name, digest = request.name, hashlib.sha256(request.pem).hexdigest()
        if digest in self._signed and certificate.exists():
            return
        known = self._known.get(name) == request.fingerprint
        if not known and not self._approve(name, request.fingerprint):
            self.done.unapproved[name] = request.fingerprint
            return
        users = {each.name: each.users for each in self._deployment.nodes}.get(name, 0)
        shuffler = self._deployment.shuffler_names.get(name, "")
        says = {"key": request.fingerprint, "users": users, "shuffler": shuffler}
        authority = self._flower if name == "superlink" else self._parties
        serves = role is Role.SHUFFLER
        try:
            pem = authority.sign(
                request,
                role,
                hosts=sorted({self._hosts[name], "127.0.0.1", "localhost"}) if serves else (),
                users=users,
                shuffler=shuffler,
                days=self._days * (1.0 - _SPREAD * _share(name)),
            )
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
        replace_file(certificate, pem)
        signed = read_certificate(certificate)
        self._note(
            "signed",
            name=name,
            **says,
            request=digest,
            certificate=fingerprint_of(signed),
            until=f"{signed.not_valid_after_utc:%F}",
        )
        self._known[name] = request.fingerprint
        self.done.signed.append(name)

    def _look_at(self, name: str, path: Path) -> None:
        certificate = read_certificate(path)
        if datetime.datetime.now(datetime.UTC) > renew_from(certificate):
            self.done.ending[name] = certificate.not_valid_after_utc

    def _authority(self, name: str) -> Authority:
        """The authority in a folder, made if there is none."""
        folder = self._out / name
        try:
            if not (folder / "authority.pem").exists():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                Authority.create().write(folder)
                note(self._acts, "made", name=name)
            return Authority.read(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: {error}") from error

    @property
    def _acts(self) -> Path:
        return self._out / "authority"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The authority's log.

    Raises:
        ConfigError: a line of it is none that this module has written.
    """
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            if line["did"] in ("signed", "forgot"):
                _ = line["name"], line["key"]
            if line["did"] == "signed":
                _ = line["request"], line["certificate"], line["until"]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path}: line {number} is damaged; remove it, or restore") from None
        lines.append(line)
    return lines


def _share(name: str) -> float:
    """A number in [0, 1) that is a name's own."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32


def _request(asked: Path, name: str) -> Request:
    """The request in a file, if it is for this name."""
    try:
        request = Request.read(asked)
        if request.name != name:
            raise ValueError(f"{asked}: a request for {name} is due here, got {request.name}")
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return request


def _put(path: Path, content: bytes) -> None:
    """Writes a certificate that every site has; refuses another one that is there.

    Raises:
        ConfigError: there is another.
    """
    if not path.exists():
        replace_file(path, content)
    elif path.read_bytes() != content:
        raise ConfigError(
            f"{path} is of another authority than the one here: put that one back, or move the "
            "sites' folders away and enrol everybody anew"
        )
