"""The first page of a run's report as a picture, by Chromium without a window.

python benchmarks/report_picture.py RUN_FOLDER docs/report.png
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from shufl.cli.experiment import page_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SCHEMES = {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}
WIDTH, MOST_HEIGHT, COLOURS = 900, 3000, 32
LIMIT = 1200  # seconds


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Opens a page in Chromium, with a profile beside it that nothing else uses."""
    quiet = "no-first-run disable-background-networking disable-component-update disable-sync"
    flags = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "hide-scrollbars"]
    flags += [*quiet.split(), f"user-data-dir={page.parent / 'profile'}"]
    return subprocess.run(
        [str(CHROMIUM), *(f"--{flag}" for flag in flags), *options, f"file://{page}"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
        cwd=page.parent,
    )


def take(run: Path, target: Path) -> None:
    """Writes the picture: the report up to where its second page begins, in a few colours."""
    page = page_of(run)
    with tempfile.TemporaryDirectory() as folder:
        first, shot = Path(folder) / "page.html", Path(folder) / "shot.png"
        first.write_text(page[: page.index('<h2 class="page"')] + "</body></html>")
        browse(first, f"--screenshot={shot}", f"--window-size={WIDTH},{MOST_HEIGHT}")
        whole = Image.open(shot).convert("RGB")
    empty = Image.new("RGB", whole.size, "white")
    box = ImageChops.difference(whole, empty).getbbox()
    assert box is not None
    whole = whole.crop((0, 0, WIDTH, box[3] + 16))
    whole.quantize(COLOURS).save(target, optimize=True)


def main() -> None:
    """Takes the picture that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("target", type=Path, help="the picture, a PNG file")
    given = parser.parse_args()
    if CHROMIUM is None:
        parser.error("chromium or google-chrome must be on the PATH")
    take(given.run, given.target)


if __name__ == "__main__":
    main()
