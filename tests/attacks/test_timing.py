"""`benchmarks/timing_attacks.py` finds leaks that are put into a copy of the code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_house import ROOMS

ROOT = Path(__file__).parents[2]
TIMER = """\
        while left := self._store.seconds_left(run_id, number):
            await asyncio.sleep(left)
        if has_window:
            await self._close(run_id, number)
"""

PADDING = {
    "clients/worker.py": [
        (
            "records = features[user], labels[user]\n",
            "records = features[user][: real[user]], labels[user][: real[user]]\n",
        )
    ]
}
"""The work follows the number of records. That alone changes no moment: see `test_worker.py`."""

LEAKS = {
    "sending": {
        "clients/deployed_node.py": [
            ("first = opened + self.window.send_after\n", "first = self.clock.now()\n")
        ]
    },
    "early close": {
        "shuffler/service/control_service.py": [(TIMER, "")],
        "shuffler/store/runs.py": [("(entry.seconds_left or entry.made < ", "(entry.made < ")],
    },
}
"""By attacker: reports leave when the work is done; the shuffler closes when the server asks."""


def changed(changes):
    """The files with these changes."""
    files = {}
    for name, pairs in changes.items():
        files[name] = (ROOT / name).read_text()
        for old, new in pairs:
            assert files[name].count(old) == 1, f"{name} has no such line any more: {old}"
            files[name] = files[name].replace(old, new)
    return files


@pytest.mark.parametrize("attacker", LEAKS)
def test_the_leaks_fit_the_code(attacker):
    for name, text in changed(PADDING | LEAKS[attacker]).items():
        compile(text, name, "exec")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("attacker", LEAKS)
def test_a_leak_is_found_in_60_rounds(attacker, tmp_path):
    for room in (*ROOMS, "benchmarks", "src"):
        shutil.copytree(ROOT / room, tmp_path / room, symlinks=True)
    for name, text in changed(PADDING | LEAKS[attacker]).items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "benchmarks/timing_attacks.py", "--rounds", "60", "--work-until", "5"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(row.startswith(f"{attacker:12} LEAK") for row in done.stdout.splitlines())
