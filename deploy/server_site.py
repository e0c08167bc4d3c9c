"""Files on the server's machine: its settings, which nodes there are, and the operators' log."""

from __future__ import annotations

import getpass
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from shufl.deploy.site_files import SiteFile
from shufl.protocol import AgreedNode
from shufl.protocol.validation import ConfigError, Count, Positive, Record, Seconds, read_toml
from shufl.shuffler.wire.channel import parse_address

CONSOLE_FILE, OUTCOME_FILE, STOP_FILE = "console.txt", "outcome.json", "stop"
"""In a run folder: what is printed; how the run ended; asks it to end."""

WAITING_FILE = "waiting.json"
"""In a run folder while the run waits: `for`, what it waits for, and `since`, by `time.time`."""

FLOWER_FOLDER = "flower"
"""Beside the server's file: Flower's home, with the connections."""

REGISTERED_FILE = f"{FLOWER_FOLDER}/nodes.json"
"""Beside Flower's database: which of its nodes is which."""

LOG_FILE = "log.jsonl"
"""In the folder of the parties' authority, and in the server's: what operators did."""


class ServerSite(SiteFile):
    """`server.toml`.

    Attributes:
        nodes: path of the file that says which nodes there are; `shufl provision` writes it.
        round_timeout: seconds to wait for nodes' answers; before a round only for those of nodes
            that answered before the last one.
        patience: seconds to wait for nodes or shufflers that are away before the run ends.
    """

    nodes: str
    round_timeout: Seconds = 120.0
    patience: Positive = 3600.0

    @property
    def entries(self) -> tuple[AgreedEntry, ...]:
        """The nodes that the authority has told of, as the file says now."""
        return AgreedNodes.of_file(Path(self.nodes)).nodes

    @property
    def agreed(self) -> dict[int, AgreedNode]:
        """What was agreed with each node, by its number, as the files say now."""
        flower = {each.name: number for number, each in self.registered.items()}
        return {
            each.number: AgreedNode(each.name, each.users, flower.get(each.name))
            for each in self.entries
        }

    @property
    def registered(self) -> dict[int, Registered]:
        """The nodes that Flower's SuperLink was told of, by Flower's number."""
        path = Path(self.nodes).parents[1] / REGISTERED_FILE
        try:
            return _REGISTERED.validate_json(path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValidationError:
            raise ConfigError(
                f"{path} is damaged; with the SuperLink stopped, move it and superlink.db away, "
                "and shufl register anew"
            ) from None


class AgreedEntry(Record):
    """A node in the server's file of nodes.

    Attributes:
        name: the node's.
        number: from 0.
        users: for how many it speaks.
        certificate: the fingerprint of its certificate, which withdraws that at a shuffler; empty:
            it has none yet.
        until: the day on which that ends.
    """

    name: str
    number: int = Field(ge=0, description="a whole number, at least 0")
    users: Count
    certificate: str = ""
    until: str = ""


class Registered(NamedTuple):
    """A node that Flower's SuperLink was told of: its name, and SHA-256 of its key for Flower."""

    name: str
    key: str


_REGISTERED = TypeAdapter(dict[int, Registered])


class AgreedNodes(Record):
    """`nodes/agreed.toml`, in the server's folder."""

    nodes: tuple[AgreedEntry, ...] = Field(strict=False)


def flower_connection(folder: Path) -> tuple[str, str]:
    """Name and HOST:PORT of the connection that Flower takes by default on the server.

    Raises:
        ConfigError: the server's folder has none.
    """
    path = folder / FLOWER_FOLDER / "config.toml"
    content = read_toml(path)
    try:
        connections = content["superlink"]
        name = connections["default"]
        address: str = connections[name]["address"]
        parse_address(address)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{path} must have the SuperLink's address, as `shufl provision` wrote it"
        ) from None
    return name, address


def read_json(path: Path, otherwise: Any) -> Any:
    """What a JSON file holds; `otherwise` where it is missing, cut short or of another type."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return otherwise
    return read if isinstance(read, type(otherwise)) else otherwise


def append_log(folder: Path, did: str, **what: object) -> None:
    """Appends to the operators' log in a folder who did what, and when."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as in a container
        name = str(os.getuid())
    if caller := os.environ.get("SUDO_USER"):
        name = f"{caller} as {name}"
    line = {"time": time.strftime("%FT%TZ", time.gmtime()), "by": name, "did": did}
    with (folder / LOG_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | what) + "\n")
