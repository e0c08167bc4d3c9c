"""Text from outside, made fit for a line of a terminal or of a log."""

_MOST, _END = 1000, 300


def printable(text: str) -> str:
    """The text, with an escape such as `\\x1b` for each character that has no picture of its own.

    Those are line breaks, a terminal's escape codes, and characters that turn the direction of
    writing or have no width.
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def one_line(text: str) -> str:
    """The text on one printable line of at most 1000 characters: its beginning and its end."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _MOST else f"{line[: _MOST - _END - 3]} … {line[-_END:]}"
