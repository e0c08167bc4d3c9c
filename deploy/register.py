"""`shufl register`: tells Flower's SuperLink which nodes there are, and remembers which is which.

Flower numbers its nodes, and names none. The numbers of a SuperLink's nodes are in a file beside
its database, so that no node can pass for another, and whatever is said of a node names it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shufl.deploy.acts import note
from shufl.deploy.plan import PROGRAMS, flower_environment
from shufl.deploy.sites import (
    FLOWER_FOLDER,
    REGISTERED_FILE,
    Registered,
    ServerSite,
    flower_connection,
    load_site,
)
from shufl.learning.section import one_line
from shufl.results.engine import EngineFailed
from shufl.shuffler.keys import replace_file


def register(site_path: Path) -> Iterator[str]:
    """Registers the nodes that were agreed, unregisters the others; tells a line of each.

    It may be run again at any time, also while a run goes on. `site_path` is the server's file.

    Raises:
        ConfigError: a file is missing or damaged.
        EngineFailed: Flower refuses; what was done before stays.
    """
    folder = site_path.absolute().parent
    site, connection = load_site(site_path, ServerSite), flower_connection(folder)[0]
    listed = _told(folder, "supernode", "list", connection)
    nodes = [each for each in listed["nodes"] if each["status"] != "unregistered"]
    there = {int(each["node-id"]) for each in nodes}
    known = {number: each for number, each in site.registered.items() if number in there}
    wanted = {}
    for name, _, _ in site.agreed.values():
        path = Path(site.nodes).with_name(f"{name}.pub")
        if not path.exists():
            yield f"waiting for {path}"
            known_key = next((each.key for each in known.values() if each.name == name), None)
            if known_key is not None:
                wanted[name] = known_key, path  # it stays as it is
            continue
        wanted[name] = hashlib.sha256(path.read_bytes()).hexdigest(), path

    def write() -> None:
        told = {number: each._asdict() for number, each in known.items()}
        replace_file(folder / REGISTERED_FILE, json.dumps(told, indent=1).encode(), 0o600)

    for number, each in list(known.items()):
        if wanted.get(each.name, ("",))[0] == each.key:
            del wanted[each.name]
            continue
        flwr(folder, "supernode", "unregister", str(number), connection)
        del known[number]
        write()
        note(folder, "unregistered", name=each.name, flower=number)
        yield f"unregistered {each.name}, number {number}"
    for name, (key, path) in wanted.items():
        try:
            told = _told(folder, "supernode", "register", str(path), connection)
        except EngineFailed as error:
            raise EngineFailed(
                f"{one_line(error)}. Flower does not take a key twice: make another on the node "
                "(shufl keys flower), or stop the SuperLink and move flower/superlink.db and "
                "flower/nodes.json away"
            ) from error
        number = int(told["node-id"])
        known[number] = Registered(name, key)
        write()
        note(folder, "registered", name=name, flower=number)
        yield f"registered {name}, number {number}"


def _told(folder: Path, *arguments: str) -> dict[str, Any]:
    """What a command of Flower's tells as JSON; a failure is told there alone, with exit code 0.

    Raises:
        EngineFailed: it failed; with what it said.
    """
    told: dict[str, Any] = json.loads(flwr(folder, *arguments, "--format", "json"))
    if not told["success"]:
        said = one_line(RuntimeError(told["error-message"]))
        raise EngineFailed(f"flwr {' '.join(arguments)}: {said}")
    return told


def flwr(folder: Path, *arguments: str) -> str:
    """Runs a command of Flower's on the server, whose folder this is; returns what it printed.

    Raises:
        EngineFailed: it failed; with what it said.
        ModuleNotFoundError: Flower is not installed.
    """
    program = PROGRAMS / "flwr"
    if not program.exists():
        raise ModuleNotFoundError("flwr is not installed", name="flwr")
    done = subprocess.run(
        [str(program), *arguments],
        cwd=folder,
        env=flower_environment(folder / FLOWER_FOLDER),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise EngineFailed(f"flwr {' '.join(arguments)}: {done.stdout} {done.stderr}".strip())
    return done.stdout
