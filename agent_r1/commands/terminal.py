"""Parts of a report in a terminal: sparklines, tables of curves, and safe text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent_r1.viewer.text import number, visible

BLOCKS = "▁▂▃▄▅▆▇█"
"""The eight levels of a sparkline, from low to high."""
ASCII_BLOCKS = "_.,-=+*#"
"""The eight levels of a sparkline without Unicode, from low to high."""

NAME_WIDTH, WIDE_NAME_WIDTH, VALUE_WIDTH, MAX_BLOCKS = 27, 40, 8, 60
"""Widths in a table of curves, in characters: names in a narrow terminal, names in a wide terminal, each number, and
the largest sparkline."""

Curve = Mapping[int, float]
"""The values of a metric by step."""


def safe(text: str, style: str = "") -> Text:
    """Return ``text`` in a style such as "bold". Each control character is replaced by a visible character."""
    return Text(visible(text), style)


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Return a line of at most ``width`` blocks. The height of each block shows one value.

    If there are more than ``width`` values, a block shows the mean of neighboring values. A value that is not finite
    becomes a space.

    Example:
        >>> sparkline([0.0, 1.0, float("nan"), 2.0], 10)
        '▁▅ █'
    """
    count = min(len(values), width)
    bins = [values[index * len(values) // count : (index + 1) * len(values) // count] for index in range(count)]
    means = [_mean(part) for part in bins]
    known = [mean for mean in means if mean is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    top = len(blocks) - 1

    def block(mean: float | None) -> str:
        if mean is None:
            return " "
        return blocks[0 if high == low else round((mean - low) / (high - low) * top)]

    return "".join(map(block, means))


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


class CurveTable:
    """A table with one line per curve: name, sparkline, first value, last value, smallest value, largest value.

    ``steps`` is the number of values of the longest curve. ``blocks`` are the characters of the sparklines.
    """

    def __init__(self, width: int, steps: int, blocks: str) -> None:
        self._blocks = blocks
        self._names = NAME_WIDTH if width < 100 else WIDE_NAME_WIDTH
        self._room = max(6, min(steps, MAX_BLOCKS, width - self._names - 4 * VALUE_WIDTH - 6))
        heading = self._grid()
        heading.add_row("", "", *(Text(name, "dim") for name in ("first", "last", "min", "max")))
        self._parts: list[RenderableType] = [heading]

    def add_panel(self, title: str, unit: str, curves: Sequence[tuple[str, Curve]]) -> None:
        """Add the curves of one chart: a line with the title and the unit, and a line for each curve.

        If there is only one curve and its name repeats the title, both lines become one. ``curves`` are pairs (name,
        curve).
        """
        name, grid = Text.assemble((title, "bold"), (f"  {unit}", "dim")), self._grid()
        label = curves[0][0]
        if len(curves) == 1 and (label in f"{title} {unit}".lower() or title.lower() in label):
            self._add(grid, name if name.cell_len <= self._names else Text(title, "bold"), curves[0][1])
        else:
            self._parts.append(name)
            for label, curve in curves:
                self._add(grid, safe(f"  {label}"), curve)
        self._parts.append(grid)

    def rendered(self) -> Group:
        return Group(*self._parts)

    def _grid(self) -> Table:
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(width=self._names, no_wrap=True, overflow="ellipsis")
        grid.add_column(width=self._room, no_wrap=True, overflow="ellipsis")
        for _ in range(4):
            grid.add_column(width=VALUE_WIDTH, no_wrap=True, justify="right")
        return grid

    def _add(self, grid: Table, name: Text, curve: Curve) -> None:
        values = [curve[step] for step in sorted(curve)]
        finite = [value for value in values if math.isfinite(value)]
        shown = (values[0], values[-1], min(finite, default=math.nan), max(finite, default=math.nan))
        line = Text(sparkline(values, self._room, self._blocks), "cyan")
        grid.add_row(name, line, *(Text(_short_number(value)) for value in shown))


def _short_number(value: float) -> str:
    text = number(value, 3)
    return text if len(text) <= VALUE_WIDTH else number(value, 2)
