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
from agent_r1.core.files import atomic_write
from agent_r1.store.folder import run_folder
from agent_r1.training.progress import Progress
from research.paper.bases import prepare_base
from research.paper.config import PaperConfig, select_experiments
from research.paper.document import Report, make_document
from research.paper.experiments import plan_experiment
from research.paper.methods import METHODS, Method, by_name
from research.paper.run_experiments import Outcomes, load_finished, run_experiments
from research.paper.tables import TextTable, exact_match_table, gather

EXPERIMENTS = "paper"
"""The folder below ``runs`` that holds all experiments."""

PICTURE = "learning_curves.svg"


class ExperimentsFailed(AgentR1Error):
    """Some experiments failed; the results of the others are kept."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of a comparison. ``written`` holds the report and its picture; it is empty if none was written."""

    outcomes: Outcomes
    table: TextTable
    written: tuple[Path, ...]

    def raise_failures(self) -> None:
        """Raise ExperimentsFailed if an experiment failed."""
        failures = self.outcomes.failures
        if failures:
            total = len(failures) + len(self.outcomes.results)
            reasons = "; ".join(
                f"{failure.method} base {failure.base} seed {failure.seed}: {failure.reason}" for failure in failures
            )
            raise ExperimentsFailed(f"{len(failures)} of {total} experiments failed: {reasons}")


def compare(config: PaperConfig, progress: Progress, methods: Sequence[Method] = METHODS) -> Comparison:
    """Run the selected experiments that have no result yet, and write the report if the whole comparison is selected.

    Raises:
        InvalidInput: before any experiment runs, if one of them cannot run or if the picture cannot be drawn.
    """
    selected = select_experiments(config, methods)
    if not config.method:
        _require_matplotlib()
    folder = run_folder(EXPERIMENTS)
    bases = {seed: prepare_base(seed, folder, progress) for seed in sorted({one.base for one in selected})}
    experiments = [plan_experiment(one.method, bases[one.base], one.seed, config.n, config.steps) for one in selected]
    if config.finished:
        outcomes = load_finished(experiments, folder)
    else:
        outcomes = asyncio.run(run_experiments(experiments, folder, config.jobs, progress))
    chosen = tuple(by_name(one.method for one in selected).values())
    seeds = len({one.seed for one in selected})
    report = Report(command_of(config), chosen, tuple(bases.values()), seeds, outcomes, PICTURE)
    table = exact_match_table(chosen, gather(outcomes.results, report.planned))
    return Comparison(outcomes, table, () if config.method else write_report(report, config.out))


def _require_matplotlib() -> None:
    try:
        import_module("matplotlib")
    except ImportError as error:
        do = "pip install matplotlib, which draws the learning curves; --method does not need it"
        raise InvalidInput("matplotlib", got=f"{error}", do=do) from None


def write_report(report: Report, out: Path) -> tuple[Path, ...]:
    """Write the report and, beside it, its picture, and return their paths. Write nothing if there are no results."""
    from research.paper.curves import draw

    if not report.outcomes.results:
        return ()
    picture = out.with_name(report.picture)
    try:
        atomic_write(picture, draw(report.methods, report.outcomes.results))
        atomic_write(out, make_document(report).encode())
    except OSError as error:
        do = "give a writable --out; the results of the experiments are kept"
        raise InvalidInput("--out", got=f"{out}: {error.strerror}", do=do) from None
    return (out, picture)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return ``{"experiments": [{..}], "failed": [{"method", "base", "seed", "reason"}], "written": ["path"]}``."""
    return {
        "experiments": [asdict(result) for result in comparison.outcomes.results],
        "failed": [asdict(failure) for failure in comparison.outcomes.failures],
        "written": [str(path) for path in comparison.written],
    }


def render_comparison(comparison: Comparison) -> Group:
    """Return the comparison for a terminal: exact match, and the paths that were written."""
    grid = Table(*(escape(title) for title in comparison.table.header), box=box.SIMPLE_HEAD)
    for row in comparison.table.rows:
        grid.add_row(*map(escape, row))
    return Group(grid, *(escape(str(path)) for path in comparison.written))


def command_of(config: PaperConfig) -> str:
    """Return the command that runs the same experiments and writes the same report.

    Example:
        >>> command_of(PaperConfig(steps=5, jobs=2))
        'python -m research.paper --seeds 3 --bases 3 --steps 5'
    """
    given = {"seeds", "bases", *config.model_fields_set} - {"jobs", "finished"}
    names = [name for name in PaperConfig.model_fields if name in given]
    return " ".join(["python -m research.paper", *(f"--{name} {config.model_dump()[name]}" for name in names)])
