"""Grids of runs on a real Ray: interrupted and gone on with, a point that fails, the page."""

import csv
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w

from run_world import (
    LIMIT,
    invoke,
    json_lines,
    refused,
    same_model,
    shufl,
    shufl_command,
    tiny_config,
    trained,
    wait_until,
)
from shufl.learning.config import load
from shufl.protocol.validation import ConfigError
from shufl.results.run import Run
from shufl.simulator.grid.definition import load_grid
from shufl.simulator.grid.grid_page import plan_table, write_page
from shufl.simulator.grid.grid_points import check, play, read_result, write_result
from shufl.simulator.grid.table import take_over_rows, write_rows

GRID = """
title = "A tiny grid"
about = "Two lines."
base = "BASE"
across = "privacy.noise_multiplier"
label = "z"
values = [1.0, 2.0]
seeds = [3, 4]
[settings]
"simulation.engine" = "vectorised"
"privacy.rounds" = ROUNDS
"privacy.target_epsilon" = 1e6
[[series]]
name = "Fast!"
[[series]]
name = "[red]impossible"
each = [{}, {"simulation.silent" = 0.5}]
"""


CAME_TO = {
    "central_noise": 0.0, "score_name": "accuracy", "score": 0.25, "loss": None, "constant": None,
    "rounds": 3, "delta": None, "check_in_rate": 0.5, "noise_multiplier": 1.0,
    "shuffler_blankets": 0.0, "seconds": 0.5, "epsilon": {"pld": 2.0}, "adjacency": "replace",
    "accountant": "pld", "command": "a, b", "commit": "0123", "date": "2026-11-26 00:45+00:00",
    "rests_on": "", "versions": {"shufl": "1", "torch": "2+cpu"},
}  # fmt: skip


def write_grid(folder, rounds, **replacements):
    text = GRID.replace("BASE", str(tiny_config(folder, 3))).replace("ROUNDS", str(rounds))
    for old, new in replacements.items():
        text = text.replace(old, new)
    path = folder / "tiny-grid.toml"
    path.write_text(text)
    return path


def rounds_of(run):
    return [{**row, "seconds": 0} for row in json_lines(run / "metrics.jsonl")]


def check_the_model_of_one_point(folder, tmp_path, rounds):
    """It is that of a run alone; returns its folder."""
    sets = ["simulation.engine=vectorised", f"privacy.rounds={rounds}"]
    sets += ["privacy.target_epsilon=1e6", "privacy.noise_multiplier=2.0", "seed=4"]
    other = trained(load(str(tmp_path / "tiny.toml"), sets), tmp_path / "alone")
    (same,) = folder.glob("fast_2_4_*/*/model.pt")
    assert rounds_of(same.parent) == rounds_of(other)
    assert same_model(same.parent, other)
    return other


@pytest.mark.slow
def test_a_grid_has_a_page_of_the_runs_that_ended_and_names_the_others(tmp_path, ray_address):
    grid, results = write_grid(tmp_path, 6), tmp_path / "results"
    folder = results / "tiny-grid"
    pages = tmp_path / "pages"
    command = ["experiment", grid, "--results", results, "--pages", pages]
    on_a_cluster = {"env": {**os.environ, "RAY_ADDRESS": ray_address}}
    again = shufl(*command, **on_a_cluster)
    assert again.returncode == 1
    assert again.stderr == f"error: 2 of 8 runs failed, see {pages}/tiny-grid.md\n"
    assert "8 runs, 0 of them already there" in again.stdout
    assert again.stdout.count("  [red]impossible, 2, seed 3: failed: 3 rounds in a row were d") == 1
    page = (pages / "tiny-grid.md").read_text()
    assert "- [red]impossible, 2, seed 4: 3 rounds in a row were discarded" in page
    with (pages / "tiny-grid.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["series"], row["value"], row["seed"]) for row in rows} == {
        (series, z, seed)
        for series in ("Fast!", "[red]impossible")
        for z in ("1.0", "2.0")
        for seed in ("3", "4")
    } - {("[red]impossible", "2.0", "3"), ("[red]impossible", "2.0", "4")}
    mean = sum(float(row["score"]) for row in rows if row["value"] == "2.0") / 2
    assert f"{100 * mean:.2f} (" in next(
        line for line in page.splitlines() if line.startswith("| Fast! | ")
    )
    assert re.search(r"at commit [0-9a-f]{10}\+?, shufl 0.1.0, torch 2", page)
    assert (pages / "tiny-grid.svg").read_text().startswith("<?xml")

    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = refused(*command)
    assert said == f"another shufl experiment is at work in {folder}"

    other = check_the_model_of_one_point(folder, tmp_path, 6)
    (row,) = (row for row in rows if (row["value"], row["seed"]) == ("2.0", "4"))
    assert float(row["score"]) == json.loads((other / "summary.json").read_text())["accuracy"]

    told = json.loads(shufl(*command, "--json", **on_a_cluster).stdout)
    assert told["page"] == str(pages / "tiny-grid.md") and len(told["failed"]) == 2
    assert list(told["runs"][0])[:4] == ["series", "value", "seed", "score"]

    table = pages / "tiny-grid.csv"
    published = table.read_text()
    command[3] = tmp_path / "of-somebody-else"
    went_on = shufl(*command, **on_a_cluster)
    assert "8 runs, 6 of them already there" in went_on.stdout
    assert table.read_text() == published
    command[3] = tmp_path / "of-another"
    table.write_text(published.replace(row["score"], "much"))
    damaged = invoke(*command)
    assert damaged.exit_code == 1
    assert damaged.stderr.startswith(f"error: {table}: the row of Fast!, 2, seed 4 is damaged: ")
    assert damaged.stderr.count("\n") == 1


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.nightly
@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_before_any_result_leaves_an_older_page(tmp_path, interrupt):
    grid, pages, results = write_grid(tmp_path, 10_000), tmp_path / "pages", tmp_path / "results"
    pages.mkdir()
    (pages / "tiny-grid.md").write_text("older")
    command = ["experiment", grid, "--results", results, "--pages", pages]
    process = subprocess.Popen(
        shufl_command(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline().startswith("8 runs, 0 of them")
        wait_until(lambda: list(results.glob("*/*/*/metrics.jsonl")), LIMIT, "a run to begin")
        process.send_signal(interrupt)
        _, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == "error: interrupted; the same command goes on\n"
    assert [path.name for path in pages.iterdir()] == ["tiny-grid.md"]
    assert (pages / "tiny-grid.md").read_text() == "older"


@pytest.mark.slow
@pytest.mark.parametrize("tracked", [False, True])
def test_a_result_names_the_commit_of_its_own_code_alone(tmp_path, tracked):
    """An installed copy may lie in a checkout of something else."""
    source = Path(__file__).parents[2] / "src" / "shufl"
    shutil.copytree(source, tmp_path / "shufl", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".gitignore").write_text("__pycache__\n" + ("" if tracked else "shufl\n"))
    git = ["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "something"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    asked = "from shufl.results.run_folder import provenance; print(provenance()['commit'])"
    told = subprocess.run(
        [sys.executable, "-c", asked],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == (head.stdout[:10] if tracked else "")


def test_a_table_gives_results_to_points_of_its_very_configuration_alone(tmp_path):
    points = load_grid(str(write_grid(tmp_path, 3)))[1].points()
    table = tmp_path / "table.csv"
    write_rows([(points[0], CAME_TO)], table)
    take_over_rows(table, points, tmp_path / "same")
    assert [point for point in points if read_result(tmp_path / "same" / point.key)] == [points[0]]
    of_point = {"series": "Fast!", "value": 1.0, "seed": 3}
    assert read_result(tmp_path / "same" / points[0].key) == CAME_TO | of_point
    older = tmp_path / "older.csv"  # without the columns that came later
    with table.open() as file, older.open("w") as target:
        (row,) = csv.DictReader(file)
        assert (row["trainer"], row["privacy.rounds"], row["data.users"]) == ("shufl", "3", "60")
        assert row["date"] == CAME_TO["date"] and row["privacy.noise_multiplier"] == "1.0"
        names = [name for name in row if "." not in name and name not in ("date", "trainer")]
        writer = csv.DictWriter(target, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerow(row)
    take_over_rows(older, points, tmp_path / "from-older")
    came_to = read_result(tmp_path / "from-older" / points[0].key)
    assert came_to == CAME_TO | of_point | {"date": ""}
    others = load_grid(str(write_grid(tmp_path, 4)))[1].points()
    take_over_rows(table, others, tmp_path / "others")
    assert not (tmp_path / "others").exists()


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"0.25": "inf"}, "is damaged: score must be a number, got 'inf'"),
        ({"0.25": "nan"}, "is damaged: score must be a number, got 'nan'"),
        ({"0.25": ""}, "is damaged: score is missing"),
        ({",2.0,": ",-2.0,"}, "is damaged: epsilon"),
        ({"series,": "serie,"}, "must be a table that shufl experiment wrote; it has no column"),
        ({"0123": 'x"' + "y" * 200_000}, "must be a table that shufl experiment wrote"),
    ],
)
def test_a_damaged_table_gives_no_results(tmp_path, replaced, message):
    points = load_grid(str(write_grid(tmp_path, 3)))[1].points()
    table = tmp_path / "table.csv"
    write_rows([(points[0], CAME_TO)], table)
    text = table.read_text()
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new, 1)
    table.write_text(text)
    try:
        take_over_rows(table, points, tmp_path / "results")
    except ValueError as error:
        assert str(table) in str(error) and message in str(error) and "\n" not in str(error)
    else:
        raise AssertionError("it was taken for a table")
    assert not (tmp_path / "results").exists()


def test_a_result_that_is_damaged_is_played_anew(tmp_path):
    (point, *_) = load_grid(str(write_grid(tmp_path, 3)))[1].points()
    write_result(tmp_path, point, CAME_TO)
    good = read_result(tmp_path)
    assert good is not None and good["score"] == 0.25
    for damaged in ({}, [], good | {"score": None}, good | {"epsilon": []}):
        (tmp_path / "result.json").write_text(json.dumps(damaged))
        assert read_result(tmp_path) is None


@pytest.mark.slow
def test_a_point_that_a_signal_stops_has_no_result_and_is_gone_on_with(tmp_path, monkeypatch):
    (point, *_) = load_grid(str(write_grid(tmp_path, 3)))[1].points()
    train = Run.train

    def interrupted(run):
        return train(run, lambda model: signal.raise_signal(signal.SIGTERM))

    with monkeypatch.context() as patch:
        patch.setattr(Run, "train", interrupted)
        with pytest.raises(InterruptedError, match="the same command goes on with it"):
            play(point, tmp_path / "point", 1)
    assert read_result(tmp_path / "point") is None
    (begun,) = (tmp_path / "point").glob("*/metrics.jsonl")
    assert len(json_lines(begun)) == 1
    play(point, tmp_path / "point", 1)
    assert read_result(tmp_path / "point")["rounds"] == len(json_lines(begun)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_a_run_that_cannot_be_played_is_one_line_before_the_first_run(tmp_path):
    """Each setting is allowed, and that of `central` alone does not fit."""
    central = 'name = "central"\ntrainer = "central"\n[series.settings]\n"privacy.delta" = 1e-5'
    grid = write_grid(tmp_path, 3, **{'name = "[red]impossible"': central, "each = [": "# ["})
    asked = shufl("experiment", grid, "--results", tmp_path / "results")
    assert asked.returncode == 2
    assert re.fullmatch(
        r"error: central, [12], seed 3: data\.users must be left out with trainer central, .* got "
        r"60 for 1437 records\n",
        asked.stderr,
    )
    assert not list((tmp_path / "results").glob("*/*/"))


def test_series_whose_names_differ_in_no_letter_have_folders_of_their_own(tmp_path):
    text = write_grid(tmp_path, 3).read_text().replace("Fast!", "γ").replace("[red]impossible", "λ")
    (tmp_path / "tiny-grid.toml").write_text(text)
    keys = [point.key for point in load_grid(str(tmp_path / "tiny-grid.toml"))[1].points()]
    assert len(set(keys)) == len(keys)


def test_plain_training_is_played_for_every_value_that_changes_it(tmp_path):
    for across, plays in (("privacy.rounds", 2), ("privacy.clip_norm", 1)):
        grid = write_grid(
            tmp_path, 3, **{"privacy.noise_multiplier": across, "[1.0, 2.0]": "[4, 5]"}
        )
        text = grid.read_text().split("[[series]]")[0].replace('"privacy.rounds" = 3', "")
        grid.write_text(text + '[[series]]\nname = "plain"\ntrainer = "plain"\n')
        assert len(load_grid(str(grid))[1].points()) == plays * 2
        grid.write_text(grid.read_text().replace('trainer = "plain"', 'trainer = "plainly:Mine"'))
        assert len(load_grid(str(grid))[1].points()) == 2 * 2  # what it changes is not known


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"title": "titel"}, "unknown key titel; did you mean title?"),
        ({"privacy.noise_multiplier": "data.partition", "[1.0, 2.0]": '["iid", "odd"]'}, "'odd'"),
        ({"[3, 4]": "[3, 3]"}, "seeds must differ, got 3, 3"),
        ({"privacy.noise_multiplier": "seed"}, "across must be another setting than seed"),
        ({"[settings]": "[settings]\nseed = 5"}, "seed must be given by values and seeds alone"),
        ({"[1.0, 2.0]": "[]"}, "values"),
        ({"each = [{}, ": "each = ["}, "must have a table for each of the 2 values, got 1"),
        ({'"vectorised"': '"flower"'}, "a run must have simulation.engine vectorised"),
        ({"privacy.rounds": "privacy.round"}, "unknown key privacy.round; did you mean rounds?"),
    ],
)
def test_a_mistake_in_a_grid_is_one_line_before_any_work(tmp_path, replaced, message):
    grid, results = write_grid(tmp_path, 3, **replaced), tmp_path / "results"
    with pytest.raises(ConfigError, match=f"^.*{re.escape(message)}.*$"):
        load_grid(str(grid))[1].points()
    assert not results.exists()


def test_every_grid_that_ships_is_whole():
    with pytest.raises(ConfigError, match=r"an experiment is a TOML file or one of .*digits") as no:
        load_grid("nowhere")
    names = str(no.value).partition("one of ")[2].split(", ")
    for name in names:
        assert load_grid(name)[1].points()


def test_the_grid_of_the_docs_can_be_played(tmp_path):
    """Its values go for a line to which they do not belong; digits stand for MNIST's features."""
    page = Path("docs/experiments.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    of_base = {"privacy.accountant": "blanket", "privacy.shuffler_blankets": "least-error"}
    of_base |= {"privacy.noise_multiplier": "", "simulation.engine": "vectorised"}
    grid = tomllib.loads(text)
    grid |= {"base": "quickstart", "settings": of_base | grid["settings"]}
    (tmp_path / "grid.toml").write_text(tomli_w.dumps(grid))
    points = load_grid(str(tmp_path / "grid.toml"))[1].points()
    local = [each for each in points if each.config.privacy.accountant == "local"]
    assert len(local) == 9
    for point in local[::3]:
        check(point)


def test_a_page_of_one_seed_says_so(tmp_path):
    _, grid = load_grid(str(write_grid(tmp_path, 3)))
    points = grid.points()
    for seed, told in ((3, "one seed"), (4, "mean and range")):
        for point in points:
            if point.seed == seed:
                write_result(tmp_path / point.key, point, CAME_TO)
        text = write_page("x", grid, points, tmp_path, tmp_path / "pages", {}).read_text()
        assert f"## Test accuracy (%), {told}\n" in text
        assert text.count(" | 0123 |\n") == 4


def test_the_page_has_the_largest_epsilon_of_runs_that_differ_in_their_seed():
    """Another seed's run may be of another commit, whose accountant said more."""
    about = {"series": "ours", "value": 1.0, "adjacency": "replace", "accountant": "pld"}
    about |= {"check_in_rate": 0.1, "noise_multiplier": 1.0, "shuffler_blankets": 0.0}
    about |= {"rounds": 10, "delta": 1e-5}
    about |= {"versions": {"shufl": "0.1.0"}}
    given = [{"pld": 1.0, "crowd": 4.33641}, {"pld": 0.9, "crowd": 4.34087}, {"pld": 1.0}]
    commits = "0123456789", "", "0123456789"  # the second is of code that lay in no checkout
    results = [
        about | {"epsilon": epsilon, "commit": commit}
        for epsilon, commit in zip(given, commits, strict=True)
    ]
    heads, *rows = plan_table(SimpleNamespace(label="value"), results)
    assert [dict(zip(heads, row, strict=True)) for row in rows] == [
        {"series": "ours", "value": "1", "halting ε": "1 (pld)", "ε for every pair": "–"}
        | {"γ": "0.1", "z": "1", "λ": "0", "rounds": "10", "δ": "1e-05", "neighbours": "replace"}
        | {"ε pld": "1", "ε crowd": "4.341", "code": "0123456789, shufl 0.1.0"}
    ]
    _, row = plan_table(SimpleNamespace(label="value"), results[:2])
    assert row[3] == "4.341 (crowd)"
    results[1]["epsilon"] |= {"crowd": None}  # fewer users were there than it counts on
    heads, row = plan_table(SimpleNamespace(label="value"), results[:2])
    assert (row[3], row[heads.index("ε crowd")]) == ("–", "–")
