"""What the site needs beside the pages: the README as its first page, no links out of docs/."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]\[]*)\]\((?!https:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the README, whose links lead from docs/ here."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Leaves of a link the words alone where it leads out of docs/, as to an example's code."""
    folder = posixpath.dirname(page.file.src_uri)

    def inside(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[0] if files.get_file_from_path(target) else link[1]

    return _LINK.sub(inside, markdown)
