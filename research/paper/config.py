"""What can be set of the comparison, and which cells that asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.errors import InvalidInput
from agent_r1.core.suggest import suggest
from research.paper.methods import METHODS, Method, by_name


class PaperConfig(BaseModel):
    """Which cells, a method under a seed each, how large, and where the report goes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    seeds: int = Field(default=3, ge=1)
    """Seeds of each method: 0, 1, .. up to this many."""

    jobs: int = Field(default=1, ge=1)
    """Cells at the same time, each in a process and on a core of its own."""

    cell: str = ""
    """One method alone, with --seed; its row is shown, no report is written."""

    seed: int | None = Field(default=None, ge=0)
    """The seed of --cell."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of each training run; left out: those of the world's recipe."""

    n: int = Field(default=200, ge=1)
    """Questions per split of each evaluation."""

    out: Path = Path("docs/results.md")
    """The report, beside which learning_curves.svg is drawn."""


WHOLE_ONLY = ("seeds", "jobs", "out")
"""Settings of the whole comparison, which say nothing of a single cell."""


def wanted(config: PaperConfig, methods: Sequence[Method] = METHODS) -> tuple[tuple[Method, int], ...]:
    """The methods and seeds that are asked for: seed by seed, so that what is done of it compares all methods.

    Raises InvalidInput for a cell that does not exist, or settings that do not go together.
    """
    if config.cell:
        return (_single(config, methods),)
    if config.seed is not None:
        raise InvalidInput("--seed", got=f"{config.seed} without --cell", do="add --cell NAME, or give --seeds N")
    return tuple((method, seed) for seed in range(config.seeds) for method in methods)


def _single(config: PaperConfig, methods: Sequence[Method]) -> tuple[Method, int]:
    known = by_name(methods)
    if config.cell not in known:
        do = f"{suggest(config.cell, known)} there are: {', '.join(known)}".strip()
        raise InvalidInput("--cell", got=repr(config.cell), do=do)
    if config.seed is None:
        raise InvalidInput("--cell", got=f"{config.cell!r} without its seed", do="add --seed K")
    for name in WHOLE_ONLY:
        if name in config.model_fields_set:
            raise InvalidInput(f"--{name}", got="it and --cell", do="leave one out: it is for the whole comparison")
    return known[config.cell], config.seed
