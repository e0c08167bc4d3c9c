"""Live progress: a bar on a terminal, a line in a notebook, a line every few rounds elsewhere."""

from __future__ import annotations

import datetime
import time
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from shufl.protocol import RoundRecord
from shufl.protocol.console import Console
from shufl.protocol.outcomes import RoundOutcome
from shufl.results.tables import epsilon_text, score_text


class RoundProgress:
    """Shows round, reports, score, epsilon so far against the budget, speed and time left."""

    def __init__(self, console: Console, rounds: int, target_epsilon: float):
        self._console = console
        self._rounds = rounds
        self._played = 0
        self._target = target_epsilon
        self._score = ""
        self._started = 0.0  # when the first round had ended
        self._shown: Any = None  # what a notebook shows
        self._every = max(1, rounds // 20)
        self._bar = Progress(
            TextColumn("round {task.completed:>4.0f}/{task.total:.0f}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task("starting", total=rounds)

    def __enter__(self) -> RoundProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, record: RoundRecord, every_pair: float | None = None) -> None:
        """Shows one finished round.

        Args:
            record: of the round.
            every_pair: ε so far by `blanket`, if another accountant halts the run.
        """
        first = self._played == 0
        score = self._score  # it names the earlier round that it is of
        if (value := record.metrics[record.score]) is not None:
            score = f"  {record.score} {score_text(record.score, value, 1)}"
            self._score = f"{score} in round {record.round}"
        released = record.outcome == RoundOutcome.RELEASED
        reports = f"{record.reports} reports" if released else record.outcome
        status = f"{reports}{score}  ε {epsilon_text(record.epsilon)} of {self._target:g}"
        if every_pair is not None:
            status += f", {epsilon_text(every_pair)} for every pair"
        if first:  # it is left out of the later speeds, because it warms up
            self._started, speed = time.monotonic(), 1 / record.seconds
        else:
            speed = self._played / (time.monotonic() - self._started)
        self._played += 1
        left = datetime.timedelta(seconds=round((self._rounds - record.round) / speed))
        status += f"  {speed:.3g} rounds/s, {left} left"
        if record.rejected:
            status += f"  {record.rejected} rejected"
        if record.silent_nodes:
            status += f"  {record.silent_nodes} nodes missing, see server.log"
        if self._console.is_jupyter:
            self._in_notebook(f"round {record.round}/{self._rounds}  {status}")
        elif self._console.is_terminal:
            self._bar.update(self._task, completed=record.round, description=status)
        elif first or record.round % self._every == 0 or record.round == self._rounds:
            self._console.print(f"round {record.round}/{self._rounds}  {status}", soft_wrap=True)

    def _in_notebook(self, line: str) -> None:
        """Shows a line of a notebook's output, in place of the one before."""
        from IPython.display import display

        if self._shown is None:
            self._shown = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._shown.update({"text/plain": line}, raw=True)
