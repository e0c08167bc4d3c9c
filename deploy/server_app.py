"""The ServerApp of a deployed run: the same run as in a simulation, on the nodes of the SuperLink.

`shufl run --on` submits it. Its run configuration has paths on the SuperLink's machine: `site`, the
server's file, and `folder`, the run folder, where the run begins or goes on.

What a terminal would show is in the run folder: progress and tables in console.txt, how it ended in
outcome.json. A file named stop there ends the run in order after the round.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from shufl.accounting import Ledger, LedgerError
from shufl.deploy.server_site import (
    CONSOLE_FILE,
    OUTCOME_FILE,
    STOP_FILE,
    WAITING_FILE,
    ServerSite,
)
from shufl.deploy.site_files import check_cover, load_site
from shufl.learning.config import Config
from shufl.learning.data.features import check_digest
from shufl.learning.from_config import check_model_size
from shufl.learning.your_code import make_importable, one_line
from shufl.protocol.console import Console
from shufl.protocol.files import write_whole
from shufl.protocol.plan import Times
from shufl.protocol.text import logs_to
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import Experiment, prepare
from shufl.results.run import Run
from shufl.results.run_folder import MetricsError
from shufl.server import (
    CheckpointError,
    Deployed,
    Observe,
    RoundFailed,
    RoundLoop,
    RunEnd,
    ServerSettings,
    TrainingSettings,
)
from shufl.shuffler import ShufflerError

atexit.register(gc.freeze)  # as in `shufl` itself

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Plays the run."""
    given = {key: str(value) for key, value in context.run_config.items()}
    if not (given["site"] and given["folder"]):
        raise ConfigError("a deployed run is begun by shufl run --on, which names site and folder")
    os.umask(0o077)
    site_path = Path(given["site"])
    make_importable([site_path.parent])
    play(Path(given["folder"]), load_site(site_path, ServerSite), grid, given["attempt"])


def deployed_experiment(config: Config, shufflers: int) -> Experiment:
    """A run on real nodes and `shufflers` shufflers: nothing of it is drawn from the seed.

    No round is played again, so each has its checkpoint.
    """
    check_cover(config.privacy.cover)
    shuffler = config.shuffler.model_copy(update={"number": shufflers})
    training = config.training.model_copy(update={"checkpoint_every": 1})
    window = config.window or Times()
    decided = {"seed": "system", "shuffler": shuffler, "training": training, "window": window}
    experiment = prepare(config.model_copy(update=decided), check_model_size, real_nodes=True)
    experiment.plan.check_dimension(experiment.parameters)
    return experiment


def play(folder: Path, site: ServerSite, grid: Grid, attempt: str) -> None:
    """Begins the run in a folder, or goes on with it, and leaves its outcome there."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Flower's would leave no outcome
    with (folder / CONSOLE_FILE).open("a", encoding="utf-8", buffering=1) as file:
        console = Console(file=file, width=100)
        tell = functools.partial(console.print, highlight=False, soft_wrap=True)
        make_engine = functools.partial(DeployedEngine, site=site, grid=grid, tell=tell)
        try:
            deadline = time.monotonic() + _ENDING_SECONDS
            while Ledger.is_held(folder / "ledger.jsonl") and time.monotonic() < deadline:
                time.sleep(0.5)  # a killed SuperLink's ServerApp may live a moment longer
            ended = Run.of(folder, console, make_engine).train()
            outcome: dict[str, str] = {"stopped_by": ended.stopped_by}
        except _ENDS_EARLY as error:
            outcome = {"error": one_line(error)}
        except KeyboardInterrupt:
            # Flower interrupts this process after `flwr stop`. It also does when its SuperLink
            # ends, but then `_end_with_parent` ends the process during this sleep.
            time.sleep(_PARENT_SECONDS)
            outcome = {"error": _ENDED}
        except Exception as error:  # of Flower's, or ours; its traceback is in flower.log
            traceback.print_exc()
            why = f"{type(error).__name__}: {one_line(error)}; see flower.log"
            if getattr(getattr(error, "response", None), "status_code", None) == 401:
                why = _ENDED
            outcome = {"error": why}
        (folder / STOP_FILE).unlink(missing_ok=True)
        write_whole(folder / OUTCOME_FILE, json.dumps(outcome | {"attempt": attempt}).encode())
    if "error" in outcome:  # Flower shows the run as failed
        raise RuntimeError(outcome["error"])


def _end_with_parent(parent: int) -> None:
    """Ends this process when its SuperLink is gone: Flower's calls would wait for ever.

    At once, as if it were killed too: all that was spent is in the ledger, on disk.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


_ENDING_SECONDS = 60.0
_SHUFFLER_SECONDS = 60.0  # for a shuffler that is away to come back within a round
_PARENT_SECONDS = 5.0  # from an interrupt to the end of a SuperLink that has had it too
_ENDED = "the run was ended from outside, as by flwr stop"
_ENDS_EARLY = (
    *(CheckpointError, ConfigError, LedgerError, MetricsError, RoundFailed, ShufflerError),
    OSError,
)


class DeployedEngine:
    """Plays rounds on real nodes and real shufflers that others have started."""

    gradients = "on the nodes"
    nodes = "real"
    repeats_releases = False

    @staticmethod
    def check(config: Config, parameters: int) -> None:
        """Checks the model's size."""
        check_model_size(config, parameters)

    def __init__(
        self, experiment: Experiment, site: ServerSite, grid: Grid, tell: Callable[[str], None]
    ):
        """Checks the number of shufflers that the server's file names, and the data's digest."""
        if experiment.config.shuffler.number != len(site.shufflers):
            raise ConfigError(
                f"shuffler.number must be {len(site.shufflers)}, the shufflers of the server's "
                f"file, got {experiment.config.shuffler.number}"
            )
        data = experiment.config.data
        check_digest(data.dataset, data.features, site.digest)
        self.description = f"flower, real nodes; shufflers at {', '.join(site.shufflers)}"
        self._site, self._grid, self._tell = site, grid, tell
        self._sealing = experiment.config.shuffler.sealing
        self._make_aggregator = experiment.make_aggregator

    def run(self, training: TrainingSettings, observe: Observe, stop: threading.Event) -> RunEnd:
        """Plays rounds until the budget, the plan's last round, or the file that asks to stop.

        Raises:
            KeyboardInterrupt: the process was interrupted without that file.
        """
        site, asked = self._site, training.folder / STOP_FILE
        waits = _Waits(training.folder / WAITING_FILE, self._tell)
        settings = ServerSettings(
            **vars(training),
            policy=Deployed(
                patience=site.patience,
                round_timeout=site.round_timeout,
                shuffler_seconds=_SHUFFLER_SECONDS,
                agreed=lambda: site.agreed,
                tell=waits,
            ),
            shufflers=tuple((address, lambda: site.credentials) for address in site.shufflers),
            sealing=self._sealing,
            make_aggregator=self._make_aggregator,
        )

        def stopped() -> bool:
            return stop.is_set() or asked.exists()

        with logs_to(training.folder / "server.log", "shufl.server"):
            ended = RoundLoop(settings, self._grid, observe, stopped).run()
        if ended.stopped_by == "interrupt" and not asked.exists():
            raise KeyboardInterrupt
        return ended


class _Waits:
    """Tells what the run waits for, once, and keeps it in a file for as long as it waits."""

    def __init__(self, path: Path, tell: Callable[[str], None]):
        self._path, self._tell = path, tell
        self._line, self._since = "", 0.0
        path.unlink(missing_ok=True)  # of a process that was killed while it waited

    def __call__(self, line: str) -> None:
        if not line:
            self._path.unlink(missing_ok=True)
        elif line != self._line:
            self._tell(line)
            self._since = self._since if self._line else time.time()
            write_whole(self._path, json.dumps({"for": line, "since": self._since}).encode())
        self._line = line
