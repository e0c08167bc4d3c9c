"""Keyed checksums of all that lies in a spool directory, and the file that anchors it.

The anchor holds the key, and how often the state of the directory has changed: its *generation*.
Where it lies outside the directory, a directory that was restored from a backup is older than its
anchor, and is refused: otherwise its rounds could be released a second time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.poly1305 import Poly1305

from shufl.shuffler.store.storage import DamagedFile, exists, sync_directory, syncs

CHECK_BYTES = 16
"""Length in bytes of a checksum."""

_KEY_BYTES = 32
_FORMAT = 8  # of all files in the directory; another shuffler's are refused


class Checks:
    """Makes keyed checksums of what belongs to one place, so that nothing can move.

    The content goes through Poly1305 under a key of its own, then the result, with the place,
    through keyed BLAKE2b, which alone takes several times as long. Poly1305 under a secret key is a
    universal hash: two contents that were chosen without the key collide with probability at
    most L / 2^107 for L bytes. What BLAKE2b makes of the result tells nothing of that key (Wegman
    and Carter 1981, "New hash functions and their use in authentication and set equality").
    """

    def __init__(self, key: bytes, place: str = "") -> None:
        self._key = key
        self._content_key = hashlib.blake2b(b"content", key=key, digest_size=_KEY_BYTES).digest()
        self._place = place

    def of_place(self, place: str) -> Checks:
        """Those of a part of this place."""
        return Checks(self._key, f"{self._place}/{place}")

    def begin(self, *about: Any) -> Check:
        """A checksum to be fed with content; `about` says what of the place it is."""
        place = repr((self._place, *about)).encode("utf-8", "surrogateescape")
        return Check(self._key, place, Poly1305(self._content_key))

    def make(self, *about: Any, content: bytes = b"") -> bytes:
        """The checksum of some content."""
        check = self.begin(*about)
        check.update(content)
        return check.digest()

    def verify(self, check: Any, *about: Any, content: bytes = b"") -> bool:
        """Whether this is the checksum of the content."""
        return isinstance(check, bytes) and hmac.compare_digest(
            check, self.make(*about, content=content)
        )


class Check:
    """A checksum that is being made."""

    def __init__(self, key: bytes, place: bytes, content: Poly1305) -> None:
        self._key = key
        self._place = place
        self._content = content

    def update(self, content: bytes) -> None:
        """Goes on with the next piece."""
        self._content.update(content)

    def digest(self) -> bytes:
        """The checksum of all pieces, `CHECK_BYTES` long; once."""
        all_of_it = self._place + b"\0" + self._content.finalize()
        return hashlib.blake2b(all_of_it, key=self._key, digest_size=CHECK_BYTES).digest()


class Anchor:
    """The file with key and generation; what it says is on disk when a method returns.

    Attributes:
        path: where it is.
        generation: how often the directory's state had changed at least.
        checks: those with its key.
        name: tells this file from others; a directory holds the name of its own.
    """

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            DamagedFile: it is not what was written.
            FileNotFoundError: there is none.
            ValueError: the directory is another shuffler's, by its format.
        """
        self.path = path
        content = path.read_bytes()
        try:
            found = json.loads(content)
            good = found.pop("check") == _sum(found)
        except (ValueError, KeyError, TypeError, AttributeError):
            good = False
        if not good:
            raise DamagedFile(f"{path} is damaged")
        if found["format"] != _FORMAT:
            raise ValueError(
                f"{path} has format {found['format']}, this shuffler reads format {_FORMAT}: use"
                " the shuffler that made it, or another directory"
            )
        self.generation = int(found["generation"])
        self._key = bytes.fromhex(found["key"])
        self.checks = Checks(self._key)
        self.name = _name(self.checks.make("anchor"))

    @classmethod
    def create(cls, path: Path) -> Anchor:
        """Makes the file with a new key, in the place of an old one."""
        _write(path, secrets.token_bytes(_KEY_BYTES), 0)
        return cls(path)

    def is_another(self, name: Any) -> bool:
        """Whether this is the name of another such file, and not a damaged one."""
        return isinstance(name, bytes) and self.name != name == _name(name[:CHECK_BYTES])

    def advance(self, generation: int) -> None:
        """Writes that the directory has come this far."""
        if generation != self.generation:
            _write(self.path, self._key, generation)
            self.generation = generation


def _name(own: bytes) -> bytes:
    """A name that tells by itself whether it is what was written."""
    return own + hashlib.sha256(own).digest()[:CHECK_BYTES]


def _sum(found: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _write(path: Path, key: bytes, generation: int) -> None:
    """Replaces the file as a whole."""
    content: dict[str, Any] = {"format": _FORMAT, "generation": generation, "key": key.hex()}
    new = path.with_name(f"{path.name}.new")
    if exists(new):
        new.unlink()  # of a crash
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content | {"check": _sum(content)}, file)
        file.flush()
        if syncs():
            os.fsync(file.fileno())
    new.rename(path)
    sync_directory(path.parent)
