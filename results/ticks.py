"""Numbers at the axes of plots. Only `plots.draw` imports this: matplotlib takes a while."""

from matplotlib.ticker import LogFormatter


class PlainNumbers(LogFormatter):
    """0.1 rather than a power of ten, whose typesetting takes as long as the rest of a plot."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The label at `x`; empty where matplotlib would have none."""
        return super().__call__(x, pos) and f"{x:g}"
