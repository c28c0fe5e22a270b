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
from agent_r1.core.files import atomic_write
from agent_r1.training.config import EvalConfig, TrainConfig, resolve_config
from agent_r1.training.servers import processor_name
from research.attempts_to_goal import Curve
from research.paper.bases import Base
from research.paper.methods import Method, Setting

TASKSET = "tinywiki"

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")

TRAINING: Mapping[str, Setting] = {
    "trainer.minibatches": 2,
    "evaluate_every": 0,
    "evaluate_n": 1,
    "pass_k": 0,
    "checkpoint_every": 0,
}
"""Settings of every run beside the recipe of the task set. With two optimizer steps per batch the importance ratios of
the second are not 1, so that clips act. The last weights are measured, by a command of its own."""

SAMPLES = 2
"""Sampled attempts at each question of an evaluation."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One method on one base under one seed.

    Attributes:
        settings: all settings of its first command except the folder of the run.
        sampling: the settings of its evaluation: the questions, and the sampled attempts at each.
        config_hash: a hash of the resolved configuration, including the algorithm's parameters, of the evaluation, and
            of the base's weights. Other settings, other defaults or another base therefore give another experiment.
    """

    method: Method
    base: Base
    seed: int
    settings: Mapping[str, Setting]
    sampling: Mapping[str, Setting]
    config_hash: str

    @property
    def title(self) -> str:
        """The name in messages."""
        return f"{self.method.name} base {self.base.seed} seed {self.seed}"

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.method.name}-base{self.base.seed}-seed{self.seed}-{self.config_hash}"

    def commands(self, run: str) -> tuple[tuple[str, ...], ...]:
        """Return the command lines after ``agent-r1``. A method that trains writes and evaluates ``run``."""
        if not self.method.trains:
            return (("eval", *_options({**self.settings, **self.sampling})),)
        evaluation = {"model": run, "methods": "trained", **self.sampling}
        return (("train", *_options({**self.settings, "run": run})), ("eval", *_options(evaluation)))


@dataclass(frozen=True, slots=True)
class Score:
    """Exact match on ``n`` questions of a split: of a greedy attempt, and of attempts sampled at temperature 1."""

    greedy: float
    sampled: float
    n: int


@dataclass(frozen=True, slots=True)
class Training:
    """What a training run recorded.

    Attributes:
        run: the folder of the run.
        curve: the exact match of the training attempts.
        clip_fraction: the share of tokens whose gradient the clip removed, the mean over all optimizer steps.
        explained_variance: the share of the variance of the returns that the critic predicted, the mean over the last
            third of the steps; None without a critic.
    """

    run: str
    curve: Curve
    clip_fraction: float
    explained_variance: float | None


@dataclass(frozen=True, slots=True)
class Provenance:
    """The code that made a result, as a hash of the package, the versions of the libraries, and the processor."""

    code: str
    versions: Mapping[str, str]
    processor: str


@dataclass(frozen=True, slots=True)
class Result:
    """The scores of an experiment by split. ``training`` is None if nothing was trained.

    Example:
        Result("grpo", 0, 0, ("agent-r1 train ..", "agent-r1 eval .."), {"style-a": Score(0.9, 0.7, 100)}, provenance,
               Training("runs/paper/grpo-base0-seed0-1f0c22aa", curve, 0.01, None))
    """

    method: str
    base: int
    seed: int
    commands: tuple[str, ...]
    scores: Mapping[str, Score]
    provenance: Provenance
    training: Training | None = None

    @property
    def greedy(self) -> float:
        """The mean greedy exact match over splits."""
        return statistics.fmean(score.greedy for score in self.scores.values())

    @property
    def sampled(self) -> float:
        """The mean sampled exact match over splits."""
        return statistics.fmean(score.sampled for score in self.scores.values())


def plan_experiment(method: Method, base: Base, seed: int, n: int, steps: int) -> Experiment:
    """Return the experiment of a method, a base and a seed. Raises InvalidInput if this version cannot run it."""
    settings: dict[str, Setting] = {"taskset": TASKSET, "model": base.model, **method.settings, "seed": seed}
    if method.trains:
        settings |= {"steps": steps, **TRAINING}
    sampling: dict[str, Setting] = {"n": n, "pass_k": 1, "pass_attempts": SAMPLES}
    config_class: type[EvalConfig | TrainConfig] = TrainConfig if method.trains else EvalConfig
    taskset = agent_r1.tasksets.build(TASKSET, None, None, seed)
    resolved = resolve_config(config_class, [Layer("paper", settings)], taskset).model_dump(mode="json")
    hashed = json.dumps([resolved, sampling, base.digest], sort_keys=True)
    return Experiment(method, base, seed, settings, sampling, hashlib.sha256(hashed.encode()).hexdigest()[:8])


def _options(settings: Mapping[str, Setting]) -> tuple[str, ...]:
    """Return settings as options of the command line."""
    return tuple(part for key, value in settings.items() for part in (f"--{key}", _option_text(value)))


def _option_text(value: Setting) -> str:
    """Return a setting as it is written on the command line."""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def current_provenance() -> Provenance:
    """Return the hash of the installed code, the versions of the libraries, and the processor of this machine."""
    package = Path(agent_r1.__file__).parent
    code = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            code.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    versions = {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
    return Provenance(code.hexdigest()[:8], versions, processor_name())


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
