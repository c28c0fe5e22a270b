"""Experiments of the comparison and their results: one JSON file each, named after the experiment's configuration."""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

import agent_r1
import agent_r1.tasksets
from agent_r1.config import Layer
from agent_r1.core.errors import InvalidInput
from agent_r1.store.atomic_fs import atomic_write
from agent_r1.training.config import EvalConfig, TrainConfig, resolve_config
from research.paper.methods import Method, Setting

TASKSET = "tinywiki"

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True)
class Experiment:
    """One method under one seed.

    Attributes:
        settings: all settings of its command except the folder of the run.
        config_hash: a hash of the resolved configuration, including the algorithm's parameters. Other settings, or
            other defaults, therefore give another experiment.
    """

    method: Method
    seed: int
    settings: Mapping[str, Setting]
    config_hash: str

    @property
    def title(self) -> str:
        """The name in messages."""
        return f"{self.method.name} seed {self.seed}"

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.method.name}-seed{self.seed}-{self.config_hash}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line after ``agent-r1``."""
        options = (part for key, value in self.settings.items() for part in (f"--{key}", _option_text(value)))
        return (self.method.command, *options)


@dataclass(frozen=True, slots=True)
class Curve:
    """The learning curve of a run: the mean reward and the exact match on validation, as (step, value) pairs.

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
class Provenance:
    """The code that made a result, as a hash of the package, and the versions of the libraries."""

    code: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Result:
    """The scores of an experiment by split. ``run``, ``seconds`` and ``curve`` are None if nothing was trained.

    Example:
        Result("grpo", 0, "agent-r1 train --taskset tinywiki ..", {"style-a": Score(1.0, 200)}, provenance,
               run="runs/paper/grpo-seed0-1f0c22aa", seconds=46.1, curve=Curve(((1, 0.3),), ()))
    """

    method: str
    seed: int
    command: str
    scores: Mapping[str, Score]
    provenance: Provenance
    run: str | None = None
    seconds: float | None = None
    curve: Curve | None = None

    @property
    def average(self) -> float:
        """The mean exact match over splits."""
        return statistics.fmean(score.em for score in self.scores.values())


def plan_experiment(method: Method, seed: int, n: int, steps: int | None) -> Experiment:
    """Return the experiment of a method and a seed. Raises InvalidInput if this version cannot run it."""
    # The tables do not show pass@k, which takes as long as several steps: pass_k is 0.
    config_class: type[EvalConfig | TrainConfig]
    if method.command == "eval":
        config_class = EvalConfig
        settings: dict[str, Setting] = {"taskset": TASKSET, **method.settings, "n": n, "pass_k": 0, "seed": seed}
    else:
        config_class = TrainConfig
        length = {} if steps is None else {"steps": steps}
        settings = {"taskset": TASKSET, **method.settings, **length, "evaluate_n": n, "pass_k": 0, "seed": seed}
    taskset = agent_r1.tasksets.build(TASKSET, None, None, seed)
    resolved = resolve_config(config_class, [Layer("paper", settings)], taskset).model_dump(mode="json")
    config_hash = hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()[:8]
    return Experiment(method, seed, settings, config_hash)


def _option_text(value: Setting) -> str:
    """Return a setting as it is written on the command line."""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def current_provenance() -> Provenance:
    """Return the hash of the installed code and the versions of the libraries."""
    package = Path(agent_r1.__file__).parent
    code = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            code.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    versions = {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
    return Provenance(code.hexdigest()[:8], versions)


def result_file(folder: Path, experiment: Experiment) -> Path:
    return folder / f"{experiment.name}.json"


def save_result(path: Path, result: Result) -> None:
    """Write a result atomically."""
    atomic_write(path, (json.dumps(asdict(result), indent=1) + "\n").encode())


def load_result(path: Path) -> Result | None:
    """Return the saved result, None if there is no file. Raises InvalidInput if the file cannot be read."""
    try:
        return TypeAdapter(Result).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(str(path), got=reason, do="remove this file to run its experiment again") from None
