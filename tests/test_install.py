"""What an installation brings, from outside the repository: commands, files, types, no traps."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from typer.main import get_command

from deployment_world import deployment_of
from nights import by_night
from shufl.cli.__main__ import app
from shufl.deploy.rehearse import Rehearsal
from test_house import ROOMS

ROOT = Path(__file__).resolve().parents[1]


def distributions(name, extras=("",), found=None):
    """What pip installs for a requirement, of what is installed here, by name and extras."""
    found = {} if found is None else found
    installed = sysconfig.get_path("purelib")  # and not what a build left in src
    (distribution,) = importlib.metadata.distributions(name=name, path=[installed])
    key = distribution.name.lower(), tuple(extras)
    if key not in found:
        found[key] = distribution
        for text in distribution.requires or []:
            wanted = Requirement(text)
            markers = [
                wanted.marker is None or wanted.marker.evaluate({"extra": e}) for e in extras
            ]
            if any(markers):
                distributions(wanted.name, tuple(wanted.extras) or ("",), found)
    return found


def environment_of(folder, found, wheel):
    """An environment of its own, with shufl installed; returns its Python.

    What shufl depends on are links to the distributions `found`.
    """
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in (each for (name, _), each in found.items() if name != "shufl"):
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--no-compile", wheel], check=True)
    return python


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """What the image is built of."""
    copy = tmp_path_factory.mktemp("copy")
    made = shutil.ignore_patterns("*.egg-info", "__pycache__", "sites")
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        path = ROOT / line.removeprefix("!")
        if line.startswith("!") and path.is_dir():
            shutil.copytree(path, copy / path.name, symlinks=True, ignore=made)
        elif line.startswith("!"):
            shutil.copy(path, copy)
    return copy


def build(copy, out):
    script = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, out],
        cwd=copy,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def wheel(copy, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    done = build(copy, out)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.iterdir()
    return wheel


def lacks(package, extra):
    return f"needs {package}, which is not installed: pip install 'shufl[{extra}]'"


_PLAN = "-n 1000 --check-in-rate 0.1 --noise-multiplier 20 --rounds 2"
_TARGET = "-n 1000 --check-in-rate 0.1 --rounds 2 --target-epsilon 9"
_COLUMN = "table.csv --column kind --categories a,b --target-epsilon 1 --delta 0.01"
_PLANS = "calibrate -n 1000 --dimension 10 --target-epsilon 900"
# Of each command: what it answers, or its one line.
ANSWERS = {
    "run quickstart": lacks("torch", "simulation"),
    f"histogram {_COLUMN} --accountant local": "simulated: all that is random",
    f"histogram {_COLUMN} --out out": lacks("matplotlib", "simulation"),
    "experiment participation": lacks("torch", "simulation"),
    "report .": lacks("jinja2", "simulation"),
    f"account {_PLAN}": "theorem3",
    f"calibrate {_TARGET} --accountant local": "device sends",
    f"account {_PLAN} --plot plot.png": lacks("matplotlib", "simulation"),
    "audit -n 100 --check-in-rate 1 --noise-multiplier 1 --epsilon 9 --samples 100": "theorem3",
    "audit --end-to-end quickstart --epsilon 1": lacks("torch", "simulation"),
    f"{_PLANS} --device-megabytes 1e-9": "error: --device-megabytes must be at least",
    "node --config sites/ward-1/node.toml": lacks("flwr", "node"),
    "status sites": lacks("tensorboard", "server"),
    "metrics sites/shuffler-1": "shufl_disk_free_bytes",
    "metrics sites/ward-1": "shufl_device_epsilon_most",
    "provision deployment.toml": lacks("flwr", "server"),
    "register": lacks("flwr", "server"),
    "rehearse deployment.toml": lacks("flwr", "server"),
    "keys authority new": "new/authority.pem",
    "device status sites/ward-1/device.toml": "ledger",
    "record verify record": "0 lines follow each other",
    "shuffler --config missing.toml": "missing.toml: No such file",
    "doctor sites/shuffler-1": "ok      configuration",
    "doctor sites/ward-1": "pip install --constraint constraints.txt '.[node]'",
    "doctor sites/server": "pip install --constraint constraints.txt '.[server]'",
}


# Each command in a fork of one process.
_EACH = """
import json, os, sys
from shufl.accounting import epsilon_table  # once for all: it takes long to import
from shufl.cli.__main__ import main
for number, command in enumerate(json.load(sys.stdin)):
    if os.fork() == 0:
        said = os.open(f"said-{number}", os.O_CREAT | os.O_WRONLY)
        os.dup2(said, 1), os.dup2(said, 2)
        sys.argv[1:] = command.split()
        main()
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def pins_of(name, form):
    """Versions in a file of the repository, by normalised name."""
    found = re.findall(form, (ROOT / name).read_text(), re.M)
    return {re.sub("[-_.]+", "-", package.lower()): version for package, version in found}


def test_the_lock_has_the_tested_versions_of_what_a_site_installs():
    locked = pins_of("requirements.lock", r"^([\w.-]+)==(\S+)[^\n]*\\\n +--hash=sha256:")
    pinned = pins_of("constraints.txt", r"^([\w.-]+)==(\S+)")
    assert {name: pinned.get(name, version) for name, version in locked.items()} == locked
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["node"] + extras["server"]
    direct = {Requirement(each).name for each in wanted}
    assert direct - {"shufl", "torch", "torchvision"} <= locked.keys()


def test_every_command_is_tried():
    assert {command.split()[0] for command in ANSWERS} == set(get_command(app).commands)


@pytest.mark.slow
@pytest.mark.nightly
def test_each_command_without_torch_flower_and_ray_answers_or_names_its_extra(wheel, tmp_path):
    python = environment_of(tmp_path / "slim", distributions("shufl"), wheel)
    Rehearsal(deployment_of(tmp_path, nodes=1, rounds=2), tmp_path, tmp_path / "sites")
    (tmp_path / "table.csv").write_text("kind\na\nb\na\nb\n")
    (tmp_path / "record").touch()
    codes = subprocess.run(
        [python, "-c", _EACH],
        cwd=tmp_path,
        input=json.dumps(list(ANSWERS)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split()
    imported = subprocess.run(
        [python, "-c", "import shufl; shufl.PrivacyPlan; shufl.run"],
        capture_output=True,
        text=True,
    )
    said = imported.stderr.splitlines()[-1]
    assert said.startswith("ImportError: shufl.run needs ") and "'shufl[simulation]'" in said
    for number, (command, answer) in enumerate(ANSWERS.items()):
        said = (tmp_path / f"said-{number}").read_text()
        assert answer in said, command
        assert "Traceback" not in said, command
        one_line = said.count("\n") == 1 and codes[number] == "2"
        assert one_line or codes[number] == "0" or command.startswith("doctor"), command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "modules"),
    by_night(
        ("node", "shufl.deploy.node, shufl.clients.relay"),
        ("server", "shufl.deploy.server_app, shufl.deploy.rehearse, shufl.results.run_page"),
    ),
)
def test_a_site_s_doctor_is_content_with_its_extra(wheel, extra, modules, tmp_path):
    python = environment_of(tmp_path / "env", distributions("shufl", (extra,)), wheel)
    Rehearsal(deployment_of(tmp_path, nodes=1, rounds=2), tmp_path, tmp_path / "sites")
    node = tmp_path / "sites/ward-1"
    if extra == "node":
        file = node / "node.toml"
        file.write_text(file.read_text().replace('"simulated"', '"own"'))
        (node / "own").mkdir()
        for user in range(3):
            np.savez(node / f"own/{user}.npz", features=np.zeros((2, 1, 8, 8)), labels=[0, 9])
    program = f"import {modules}; from shufl.cli.__main__ import main; main()"
    done = subprocess.run([python, "-c", program, "doctor", node], capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    for what in ("versions", "plan", "model and records", "owner's limits"):
        assert f"ok      {what}" in done.stdout


@pytest.mark.slow
def test_a_wheel_has_the_code_and_what_it_reads_and_nothing_else(copy, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    code = [f"{room}/**/*{suffix}" for room in ROOMS for suffix in (".py", ".pyi", ".proto")]
    read = ["configs/**/*.toml", "deploy/templates/*", "deploy/flower_app/*", "results/page.*"]
    read.append("results/plain_words.html")
    expected = {
        f"shufl/{path.relative_to(copy)}" for form in code + read for path in copy.glob(form)
    }
    expected |= {f"shufl/cli/{path.name}" for path in (copy / "src/shufl/cli").glob("*.py")}
    front = {"__init__.py", "__init__.pyi", "api.py", "py.typed", "vendor_internals.py"}
    assert names == expected | {f"shufl/{name}" for name in front}


@pytest.mark.slow
def test_a_copy_without_links_is_not_built(copy, tmp_path):
    unpacked = shutil.copytree(copy, tmp_path / "unpacked", symlinks=True)
    link = unpacked / "src/shufl/server"
    link.unlink()
    link.write_text("../../server")
    done = build(unpacked, tmp_path)
    assert done.returncode == 1
    assert re.fullmatch("error: src/shufl/server must be links? to folders.*\n", done.stderr)


@pytest.fixture(scope="module")
def python(request, tmp_path_factory):
    """Of an environment with shufl."""
    if request.param == "editable":
        return Path(sys.executable)
    folder = tmp_path_factory.mktemp("environment")
    return environment_of(folder, distributions("shufl"), request.getfixturevalue("wheel"))


_CHECKERS = {  # how each is told of an environment's Python, and what it says of a method
    "mypy": (
        "--python-executable",
        'Revealed type is "def (self: shufl.accounting.privacy_plan.PrivacyPlan) -> ',
    ),
    "basedpyright": ("--pythonpath", '"(self: PrivacyPlan) -> str"'),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "checker"),
    [
        ("wheel", "basedpyright"),
        *by_night(("editable", "mypy"), ("editable", "basedpyright"), ("wheel", "mypy")),
    ],
    indirect=["python"],
)
def test_type_checkers_find_the_types_outside_the_repository(python, checker, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from shufl.accounting import PrivacyPlan\nreveal_type(PrivacyPlan.digest)\n"
    )
    option, found = _CHECKERS[checker]
    command = [sys.executable, "-m", checker, option, str(python), str(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found in done.stdout, done.stdout + done.stderr
