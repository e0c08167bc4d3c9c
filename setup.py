"""Stops a build of a copy in which links have become files (an unpacked zip): it would be empty."""

from pathlib import Path

from setuptools import setup

lost = [str(room) for room in Path("src/shufl").iterdir() if not room.suffix and not room.is_dir()]
if lost:
    raise SystemExit(
        f"error: {', '.join(sorted(lost))} must be links to folders, and are files here: clone the "
        "repository with git (on Windows with core.symlinks=true)"
    )
setup()
