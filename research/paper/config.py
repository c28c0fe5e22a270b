"""The settings of the comparison, and the experiments that they select."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.errors import InvalidInput
from agent_r1.core.suggest import suggest
from research.paper.methods import METHODS, Method, by_name


class PaperConfig(BaseModel):
    """Which experiments to run (one method under one seed each), how large they are, and where the report goes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    seeds: int = Field(default=3, ge=1)
    """Number of seeds of each method: 0, 1, .. seeds - 1."""

    jobs: int = Field(default=1, ge=1)
    """Number of experiments that run at the same time, each in its own process on one core."""

    method: str = ""
    """Run this method only, with --seed. Its line of the table is printed and no report is written."""

    seed: int | None = Field(default=None, ge=0)
    """The seed of --method."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of each training run. The default is the recipe's number."""

    n: int = Field(default=200, ge=1)
    """Questions per split of each evaluation."""

    out: Path = Path("docs/results.md")
    """The file for the report; learning_curves.svg is written beside it."""


COMPARISON_ONLY = ("seeds", "jobs", "out")
"""Settings of the whole comparison, which have no effect on a single experiment."""


def select_experiments(config: PaperConfig, methods: Sequence[Method] = METHODS) -> tuple[tuple[Method, int], ...]:
    """Return the methods and seeds to run.

    They are ordered by seed, so that an interrupted comparison has as many seeds of one method as of another.

    Raises:
        InvalidInput: if the method does not exist, or if settings contradict each other.
    """
    if config.method:
        return (_select_single(config, methods),)
    if config.seed is not None:
        raise InvalidInput("--seed", got=f"{config.seed} without --method", do="add --method NAME, or give --seeds N")
    return tuple((method, seed) for seed in range(config.seeds) for method in methods)


def _select_single(config: PaperConfig, methods: Sequence[Method]) -> tuple[Method, int]:
    known = by_name(methods)
    if config.method not in known:
        do = f"{suggest(config.method, known)} there are: {', '.join(known)}".strip()
        raise InvalidInput("--method", got=repr(config.method), do=do)
    if config.seed is None:
        raise InvalidInput("--method", got=f"{config.method!r} without a seed", do="add --seed K")
    for name in COMPARISON_ONLY:
        if name in config.model_fields_set:
            do = "leave one of them out: it applies to the whole comparison"
            raise InvalidInput(f"--{name}", got="it together with --method", do=do)
    return known[config.method], config.seed
