"""The comparison, from its settings to its report."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.store.atomic_fs import atomic_write
from agent_r1.store.folder import run_folder
from agent_r1.training.progress import Progress
from research.paper.config import PaperConfig, wanted
from research.paper.document import Report, document
from research.paper.experiments import plan
from research.paper.methods import METHODS, Method, by_name
from research.paper.run_experiments import Outcomes, run_cells
from research.paper.tables import PAPER_COLUMN, TextTable, comparison_table, gather

CELLS = "paper"
"""The folder, among runs, of all cells."""

PICTURE = "learning_curves.svg"


class CellsFailed(AgentR1Error):
    """Some cells could not be run; the others are kept."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison came to. ``written`` are the report and its picture; () where there is none to write."""

    outcomes: Outcomes
    table: TextTable
    written: tuple[Path, ...]

    def require_all(self) -> None:
        """Raise CellsFailed where a cell failed."""
        failures = self.outcomes.failures
        if failures:
            asked = len(failures) + len(self.outcomes.results)
            reasons = "; ".join(f"{failure.method} seed {failure.seed}: {failure.reason}" for failure in failures)
            raise CellsFailed(f"{len(failures)} of {asked} cells failed: {reasons}")


def compare(config: PaperConfig, progress: Progress, methods: Sequence[Method] = METHODS) -> Comparison:
    """Run the cells that are asked for and not done; where that is the whole comparison, write its report.

    Raises InvalidInput, before any cell runs, for what cannot be run or drawn.
    """
    pairs = wanted(config, methods)
    if not config.cell:
        _require_drawing()
    cells = [plan(method, seed, config.n, config.steps) for method, seed in pairs]
    outcomes = asyncio.run(run_cells(cells, run_folder(CELLS), config.jobs, progress))
    shown = tuple(by_name(method for method, _ in pairs).values())
    seeds = len({seed for _, seed in pairs})
    table = comparison_table(shown, gather(outcomes.results, seeds))
    report = Report(command_of(config), shown, seeds, outcomes, PICTURE)
    return Comparison(outcomes, table, () if config.cell else publish(report, config.out))


def _require_drawing() -> None:
    try:
        import_module("matplotlib")
    except ImportError as error:
        do = "pip install matplotlib, which draws the learning curves; --cell needs none"
        raise InvalidInput("matplotlib", got=f"{error}", do=do) from None


def publish(report: Report, out: Path) -> tuple[Path, ...]:
    """Write the report, and its picture beside it. Nothing is written where no cell came to anything."""
    from research.paper.curves import draw

    if not report.outcomes.results:
        return ()
    picture = out.with_name(report.picture)
    try:
        atomic_write(picture, draw(report.methods, report.outcomes.results))
        atomic_write(out, document(report).encode())
    except OSError as error:
        do = "give an --out that can be written; the cells are kept"
        raise InvalidInput("--out", got=f"{out}: {error.strerror}", do=do) from None
    return (out, picture)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The JSON of ``paper``: ``{"cells": [{..}], "failed": [{"method", "seed", "reason"}], "written": ["path"]}``."""
    return {
        "cells": [asdict(result) for result in comparison.outcomes.results],
        "failed": [asdict(failure) for failure in comparison.outcomes.failures],
        "written": [str(path) for path in comparison.written],
    }


def render_comparison(comparison: Comparison) -> Group:
    """The comparison for a terminal: our columns of its table, and where the report lies."""
    ours = comparison.table.header.index(PAPER_COLUMN)
    grid = Table(*(escape(title) for title in comparison.table.header[:ours]), box=box.SIMPLE_HEAD)
    for row in comparison.table.rows:
        grid.add_row(*(escape(text) for text in row[:ours]))
    return Group(grid, *(escape(str(path)) for path in comparison.written))


def command_of(config: PaperConfig) -> str:
    """The command that asks for the same cells and report again.

    Example:
        >>> command_of(PaperConfig(steps=5, jobs=2))
        'python -m research.paper --seeds 3 --steps 5'
    """
    names = [name for name in PaperConfig.model_fields if name in {"seeds", *config.model_fields_set} - {"jobs"}]
    return " ".join(["python -m research.paper", *(f"--{name} {config.model_dump()[name]}" for name in names)])
