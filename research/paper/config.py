"""The settings of the comparison, and the experiments that they select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.errors import InvalidInput, suggest
from research.paper.methods import METHODS, Method, by_name


class PaperConfig(BaseModel):
    """Which experiments to run (one method on one base under one seed each), how large they are, and the report."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    seeds: int = Field(default=3, ge=1)
    """Number of seeds of each method that trains: 0, 1, .. seeds - 1."""

    bases: int = Field(default=3, ge=1)
    """Number of base models, pretrained with the seeds 0, 1, .. bases - 1. A base that is missing is pretrained, which
    takes three minutes."""

    jobs: int = Field(default=1, ge=1)
    """Number of experiments that run at the same time, each in its own process on one core."""

    finished: bool = False
    """Run no experiment: write the report from the experiments that are finished."""

    method: str = ""
    """Run this method only, with --seed and --base. Its line of the table is printed and no report is written."""

    seed: int | None = Field(default=None, ge=0)
    """The seed of --method."""

    base: int | None = Field(default=None, ge=0)
    """The seed of the base of --method. The default is 0, tiny-base."""

    steps: int = Field(default=24, ge=1)
    """Optimizer steps of each training run."""

    n: int = Field(default=100, ge=1)
    """Questions per split of each evaluation."""

    out: Path = Path("docs/results.md")
    """The file for the report; learning_curves.svg is written beside it."""


COMPARISON_ONLY = ("seeds", "bases", "jobs", "finished", "out")
"""Settings of the whole comparison, which have no effect on a single experiment."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A method to run, the seed of its base, and its seed."""

    method: Method
    base: int
    seed: int


def select_experiments(config: PaperConfig, methods: Sequence[Method] = METHODS) -> tuple[Selected, ...]:
    """Return the experiments to run. A method without training is run once on each base.

    They are ordered by seed, then by base, so that an interrupted comparison has as many runs of one method as of
    another.

    Raises:
        InvalidInput: if the method does not exist, or if settings contradict each other.
    """
    if config.method:
        return (_select_single(config, methods),)
    for name, value in (("seed", config.seed), ("base", config.base)):
        if value is not None:
            do = f"add --method NAME, or give --{name}s N"
            raise InvalidInput(f"--{name}", got=f"{value} without --method", do=do)
    return tuple(
        Selected(method, base, seed)
        for seed in range(config.seeds)
        for base in range(config.bases)
        for method in methods
        if seed == 0 or method.trains
    )


def _select_single(config: PaperConfig, methods: Sequence[Method]) -> Selected:
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
    return Selected(known[config.method], config.base or 0, config.seed)
