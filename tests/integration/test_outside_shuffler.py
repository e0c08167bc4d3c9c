"""`shufl run` with a shuffler that somebody else has started, with TLS."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from run_world import (
    LongRun,
    json_lines,
    only_folder,
    shufl,
    shufl_command,
    tiny_config,
)
from shufl.accounting import Ledger
from shufl.server import load_checkpoint
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.simulator.config import ConfigError, load
from shufl.simulator.run import Run

ROUNDS = 2
CONFIG = """
listen = "127.0.0.1:0"
spool = "spool"
log_file = "log"
[tls]
certificate = "shuffler.pem"
key = "shuffler.key"
authority = "authority.pem"
[floor]
least_batch = 5
most_rounds = 1000
"""


@dataclass
class Outside:
    """A running shuffler, and the credentials for it."""

    place: Path
    address: str

    @property
    def settings(self) -> list[str]:
        return [
            f"--set=shuffler.server_certificate={self.place}/server.pem",
            f"--set=shuffler.node_certificate={self.place}/node.pem",
        ]

    def events(self) -> list[tuple[str, str | None, int | None]]:
        lines = map(json.loads, (self.place / "log").read_text().splitlines())
        return [(line["event"], line.get("run"), line.get("round")) for line in lines]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    place = tmp_path_factory.mktemp("outside")
    authority = Authority.create()
    for role, name, options in (
        (Role.SHUFFLER, "shuffler", {"hosts": ["127.0.0.1"]}),
        (Role.SERVER, "server", {}),
        (Role.NODE, "node", {"users": 60}),
        (Role.NODE, "few", {"users": 59}),
    ):
        authority.issue(role, name, **options).write(place, name)
    (place / "shuffler.toml").write_text(CONFIG)
    child = subprocess.Popen(
        shufl_command("shuffler", "--config", place / "shuffler.toml"),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        address = child.stdout.readline().removeprefix("shuffler listening on ").strip()
        yield Outside(place, address)
    finally:
        child.terminate()
        child.wait()
        child.stdout.close()


@pytest.mark.slow
def test_a_run_uses_a_shuffler_that_is_there_already(tmp_path: Path, outside: Outside):
    config, runs = tiny_config(tmp_path, ROUNDS), tmp_path / "runs"
    # Another directory than that of the credentials, whose paths are relative.
    shutil.copytree(outside.place, tmp_path / "keys", ignore=shutil.ignore_patterns("spool"))
    done = shufl(
        *("run", config, "--runs", runs, "--shuffler", outside.address),
        "--set=shuffler.server_certificate=keys/server.pem",
        "--set=shuffler.node_certificate=keys/node.pem",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    folder = only_folder(runs)
    assert f"shuffler at {outside.address}" in done.stdout
    assert not (folder / "shuffler.log").exists()
    rows = json_lines(folder / "metrics.jsonl")
    assert [row["outcome"] for row in rows] == ["released"] * ROUNDS
    run_id = Ledger.read(folder / "ledger.jsonl").run_id
    own = [(event, round) for event, run, round in outside.events() if run == run_id]
    assert [event for event in own if event[0] == "batch released"] == [
        ("batch released", round) for round in range(1, ROUNDS + 1)
    ]
    assert own[-1] == ("run ended", None)
    assert (
        f'server_certificate = "{tmp_path}/keys/server.pem"' in (folder / "config.toml").read_text()
    )


def last_round(ledger: Path) -> int:
    return Ledger.read(ledger).entries[-1].round


@pytest.mark.slow
def test_a_run_that_is_killed_or_interrupted_goes_on_at_the_same_shuffler(
    tmp_path: Path, outside: Outside
):
    long_run = LongRun(tmp_path, *outside.settings, f"--shuffler={outside.address}")
    try:
        long_run.wait_for_rounds(3)
        long_run.process.kill()
        long_run.finish()
        ledger = long_run.folder / "ledger.jsonl"
        done, spent = load_checkpoint(long_run.folder / "checkpoint.pt").round, last_round(ledger)
        again = subprocess.Popen(
            shufl_command("run", "--resume", long_run.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while last_round(ledger) < spent + 2:
            assert again.poll() is None, again.communicate()
            time.sleep(0.1)
        again.send_signal(signal.SIGINT)
        out, err = again.communicate(timeout=120)
        assert again.returncode == 130, err
        assert f"resumed after round {done}" in out
        assert done == spent or f"rounds {done + 1} to {spent} are spent and lost" in out
        # The run has not ended at the shuffler, so that it goes on from here, too.
        run_id = Ledger.read(ledger).run_id
        assert ("run ended", run_id, None) not in outside.events()
    finally:
        long_run.clean_up()


@pytest.mark.slow
def test_a_shuffler_that_refuses_is_one_line_before_any_work(tmp_path: Path, outside: Outside):
    done = shufl(
        *("run", tiny_config(tmp_path, ROUNDS), "--runs", tmp_path / "runs"),
        *("--shuffler", outside.address, *outside.settings, "--set", "privacy.minimum_batch=4"),
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "BELOW_FLOOR: this shuffler's floor has least_batch = 5" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"address": "127.0.0.1:9"}, "shuffler at 127.0.0.1:9 does not answer"),
        ({"address": "nowhere"}, r"an address is HOST:PORT .* got 'nowhere'"),
        ({"address": None}, "shuffler.server_certificate needs shuffler.address"),
        ({"server_certificate": None}, "shuffler.address needs shuffler.server_certificate"),
        ({"number": 2}, "shuffler.number must be 1 with shuffler.address, got 2"),
        ({"engine": "vectorised"}, "shuffler.address must be left out with engine vectorised"),
        ({"node_certificate": "few.pem"}, "node_certificate is for 59 users, the run has 60"),
        ({"node_certificate": "no/node.pem"}, "node_certificate: .*no/authority.pem: No such file"),
        ({"node_certificate": "node"}, "is called NAME.pem, got "),
        ({"server_certificate": "node.pem"}, "node.pem is no server's certificate"),
        ({"server_certificate": "stranger/server.pem"}, "does not answer"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_what_does_not_fit_is_one_line(
    tmp_path: Path, outside: Outside, settings: dict[str, str | None], words: str
):
    if not (outside.place / "stranger").exists():
        (outside.place / "stranger").mkdir()
        stranger = Authority.create().issue(Role.SERVER, "server")
        stranger.write(outside.place / "stranger", "server")
    keys = {
        "address": outside.address,
        "server_certificate": "server.pem",
        "node_certificate": "node.pem",
        **settings,
    }
    engine = keys.pop("engine", "flower")
    given = [
        f"shuffler.{key}={outside.place / value if key.endswith('certificate') else value}"
        for key, value in keys.items()
        if value is not None
    ]
    with pytest.raises(ConfigError, match=words) as refused:
        config = load(str(tiny_config(tmp_path, ROUNDS)), [*given, f"simulation.engine={engine}"])
        Run.new(config, tmp_path / "runs", Console()).train()
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()
