"""`shufl device accept`: a node's owner accepts the plan of a further run, and what it costs."""

from __future__ import annotations

import math
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from shufl.accounting import rounds_within_budget
from shufl.clients import DeviceLimits
from shufl.clients.device_ledger import RunOffered, read_device, runs_of
from shufl.deploy.node import agreed_plan
from shufl.deploy.site_files import NodeSite, load_site
from shufl.learning.config import flat, load
from shufl.protocol.files import write_whole
from shufl.protocol.plan import differing
from shufl.protocol.validation import ConfigError, read_file

_OWNERS = "data", "config", "device", "socket"
"""Keys of `node.toml` that stay as the owner has set them."""


def enough(epsilon: float) -> float:
    """A `most_epsilon` that allows charges of this ε: three digits, rounded up."""
    return float(f"{epsilon * 1.01:.3g}")


@dataclass(frozen=True)
class Acceptance:
    """What it means to accept a plan for the next run.

    Attributes:
        differing: values of `run.toml` and `node.toml` that change, now and then, by key.
        charge: ε of the run, as the ledger will charge it.
        delta: the share of δ at which that is.
        total: ε of all runs together, with this one.
        limits, accepted: the owner's, now and then.
        files: what is to be written, by path, in order.
    """

    differing: dict[str, tuple[Any, Any]]
    charge: float
    delta: float
    total: float
    limits: DeviceLimits
    accepted: DeviceLimits
    files: dict[Path, bytes]

    def write(self) -> None:
        """Writes the files: `run.toml` last, since the former plan is still accepted."""
        for path, content in self.files.items():
            write_whole(path, content, mode=path.stat().st_mode & 0o777)


def acceptance(new: Path, folder: Path) -> Acceptance:
    """What changes at a node, whose folder this is, if its owner accepts a run's configuration.

    A `node.toml` beside the `new` file takes the place of the node's, which keeps its owner's keys.

    Raises:
        ConfigError, OSError: a file cannot be read, or is wrong.
        ValueError: the ledger is lost or damaged, or the owner's other limits refuse the plan.
    """
    if new.exists() and not new.is_file():  # it is read more than once
        raise ConfigError(f"{new} must be a file")
    site, config = load_site(folder / "node.toml", NodeSite), load(str(new))
    run, device, plan = Path(site.config), Path(site.device), agreed_plan(config)
    if device.stat().st_uid != os.geteuid():
        raise ConfigError(f"the account that owns {device} must run this: sudo -u shufl")
    ledger, limits = read_device(device)
    runs = runs_of(ledger, limits)
    changes = differing(_values(run), _values(new))
    if runs and not changes:  # the new file has taken the place of the old one already
        changes = differing(runs[-1].plan.by_key(), plan.by_key())
    node, of_node = _node_with(new.with_name("node.toml"), folder / "node.toml")
    changes |= {f"{key} (node.toml)": values for key, values in of_node.items()}

    begun = bool(runs) and not changes  # a run of it: another one is not accepted unasked
    if not begun:
        runs.append(RunOffered(len(runs) + 1, "", plan, rounds_within_budget(plan)))
    total, raised = math.fsum(map(limits.charge, runs)), dict[str, Any]()
    if not begun and limits.most_epsilon < total < math.inf:
        raised["most_epsilon"] = enough(total)
    if limits.plans and plan.digest() not in limits.plans:
        raised["plans"] = [plan.digest(), *limits.plans]
    accepted = limits.replace(**raised)
    accepted.check(plan)
    accepted.check_runs(runs, new=not begun)

    files = {device: _with_limits(device, raised), **node, run: new.read_bytes()}
    return Acceptance(
        changes,
        limits.charge(runs[-1]),
        limits.share(runs[-1].number),
        total,
        limits,
        accepted,
        {path: content for path, content in files.items() if path.read_bytes() != content},
    )


def _values(run: Path) -> dict[str, Any]:
    """All values of a run's configuration by their keys; the path of records as the file has it."""
    values = flat(load(str(run)).model_dump())
    if records := values.get("data.dataset.file"):
        values["data.dataset.file"] = os.path.relpath(records, run.absolute().parent)
    return values


def _with_limits(device: Path, raised: dict[str, Any]) -> bytes:
    """An owner's file with other limits; its comments and its other lines stay.

    Raises:
        ConfigError: the lines of these limits are not found.
    """
    text = before = device.read_bytes().decode("utf-8-sig")
    if "most_epsilon" in raised:
        line = rf"\g<1>{raised['most_epsilon']!r}"
        text = re.sub(r"(?m)^(\s*most_epsilon\s*=\s*)[^\s#]+", line, text)
    if "plans" in raised:
        line = rf'\g<1>\n    "{raised["plans"][0]}",'
        text = re.sub(r"(?m)^(\s*plans\s*=\s*\[)", line, text)
    if tomllib.loads(text) != tomllib.loads(before) | raised:
        raise ConfigError(f"{device}: most_epsilon and plans must each begin a line")
    return text.encode()


def _node_with(given: Path, own: Path) -> tuple[dict[Path, bytes], dict[str, tuple[Any, Any]]]:
    """A new `node.toml` in the place of a node's own, and its values that differ.

    Raises:
        ConfigError: it is wrong, or another node's.
    """
    if not given.exists() or given.samefile(own):
        return {}, {}
    new, old = read_file(given), read_file(own)
    new |= {key: old[key] for key in _OWNERS}
    NodeSite.checked(given, new)
    if new["certificate"] != old["certificate"]:
        raise ConfigError(
            f"certificate of {given} must be {old['certificate']}, that of this node, "
            f"got {new['certificate']}"
        )
    comments = "".join(re.findall(r"(?m)^#.*\n", given.read_text(encoding="utf-8")))
    changes = differing(old, new)
    return {own: (comments + tomli_w.dumps(new)).encode()} if changes else {}, changes
