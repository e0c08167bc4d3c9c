"""Files that templates make for a site, and which of them differ from what this release makes.

Root runs install.sh. What install.sh copies to /etc, root or a process of root reads.
"""

from __future__ import annotations

import importlib.resources
import re
import shlex
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

from shufl.deploy.deployment import NodeEntry, Process, ServerEntry, ShufflerEntry, run_process

CONF_OF = {
    "server": ("nginx.conf", "nftables.conf"),
    "shuffler": ("stream.conf",),
    "node": ("nftables.conf", "nftables-app.conf"),
}
"""Templates of what nginx and the firewall read, by what a site is."""

_NAMES = dict.fromkeys(("server.md", "shuffler.md", "node.md"), "README.md")
_NAMES |= {"stream.conf": "nginx.conf", "nftables-app.conf": "nftables.conf"}
"""Files whose templates have other names; what two templates make of one file is joined."""

_VALUES = {
    "prefix": r"^    copy nftables\.conf /etc/shufl/([A-Za-z0-9._-]+)\.nft$",
    "folder": r"^WorkingDirectory=((?:/[A-Za-z0-9._-]+)+)$",
    "host": r"^ *server_name ([A-Za-z0-9.:-]+);$",
    "local_port": r"(?:tcp dport |127\.0\.0\.1:|--port )([1-9][0-9]{0,4})",
    "connections": r"^ *limit_conn \S+ (10000|[1-9][0-9]{0,3});$",
    "accounts": r"!= \{ root, (shufl, [a-z_][a-z0-9_-]*) \} ",
    "superlink": r" --superlink '?([A-Za-z0-9.:[\]-]+)'? --port ",
    "run": r" --on ([A-Za-z0-9-]+) --continue$",
}
"""What differs from site to site, where a site's own files say it."""

_LISTEN = r"(?:\[::\]:\d{1,5} ipv6only=off|(?:0\.0\.0\.0|127\.0\.0\.1):\d{1,5})"
_ABOUT = r"[A-Za-z' ,-]+ of [A-Za-z0-9-]+ \([A-Za-z0-9-]+\)"
_FREE = re.compile(
    rf"^( +listen ){_LISTEN}(?=;$| ssl;$)|^(Description=){_ABOUT}$|^(TimeoutStopSec=)\d+$",
    re.ASCII | re.MULTILINE,
)
"""Values that are not compared, in the forms that they have."""


def template(name: str, /, **values: object) -> str:
    """A template with its values."""
    text = importlib.resources.files("shufl.deploy") / "templates" / name
    return string.Template(text.read_text(encoding="utf-8")).substitute(values)


def made_of(
    templates: Iterable[str], processes: Iterable[Process], values: Mapping[str, object]
) -> dict[str, str]:
    """What templates make of a site's values, with install.sh and a unit for each process."""
    folder, prefix, files = values["folder"], values["prefix"], dict[str, str]()
    for name in (*templates, "install.sh"):
        file = _NAMES.get(name, name)
        files[file] = files.get(file, "") + template(name, **values)
    # No process is reached before the firewall is there, however the machine came up.
    firewall = f"ExecStartPre=+/usr/sbin/nft --file /etc/shufl/{prefix}.nft"
    before = (firewall,) if "nftables.conf" in files else ()
    for process in processes:
        about = asdict(process) | {
            "unit": f"{prefix}-{process.name}",
            "about": process.about[0].upper() + process.about[1:],
            "writes": folder if process.user == "shufl" else f"{folder}/{process.home}",
            "stop_seconds": f"{process.stop_seconds:.0f}",
            "more": "\n".join((*before, *process.unit)),
            "after": f" {prefix}-{process.after}.service" if process.after else "",
            "command": shlex.join(process.command_in(Path(f"{folder}/.venv/bin"))),
        }
        files[f"{prefix}-{process.name}.service"] = template("unit.service", **{**values, **about})
    return files


def changed(folder: Path, role: str) -> Iterator[str]:
    """What root runs or reads of a site's folder and this release makes otherwise: file and line.

    The site's own values are taken from these files, if they have the form of such a value.

    Raises:
        OSError: the folder or such a file cannot be read.
        ValueError: such a file is not text.
    """
    names = "install.sh", "nginx.conf", "nftables.conf"
    there = sorted(folder.iterdir())
    paths = [path for path in there if path.name in names or path.name.endswith(".service")]
    if links := [path.name for path in paths if path.is_symlink()]:
        yield f"{links[0]}: a link"
        return
    ours = {path.name: _bound(path.read_bytes().decode()) for path in paths}
    text = "".join(ours.values())
    found = {name: re.search(form, text, re.M) for name, form in _VALUES.items()}
    own = {name: match[1] if match else "0" for name, match in found.items()}
    if role == "node":
        own["accounts"] = "shufl-app"
    port = int(own["local_port"])
    superlink = ServerEntry.model_construct(local_port=port).process
    processes: dict[str, tuple[Process, ...]] = {
        "server": (superlink, run_process(own["run"], 0.0)),
        "shuffler": (ShufflerEntry.model_construct().process,),
        "node": NodeEntry.model_construct(port=port).processes(own["superlink"], 0.0),
    }
    free = {"site": "0", "deployment": "0", "listen": "127.0.0.1:1"}
    made = made_of(CONF_OF[role], processes[role], own | free)
    for name in sorted(ours.keys() | made.keys()):
        if name not in ours or name not in made:
            yield f"{name}: {'no such file is made' if name in ours else 'missing'}"
            continue
        lines = zip_longest(ours[name].split("\n"), _bound(made[name]).split("\n"))
        if differ := [line for line, other in lines if line != other]:
            yield f"{name}: {differ[0]!r:.100}"


def _bound(text: str) -> str:
    """A file without the values that are not compared."""
    return _FREE.sub(lambda match: "".join(filter(None, match.groups())), text)
