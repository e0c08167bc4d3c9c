"""The log of what operators did: at the authority, and at the server."""

from __future__ import annotations

import getpass
import json
import os
import time
from pathlib import Path

LOG_FILE = "log.jsonl"
"""In the folder of the parties' authority, and in the server's."""


def note(folder: Path, did: str, **what: object) -> None:
    """Appends to the log in a folder who did what, when."""
    line = {"time": time.strftime("%FT%TZ", time.gmtime()), "by": _whoami(), "did": did}
    with (folder / LOG_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | what) + "\n")


def _whoami() -> str:
    """The account at work, and before it that which `sudo` was called from."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as in a container
        name = str(os.getuid())
    before = os.environ.get("SUDO_USER")
    return f"{before} as {name}" if before else name
