"""The package beside folders of the reader's, as a wheel, and for type checkers outside."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomli_w

from deployment_world import deployment_of
from nights import by_night
from run_world import json_lines, only_folder, tiny_config
from test_install import ROOT, distributions, environment_of

ROOMS = "accounting", "clients", "configs", "deploy", "server", "shuffler", "simulator"
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
    assert found == [ROOT / "simulator/section.py"]
    assert len(PATHS.findall(found[0].read_text())) == 1


# By day test_api.py has such modules beside a run with a shuffler and with Ray's workers.
@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        "--engine=vectorised",
        *by_night("--set=simulation.nodes=1", "--engine=vectorised --set=simulation.workers=2"),
    ],
    ids=["vectorised", "flower", "workers"],
)
def test_modules_of_the_reader_s_may_have_the_names_of_rooms(tmp_path, engine):
    for room in ROOMS:
        name = (
            f"{room}.py" if room in ("accounting", "server", "simulator") else f"{room}/__init__.py"
        )
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise ImportError('the reader’s module')\n")
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


@pytest.mark.slow
def test_a_wheel_has_the_code_and_what_it_reads_and_nothing_else(copy, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    code = [f"{room}/**/*{suffix}" for room in ROOMS for suffix in (".py", ".pyi", ".proto")]
    read = ["configs/**/*.toml", "deploy/templates/*", "deploy/flower_app/*", "simulator/page.*"]
    expected = {
        f"shufl/{path.relative_to(copy)}" for form in code + read for path in copy.glob(form)
    }
    expected |= {f"shufl/cli/{path.name}" for path in (copy / "src/shufl/cli").glob("*.py")}
    front = {"__init__.py", "__init__.pyi", "api.py", "py.typed", "trained.py"}
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
    found = distributions("shufl")
    python = environment_of(folder, {key: found[key] for key in found if key[0] != "shufl"})
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(request.getfixturevalue("wheel")) as archive:
        archive.extractall(packages)
    return python


_CHECKERS = {  # how each is told of an environment's Python, and what it says of a method
    "mypy": (
        "--python-executable",
        'Revealed type is "def (self: shufl.accounting.plan.PrivacyPlan) -> ',
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
