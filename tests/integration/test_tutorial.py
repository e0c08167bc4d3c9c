"""docs/tutorial.md, played block by block in an empty folder as its reader would."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from run_world import LIMIT, children, wait_until

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"^```(\w+) ?([^\n]*)\n(.*?)^```$", (ROOT / "docs/tutorial.md").read_text(), re.S | re.M
)

REHEARSAL = "$ shufl rehearse"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files of the page."""
    folder = tmp_path_factory.mktemp("tutorial")
    for _, label, text in BLOCKS:
        if title := re.fullmatch('title="(.+)"', label):
            (folder / title[1]).write_text(text)
    return folder


def commands(text):
    """Each command of a block, and the lines that the page shows of what it prints."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, *shown = part.splitlines()
        yield command, [line for line in shown if line != "…"]


def environment():
    found = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated environment
    return {**os.environ, "PATH": found, "COLUMNS": "120", "TERM": "dumb"}


NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"


def check_printed(shown, printed, command):
    """That every line shown was printed, in this order; `…` stands for anything.

    Numbers may differ by 1 %: what is sought ends at other digits on another processor.
    """
    lines = iter(re.sub(r" +", " ", printed).splitlines())
    for line in shown:
        parts = re.split(rf" ?(…) ?|({NUMBER})(?![\d.…])", re.sub(r" +", " ", line))
        numbers = [float(number) for number in parts[2::3] if number]
        pattern = re.escape(parts[0])
        for dots, text in zip(parts[1::3], parts[3::3], strict=True):
            pattern += (".*" if dots else rf"(?<!\d)({NUMBER})") + re.escape(text)
        assert any(
            [*map(float, match.groups())] == pytest.approx(numbers, rel=0.01)
            for match in map(re.compile(pattern).search, lines)
            if match
        ), f"{command}: {line}\n{printed}"


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.nightly  # other tests have each of its commands
def test_every_command_prints_what_the_page_says(place):
    assert sorted(path.name for path in place.iterdir()) == [
        "deployment.toml", "experiment.toml", "over-epsilon.toml", "wards.py"
    ]  # fmt: skip
    played = 0
    for language, _, text in BLOCKS:
        if language != "console" or REHEARSAL in text:
            continue
        for command, shown in commands(text):
            line = command.replace("…", "*")
            done = subprocess.run(
                line, shell=True, cwd=place, env=environment(), capture_output=True, text=True
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            check_printed(shown, done.stdout, command)
            played += 1
    assert played == 9
    (plot,) = place.glob("runs/*/score_epsilon.png")
    assert plot.stat().st_size > 10_000
    results = (place / "results/over-epsilon/over-epsilon.md").read_text()
    private, plain = re.findall(r"^\| (?:every pair|no privacy).*?\| (.*) \|$", results, re.M)[:2]
    at_one, at_four = (float(cell.split()[0]) for cell in private.split(" | "))
    best = float(plain.split()[0])
    assert min(at_one, at_four, best) > 85  # the commoner class alone is 77 % of the test records


@pytest.mark.nightly  # the deployments of other tests are rehearsals too
def test_the_rehearsal_begins_and_ends_as_the_page_says(place):
    ((command, shown),) = (
        pair for *_, text in BLOCKS if REHEARSAL in text for pair in commands(text)
    )
    out = place / "rehearsal.txt"
    with out.open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=place, env=environment(), stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until(lambda: "round 1/100" in out.read_text(), 200, "a round")
        started = children(process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT)
        check_printed(shown, out.read_text(), command)
        wait_until(lambda: not any(map(os.path.exists, map("/proc/{}".format, started))), 20, "end")
    finally:
        process.terminate()  # which ends all that it started
        process.wait(LIMIT)
