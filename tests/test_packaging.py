"""The package beside your folders that have the names of its rooms, and its Flower."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from packaging.requirements import Requirement

from deployment_world import deployment_of
from nights import by_night
from run_world import json_lines, only_folder, tiny_config
from shufl import vendor_internals
from test_house import ROOMS

ROOT = Path(__file__).resolve().parents[1]
ROOM = f"(?:{'|'.join(ROOMS)})"
BARE = re.compile(
    rf"\bfrom {ROOM}(?:\.\w+)* import\b"  # also in strings
    rf"|(?:^|[;\"'`]|\\n) *import {ROOM}\b"
    rf"|-m[ \"',]+{ROOM}\b(?!:)"
    rf"|[\"'`]{ROOM}(?:\.\w+)*:[a-z_]\w*[\"'`]",
    re.M,
)
PATHS = re.compile(r"sys\.path(\.\w+\(|\[| ?\+?= )|os\.chdir|PYTHONPATH")
WRITTEN = {".md", ".proto", ".py", ".pyi", ".sh", ".toml", ".yaml", ""}


def files(*folders):
    for folder in folders or [path for path in ROOT.iterdir() if not path.name.startswith(".")]:
        for path in (ROOT / folder).rglob("*") if (ROOT / folder).is_dir() else [ROOT / folder]:
            if path.is_file() and path.suffix in WRITTEN and "__pycache__" not in path.parts:
                yield path


def test_nothing_imports_a_room_but_as_part_of_shufl():
    ours = [*files("benchmarks", "docs", "src", "tests", *ROOMS), *ROOT.glob("*.md")]
    found = {str(path): BARE.findall(path.read_text(encoding="utf-8")) for path in ours}
    assert {path: bare for path, bare in found.items() if bare} == {}


def test_only_one_function_edits_where_modules_are_found():
    found = [path for path in files("src", *ROOMS) if PATHS.search(path.read_text())]
    assert found == [ROOT / "learning/your_code.py"]
    assert len(PATHS.findall(found[0].read_text())) == 1


@pytest.mark.parametrize(
    ("name", "package", "minor"), [("Flower", "flwr", "1.42"), ("Ray", "ray", "2.55")]
)
def test_flower_and_ray_are_those_whose_internals_are_used(name, package, minor):
    assert f"{name} {minor}" in " ".join(vendor_internals.__doc__.split())
    installed = importlib.metadata.version(package)
    assert installed.startswith(f"{minor}."), (
        f"{package} {installed} is installed, src/shufl/vendor_internals.py holds for {minor}: "
        "go through that file, then change the numbers there and here"
    )


def test_pip_installs_no_other_flower():
    needs = map(Requirement, importlib.metadata.requires("shufl"))
    (flower,) = [need.specifier for need in needs if need.name == "flwr" and need.specifier]
    assert "1.42.9" in flower and "1.41.9" not in flower and "1.43.0" not in flower


# By day test_api.py has such modules beside a run with a shuffler and with Ray's workers.
@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    by_night(
        "--engine=vectorised",
        "--set=simulation.nodes=1",
        "--engine=vectorised --set=simulation.workers=2",
    ),
    ids=["vectorised", "flower", "workers"],
)
def test_modules_of_yours_may_have_the_names_of_rooms(tmp_path, engine):
    for room in ROOMS:
        name = (
            f"{room}.py" if room in ("accounting", "server", "simulator") else f"{room}/__init__.py"
        )
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise ImportError('your module')\n")
    config = tiny_config(tmp_path, 1)
    deployment = deployment_of(tmp_path, nodes=1, rounds=2)
    (tmp_path / "deployment.toml").write_text(
        tomli_w.dumps(deployment.model_dump(mode="json", exclude_none=True))
    )

    def python(*arguments):
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stderr

    assert python("-m", "shufl.cli", "provision", "deployment.toml") == (0, "")
    runs = tmp_path / "runs"
    code, said = python("-m", "shufl.cli", "run", config, "--runs", runs, *engine.split())
    assert code == 0, said
    assert len(json_lines(only_folder(runs) / "metrics.jsonl")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("module", ["shufl.clients.node_process", "shufl.vendor_internals"])
def test_flower_sends_no_telemetry_whatever_of_shufl_imports_it(module):
    """Flower reads the variable when it is imported."""
    program = f"import {module}, flwr.supercore.telemetry as it; print(it.FLWR_TELEMETRY_ENABLED)"
    alone = {name: it for name, it in os.environ.items() if not name.startswith("FLWR_")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
