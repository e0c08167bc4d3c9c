"""The console that everything is printed to, but for errors, which `cli.options` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console as _Console  # noqa: TID251 (the one place)
from rich.text import Text

from shufl.protocol.text import printable


class Console(_Console):
    """Shows every string as it is: names, paths and messages may come from outside.

    rich takes `[node]` in a string for a style and `:cat:` for an emoji, and passes a terminal's
    escape codes on. Whoever wants a style prints a `rich.text.Text`.
    """

    def __init__(self, **options: Any):
        """Has the options of rich's."""
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """For what is printed, and for the cells and the title of a table."""
        return super().render_str(printable(text), **options)
