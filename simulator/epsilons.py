"""How an accountant's answer is shown in tables."""

from __future__ import annotations


def epsilon_text(epsilon: float | None) -> str:
    """An ε, or a dash for an accountant that does not price the mechanism."""
    return "–" if epsilon is None else f"{epsilon:.4g}"


def holds_for_text(epsilon: float | None, covers: str, warning: str | None) -> str:
    """What an ε holds for, with what limits it; without an ε only why there is none."""
    if epsilon is None:
        return warning or ""
    return f"{covers} ({warning})" if warning else covers
