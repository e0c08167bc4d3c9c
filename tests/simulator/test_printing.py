"""What is printed is what is meant: no markup from outside, one line an error, no old accuracy."""

import io
import json
import re
import signal
import subprocess
from pathlib import Path

import click
import pytest
import typer
from rich import markup
from rich.table import Table
from rich.text import Text

from nights import by_night
from run_world import LIMIT, invoke, shufl_command, wait_until
from shufl.cli.__main__ import app, main
from shufl.cli.options import print_error
from shufl.learning.config import load
from shufl.protocol import RoundRecord
from shufl.protocol.console import Console
from shufl.protocol.text import one_line, rounded_down, rounded_up
from shufl.results.engine_interface import engine_of
from shufl.results.experiment import prepare
from shufl.results.progress import RoundProgress
from shufl.results.run import _describe

OUTSIDE = ["pip install 'shufl[node]'", "[red]x", "[/]", "a:cat:b", "\\[bold]y", "[@click=z]w"]


def printed(*what, **options):
    file = io.StringIO()
    Console(file=file, width=200, force_terminal=True, color_system=None).print(*what, **options)
    return file.getvalue()


@pytest.mark.parametrize("text", OUTSIDE)
def test_text_from_outside_is_printed_as_it_is(text):
    assert printed(text) == f"{text}\n"
    table = Table(title=text)
    table.add_column(text, footer=text)
    table.add_column(Text("ours", style="red"))
    table.add_row(text, Text(text))
    assert printed(table).count(text) == 4


def test_escape_codes_are_shown_and_do_nothing():
    shown = printed("a\x1b[31mb\nc\u202ed", Text("e"))
    assert shown == "a\\x1b[31mb\\nc\\u202ed e\n"


def test_help_has_every_command_once_in_a_group():
    shown = invoke("--help").stdout
    groups = re.findall(r"^╭─ ([A-Z][a-z ]+) ─", shown, re.M)
    assert groups == ["Options", "Train and measure", "Plan and account", "Deploy", "Operate"]
    told = re.findall(r"^│ ([a-z]+) +[A-Z]", shown, re.M)
    assert sorted(told) == sorted(typer.main.get_command(app).commands)


@pytest.mark.slow
def test_a_run_as_json_is_one_object_and_tells_its_progress_elsewhere(tmp_path):
    sets = "--set", "privacy.rounds=2", "--engine", "vectorised", "--runs", str(tmp_path)
    ended = invoke("run quickstart --json", *sets)
    summary = json.loads(ended.stdout)
    assert (summary["rounds"], Path(summary["folder"]).parent) == (2, tmp_path)
    assert summary["epsilon"]["blanket"]["epsilon"] > 0 and "round 2/2 " in ended.stderr


def test_every_help_text_is_shown_whole():
    """Of these typer makes rich markup."""

    def texts(command):
        yield command.help or ""
        yield from (getattr(each, "help", None) or "" for each in command.params)
        for name in getattr(command, "commands", {}):
            yield from texts(command.get_command(None, name))

    found = list(texts(typer.main.get_command(app)))
    assert len(found) > 100
    assert [markup.render(text).plain for text in found] == found


@pytest.mark.slow
def test_a_run_and_its_status_name_a_folder_with_brackets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    sets = ["simulation.engine=vectorised", "privacy.rounds=2", "training.evaluate_every=2"]
    given = [f"--set={setting}" for setting in sets]
    done = invoke("run quickstart --runs [red]x", *given)
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "[red]x").iterdir()
    assert done.stdout.count(str(folder)) == 2  # at the start and in the closing table
    first = next(line for line in done.stdout.splitlines() if line.startswith("round 1/2"))
    last = next(line for line in done.stdout.splitlines() if line.startswith("round 2/2"))
    assert "accuracy" not in first and re.search(r" accuracy \d+\.\d%  ε", last)
    done = invoke(f"status [red]x/{folder.name}")
    assert f" [red]x/{folder.name}: ended" in done.stdout


def of_round(round, accuracy):
    return RoundRecord(
        round, 0.5, "released", 9, 9, 9, 0, {}, 0, "accuracy", {"accuracy": accuracy}, 1.0
    )  # fmt: skip


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_accuracy_is_of_its_round_or_names_an_earlier_one(is_terminal):
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=is_terminal, color_system=None)
    shown = []
    with RoundProgress(console, 4, 1.0) as progress:
        for round, accuracy in enumerate([None, 0.25, None, 0.75], 1):
            progress(of_round(round, accuracy))
            progress._bar.refresh()
            shown.append(re.findall(r"accuracy .*?%[^ε]*(?=  ε)", file.getvalue())[-1:])
    assert shown == [
        [], ["accuracy 25.0%"], ["accuracy 25.0% in round 2"], ["accuracy 75.0%"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [
        ValueError("one\ntwo\r\n  three\u2028four\x1b[31m\x9b0mfive\u202e"),
        OSError(2, "No such\nfile", "a\nb\x1b[31m"),
        click.BadParameter("one\ntwo\tthree"),
        RuntimeError("long " * 100_000),
        TimeoutError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_one_short_printable_line(error, capsys):
    print_error(error)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.endswith("\n")
    assert err[:-1].isprintable() and len("error: \n") < len(err) <= 1100


def test_the_end_of_the_input_at_a_question_is_no_traceback(monkeypatch):
    def asked(standalone_mode):
        raise click.Abort

    monkeypatch.setattr("shufl.cli.__main__.app", asked)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


_BLOCKS = """
import pathlib, threading
pathlib.Path("imported").touch()
threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, *by_night(signal.SIGTERM)])
@pytest.mark.parametrize(
    ("setting", "begun"),
    [
        ("privacy.noise_multiplier=", None),
        *by_night(("model.name=blocks:model", "imported")),
    ],
    ids=["search", "import"],
)
def test_a_signal_before_a_run_ends_the_command_in_one_line(tmp_path, number, setting, begun):
    (tmp_path / "blocks.py").write_text(_BLOCKS)
    searches = "--set=privacy.accountant=blanket", "--set=privacy.shuffler_blankets=least-error"
    command = shufl_command("run", "quickstart", f"--set={setting}", *searches)
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        # Tests may run in a shell's background, where SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        if begun is None:
            assert process.stderr.readline().startswith("searching for noise multiplier and ")
        else:
            wait_until((tmp_path / begun).exists, LIMIT, "the import to begin")
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert (process.returncode, said) == (130, "error: interrupted\n")
    assert not (tmp_path / "runs").exists()


def test_a_long_line_keeps_both_its_ends_and_is_not_cut_twice():
    once = one_line("begin " + "x" * 5000 + "\n end")
    assert once.startswith("begin xxx") and once.endswith("xxx end") and len(once) == 1000
    assert one_line(once) == once
    assert one_line("as \\x1b it is") == "as \\x1b it is"


def test_what_is_printed_beside_an_epsilon_makes_it_no_smaller_than_it_is():
    assert (rounded_up(1 / 300), rounded_down(1 / 30_000)) == ("0.003334", "3.333e-05")
    assert (rounded_up(23.594761, 6), rounded_up(1e-5), rounded_up(2.0, 6)) == (
        "23.5948",
        "1e-05",
        "2",
    )


@pytest.mark.parametrize(("rate", "warned"), [(0.002, True), (0.5, False)])
def test_a_run_warns_of_a_delta_near_the_chance_to_take_part(capsys, rate, warned):
    changes = [f"privacy.check_in_rate={rate}", "privacy.rounds=1", "simulation.engine=vectorised"]
    changes += ["privacy.minimum_batch=1", "privacy.target_epsilon=1e6"]
    experiment = prepare(load("quickstart", changes))
    engine = engine_of("vectorised")(experiment)
    _describe(Console(width=200), experiment, engine, Path("runs"))
    said = capsys.readouterr().out
    assert ("publishes all updates without noise with probability 0.3" in said) == warned
