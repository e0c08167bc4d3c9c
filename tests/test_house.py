"""The rooms: how much code each holds, and that tools see all of it."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = {
    "accounting": 3819,
    "clients": 1198,
    "deploy": 2294,
    "learning": 3186,
    "protocol": 1205,
    "results": 1352,
    "server": 1137,
    "shuffler": 3033,
    "simulator": 2884,
    "src": 1843,
}
"""Lines of code: no blank lines, comments and docstrings. A commit that raises one says why."""
ROOMS = sorted({*MOST_LINES, "configs"} - {"src"})
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}


def modules_of(room):
    """The files of a room with Python that people write; links are other rooms."""
    for path in sorted((ROOT / room).rglob("*.py")):
        linked = any(folder.is_symlink() for folder in path.parents)
        if not linked and not path.name.endswith("_pb2.py"):
            yield path


def lines_of_code(path):
    """How many lines of a file hold code."""
    text = path.read_text(encoding="utf-8")
    strings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings.update(range(node.lineno, node.end_lineno + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


@pytest.mark.parametrize("room", MOST_LINES)
def test_a_room_has_no_more_code_than_was_agreed(room):
    assert sum(map(lines_of_code, modules_of(room))) <= MOST_LINES[room]


def test_every_room_is_a_link_in_the_package_and_has_its_number():
    links = {path.name for path in (ROOT / "src/shufl").iterdir() if path.is_symlink()}
    assert links == {*ROOMS}


def test_a_room_outside_the_package_is_refused_in_one_line():
    for room in MOST_LINES.keys() - {"src"}:
        done = subprocess.run(
            [sys.executable, "-S", "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True
        )
        last = done.stderr.splitlines()[-1]
        assert last.endswith(f"this folder is a part of the package shufl: import shufl.{room}")


def test_coverage_counts_every_module():
    measured = coverage.Coverage(config_file=ROOT / "pyproject.toml", data_file=None)
    measured.set_option("run:patch", [])
    measured.set_option("run:parallel", False)
    measured.start()
    measured.stop()
    counted = {Path(path) for path in measured.get_data().measured_files()}
    written = {path for room in MOST_LINES for path in modules_of(room)}
    assert {path for path in written if lines_of_code(path)} <= counted
