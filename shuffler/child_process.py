"""The shuffler as a child process of the run that needs it."""

from __future__ import annotations

import functools
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

import tomli_w

from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire.channel import READY, parse_address
from shufl.shuffler.wire.errors import ShufflerError, ShufflerUnavailable

_TAIL_BYTES = 2000
# One credential serves all nodes of a run, and they train between two reports.
# At the end of the block only an abandoned release can still be running.
_LIMITS = {
    "calls": 2000,
    "calls_per_sender": 1000,
    "idle_seconds": 3600,
    "stop_seconds": 30,
    "release_hours": 1e4,  # a simulated round takes what it takes
    "runs_per_server": 64,
    "open_rounds_per_server": 64,
}
_START_SECONDS = 600.0
_STOP_SECONDS = 10.0  # to stop once the releases are over
_DAYS = 30  # the longest such a process may live
_ANY_USERS = 2**32  # a plan has no more
_TLS = {"certificate": "shuffler.pem", "key": "shuffler.key", "authority": "authority.pem"}


class ShufflerProcess:
    """Starts a shuffler as a process of its own, and stops it at the end of the `with` block.

    The child ends when this process does, even if that is killed. It finds the package from
    whatever working directory. What it writes to standard error is kept for error messages; give
    `log_file` to keep its log.

    It speaks TLS, with an authority and certificates made for this process and kept in memory, but
    for the shuffler's own.

    Attributes:
        control: what `ControlClient` needs: a server's credentials.
        submit: what `IntakeClient` needs: a node's credentials for any number of users.
        monitor: credentials that may ask for its health.
        address: `HOST:PORT` where it listens; set when the block is entered.
        stop_timeout: seconds after SIGTERM before SIGKILL: 10 more than the limit `stop_seconds`.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        listen: str = "127.0.0.1:0",
        log_file: Path | None = None,
        metrics: str | None = None,
        limits: Mapping[str, float] | None = None,
        floor: Mapping[str, float] | None = None,
        authority: Authority | None = None,
        simulation_seed: int | None = None,
    ) -> None:
        """Remembers how to start; `__enter__` does it.

        `listen` and `metrics` (for Prometheus) are `HOST:PORT`; port 0 picks a free one. `floor` is
        what the configuration has in `[floor]`.

        Args:
            directory: where its record is kept, also for a later start. Default: a temporary one
                that goes with the process; nothing there waits for the disk.
            limits: what its configuration has in `[limits]`. Defaults that differ: one credential
                may have 1000 calls, each silent for an hour, and `stop_seconds` is 30.
            authority: issues the certificates; default: a fresh one.
            simulation_seed: makes its blankets a function of this, for a simulation; default: they
                come from the operating system.
        """
        self.address = ""
        issue = functools.partial((authority or Authority.create(_DAYS)).issue, days=_DAYS)
        self._own = issue(Role.SHUFFLER, "shuffler", hosts=[parse_address(listen)[0]])
        self.control = issue(Role.SERVER, "server")
        self.submit = issue(Role.NODE, "node", users=_ANY_USERS)
        self.monitor = issue(Role.MONITOR, "monitor")
        all_limits = {**_LIMITS, **(limits or {})}
        config = {
            "listen": listen,
            "limits": all_limits,
            "tls": _TLS,
            "directory": directory and str(Path(directory).absolute()),
            "log_file": log_file and str(Path(log_file).absolute()),
            "metrics": metrics,
            "floor": floor,
            "simulation_seed": simulation_seed,
        }
        self._config: dict[str, Any] = {
            name: value for name, value in config.items() if value is not None
        }
        self.stop_timeout = all_limits["stop_seconds"] + _STOP_SECONDS
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pid(self) -> int:
        """The child's process id.

        Raises:
            ShufflerError: if it was not started.
        """
        if self._child is None:
            raise ShufflerError("the shuffler process was not started")
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the child is running."""
        return self._child is not None and self._child.poll() is None

    def __enter__(self) -> Self:
        """`start`, then `wait`."""
        self.start()
        self.wait()
        return self

    def start(self) -> None:
        """Starts the child, which then gets ready by itself; `__exit__` ends it in any case.

        Raises:
            ShufflerError: if it was started before.
        """
        if self._child is not None:
            raise ShufflerError("the shuffler process is already started")
        # The child's temporary files lie here, so that they go even if it has to be killed.
        self._scratch = tempfile.TemporaryDirectory(prefix="shufl-", ignore_cleanup_errors=True)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        scratch = Path(self._scratch.name)
        config = scratch / "config.toml"
        config.write_text(tomli_w.dumps(self._config), encoding="utf-8")
        self._own.write(scratch, "shuffler")
        try:
            self._child = subprocess.Popen(
                # -P: the working directory is not ours and may hold modules of any name.
                [
                    *(sys.executable, "-P", "-m", "shufl.cli", "shuffler"),
                    *("--config", str(config), "--exit-with-parent"),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "TMPDIR": self._scratch.name},
                # Ctrl-C at the terminal is for the run, which then stops the shuffler in order.
                process_group=0,
            )
        except BaseException:
            self._stop()
            raise

    def wait(self) -> None:
        """Waits until the started child listens.

        Raises:
            ShufflerUnavailable: if it ends or does not listen in time; with its last words.
        """
        assert self._child is not None
        try:
            self.address = self._wait_for_address(self._child)
        except BaseException:
            self._stop()
            raise

    def __exit__(self, *_: object) -> None:
        """Stops the child: SIGTERM, and SIGKILL if that does not help."""
        self._stop()

    def _wait_for_address(self, child: subprocess.Popen[bytes]) -> str:
        assert child.stdout is not None
        readable, _, _ = select.select([child.stdout], [], [], _START_SECONDS)
        if not readable:
            raise ShufflerUnavailable(
                f"the shuffler did not start within {_START_SECONDS:g} s{self._tail()}"
            )
        line = child.stdout.readline().decode(errors="replace")
        if not line:
            child.wait(self.stop_timeout)
            raise ShufflerUnavailable(
                f"the shuffler ended with exit code {child.returncode}{self._tail()}"
            )
        if not line.startswith(READY):
            raise ShufflerUnavailable(f"the shuffler said {line!r} instead of its address")
        return line.removeprefix(READY).strip()

    def _tail(self) -> str:
        """The end of the child's standard error, for a message."""
        assert self._errors is not None
        end = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, end - _TAIL_BYTES))
        text = self._errors.read().decode(errors="replace").strip()
        return f": {text}" if text else ""

    def _stop(self) -> None:
        child = self._child
        if child is not None:
            child.terminate()  # does nothing to a child that has ended
            try:
                child.wait(self.stop_timeout)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
        if self._errors is not None:
            self._errors.close()
        if self._scratch is not None:
            self._scratch.cleanup()
