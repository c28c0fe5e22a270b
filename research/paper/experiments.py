"""A cell of the comparison, and what it came to: one JSON file each, found again by what was asked."""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

import agent_r1
import agent_r1.tasksets
from agent_r1.config import Layer
from agent_r1.core.errors import InvalidInput
from agent_r1.store.atomic_fs import atomic_write
from agent_r1.training.config import EvalConfig, TrainConfig, resolve_config
from research.paper.methods import Method, Setting

TASK = "tinywiki"

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True)
class Cell:
    """A method under one seed. ``settings`` are all that its command is given but a place for its run.

    ``digest`` is that of the resolved configuration, the algorithm's parameters included: asked with other settings, or
    under other defaults, it is another cell.
    """

    method: Method
    seed: int
    settings: Mapping[str, Setting]
    digest: str

    @property
    def title(self) -> str:
        """How it is called when speaking to a person."""
        return f"{self.method.name} seed {self.seed}"

    @property
    def name(self) -> str:
        """Its name among files."""
        return f"{self.method.name}-seed{self.seed}-{self.digest}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line after ``agent-r1``."""
        options = (part for key, value in self.settings.items() for part in (f"--{key}", _text(value)))
        return (self.method.door, *options)


@dataclass(frozen=True, slots=True)
class Curve:
    """How a run learned: the mean reward of each step's attempts, and the validation's exact match by step.

    Example:
        Curve(reward=((1, 0.31), (2, 0.42)), validation=((2, 0.5),))
    """

    reward: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Exact match over ``n`` questions."""

    em: float
    n: int


@dataclass(frozen=True, slots=True)
class Origin:
    """What made a result: a digest of the package's code, and the versions it ran on."""

    code: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Result:
    """What a cell came to, by split. ``run``, ``seconds`` of training and ``curve`` are None where nothing was trained.

    Example:
        Result("grpo", 0, "agent-r1 train --taskset tinywiki ..", {"style-a": Score(1.0, 200)}, origin,
               run="runs/paper/grpo-seed0-1f0c22aa", seconds=46.1, curve=Curve(((1, 0.3),), ()))
    """

    method: str
    seed: int
    command: str
    scores: Mapping[str, Score]
    origin: Origin
    run: str | None = None
    seconds: float | None = None
    curve: Curve | None = None

    @property
    def average(self) -> float:
        """The mean over splits."""
        return statistics.fmean(score.em for score in self.scores.values())


def plan(method: Method, seed: int, n: int, steps: int | None) -> Cell:
    """The cell of a method and a seed. Raises InvalidInput where this version cannot run it."""
    if method.door == "eval":
        settings: dict[str, Setting] = {"taskset": TASK, **method.settings, "n": n, "seed": seed}
        return Cell(method, seed, settings, _digest(_evaluated(settings, seed)))
    length = {} if steps is None else {"steps": steps}
    # The base model's pass@k is no part of the tables, and takes as long as several steps.
    settings = {"taskset": TASK, **method.settings, **length, "evaluate_n": n, "pass_k": 0, "seed": seed}
    return Cell(method, seed, settings, _digest(_trained(settings, seed)))


def _evaluated(settings: Mapping[str, Setting], seed: int) -> dict[str, Any]:
    taskset = agent_r1.tasksets.build(TASK, None, None, seed)
    return resolve_config(EvalConfig, [Layer("paper", settings)], taskset).model_dump(mode="json")


def _trained(settings: Mapping[str, Setting], seed: int) -> dict[str, Any]:
    taskset = agent_r1.tasksets.build(TASK, None, None, seed)
    return resolve_config(TrainConfig, [Layer("paper", settings)], taskset).model_dump(mode="json")


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:8]


def _text(value: Setting) -> str:
    """A setting as the command line takes it."""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def origin() -> Origin:
    """What would make a result now. Code of this folder only reports, so it is left out."""
    package = Path(agent_r1.__file__).parent
    files = (path for path in sorted(package.rglob("*")) if path.is_file() and path.suffix != ".pyc")
    digest = hashlib.sha256()
    for path in files:
        if Path(__file__).parent not in path.parents:
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    versions = {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
    return Origin(digest.hexdigest()[:8], versions)


def result_file(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.name}.json"


def keep(path: Path, result: Result) -> None:
    """Write a result down, whole or not at all."""
    atomic_write(path, (json.dumps(asdict(result), indent=1) + "\n").encode())


def kept(path: Path) -> Result | None:
    """The result that was written down, None where there is none. Raises InvalidInput where it cannot be read."""
    try:
        return TypeAdapter(Result).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(str(path), got=reason, do="remove this file, and its cell is run again") from None
