"""Experiments of the comparison and their results: one JSON file each, named after the experiment's configuration."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

import agent_r1
import agent_r1.tasksets
from agent_r1.config import Layer
from agent_r1.core.errors import AgentR1Error, InvalidInput, suggest
from agent_r1.core.files import atomic_write
from agent_r1.store.reader import RunReader
from agent_r1.tasksets.tinywiki.model import TINY_BASE, TINY_BASE_FOLDER
from agent_r1.training.config import EvalConfig, TrainConfig, resolve_config
from agent_r1.training.progress import Progress
from agent_r1.training.servers import processor_name

GOAL = 0.5

WINDOW = 2
"""The number of steps over which exact match is averaged."""

RESAMPLES = 10_000
"""The number of bootstrap samples of an interval."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The exact match of each step of a run, and the attempts and sampled tokens up to the step, inclusive."""

    em: tuple[float, ...]
    attempts: tuple[int, ...]
    tokens: tuple[int, ...]

    def reached(self) -> int | None:
        """Return the index of the first step where the mean exact match of ``WINDOW`` steps is at least ``GOAL``."""
        ends = range(WINDOW, len(self.em) + 1)
        return next((end - 1 for end in ends if statistics.fmean(self.em[end - WINDOW : end]) >= GOAL), None)

    def until_goal(self, counts: Sequence[int]) -> float:
        """Return the count (``attempts`` or ``tokens``) at which the goal is reached; infinity if it is not."""
        place = self.reached()
        return math.inf if place is None else counts[place]


def read_curve(folder: Path) -> Curve:
    """Return the curve of the finished run in ``folder``."""
    with closing(RunReader(folder)) as reader:
        em, tokens = reader.curve("em"), reader.curve("tokens")
        size = reader.config()["groups_per_step"] * reader.config()["group_size"]
    steps = sorted(em)
    return Curve(
        tuple(em[step] for step in steps),
        tuple(size * (number + 1) for number in range(len(steps))),
        tuple(map(round, itertools.accumulate(tokens[step] for step in steps))),
    )


def median_text(values: Sequence[float]) -> str:
    """Return the median with an interval by a bootstrap over the values. Infinity counts as a large value.

    Example:
        >>> median_text([2688.0])
        '2,688 (2,688-2,688)'
    """
    generator = random.Random(0)
    drawn = sorted(statistics.median_low(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    found = statistics.median_low(values), *(drawn[int(q * (RESAMPLES - 1))] for q in (0.025, 0.975))
    value, low, high = ("never" if math.isinf(n) else f"{n:,.0f}" for n in found)
    return value if value == low == high == "never" else f"{value} ({low}-{high})"


PRETRAIN = ("-m", "research.tiny_base")
"""The arguments of Python that pretrain a base; the folder and ``--seed`` follow."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base model: the seed of its pretraining, its name or folder, and a hash of its weights."""

    seed: int
    model: str
    digest: str


def prepare_base(seed: int, folder: Path, progress: Progress) -> Base:
    """Return the base that was pretrained with ``seed``. Pretrain it in ``folder`` if it is not there.

    The base of seed 0 is tiny-base, which is part of the package.
    """
    if seed == 0:
        return Base(0, TINY_BASE, _digest(TINY_BASE_FOLDER))
    base = folder / f"base-{seed}"
    if not (base / "recipe.json").exists():  # the file that is written last
        arguments = (*PRETRAIN, str(base), "--seed", str(seed))
        progress.print_line(f"base {seed}: python {' '.join(arguments)}")
        process = subprocess.run([sys.executable, *arguments], stdin=subprocess.DEVNULL, capture_output=True)
        if process.returncode != 0:
            last = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise AgentR1Error(f"the pretraining of base {seed} failed: {' '.join(last)}")
    return Base(seed, str(base), _digest(base))


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:8]


Setting = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the paper's tables.

    Attributes:
        settings: the settings that differ from the defaults.
        paper: the average of exact match that the paper reports (arXiv 2511.14460v1, tables 3 and 4), if any.
        ablates: the name of the method that this one is an ablation of.
        critic: whether the method has a critic.
    """

    name: str
    title: str
    settings: Mapping[str, Setting]
    paper: float | None = None
    ablates: str | None = None
    critic: bool = False

    @property
    def trains(self) -> bool:
        """Whether the method trains a model. If not, its seed would only draw other samples."""
        return "methods" not in self.settings


NAIVE_RAG = Method("naive-rag", "Naive RAG", {"methods": ("naive-rag",)}, 0.1328)
BASE_TOOL_CALL = Method("base-tool-call", "Base Tool Call", {"methods": ("base-tool-call",)}, 0.0847)
"""The base model with its tool, before training."""
GRPO = Method("grpo", "GRPO", {"algorithm": "grpo"}, 0.3877)

COMPARED = (
    NAIVE_RAG,
    BASE_TOOL_CALL,
    Method("ppo", "PPO", {"algorithm": "ppo", "algorithm.advantage.lam": 1.0}, 0.3719, critic=True),
    GRPO,
    Method("reinforce++", "REINFORCE++", {"algorithm": "reinforce++"}, 0.33),
    Method("reinforce++-baseline", "REINFORCE++-baseline", {"algorithm": "reinforce++-baseline"}, 0.3619),
    Method("rloo", "RLOO", {"algorithm": "rloo"}, 0.3716),
    Method("steppo", "StepPO", {"algorithm": "steppo"}, critic=True),
)
"""Table 3. StepPO is newer than the paper, so it has no figure."""

LAMBDA_95: Mapping[str, Setting] = {"algorithm": "ppo", "algorithm.advantage.lam": 0.95}
"""With lambda 1, GAE is the return minus the value, whatever tokens are between, so that the advantage mask could only
change which values are whitened."""

NO_ADVANTAGE_MASK: Mapping[str, Setting] = {**LAMBDA_95, "algorithm.masks.advantage": False}
NO_MASKS: Mapping[str, Setting] = {**NO_ADVANTAGE_MASK, "algorithm.masks.loss": False}
PPO_95 = Method("ppo-95", "PPO (lambda 0.95)", LAMBDA_95, 0.3719, critic=True)

ABLATIONS = (
    PPO_95,
    replace(
        PPO_95,
        name="ppo-95-no-advantage-mask",
        title="PPO (lambda 0.95) without advantage mask",
        settings=NO_ADVANTAGE_MASK,
        paper=0.3136,
        ablates="ppo-95",
    ),
    replace(
        PPO_95,
        name="ppo-95-no-masks",
        title="PPO (lambda 0.95) without both masks",
        settings=NO_MASKS,
        paper=0.3022,
        ablates="ppo-95",
    ),
    Method(
        "grpo-no-loss-mask",
        "GRPO without loss mask",
        {"algorithm": "grpo", "algorithm.masks.loss": False},
        0.3722,
        ablates="grpo",
    ),
)
"""Table 4: the masks are switched off one after the other."""

METHODS = COMPARED + ABLATIONS


def by_name(methods: Iterable[Method]) -> Mapping[str, Method]:
    """Return the methods by name."""
    return {method.name: method for method in methods}


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
        return f"{self.method.name} base {self.base.seed} seed {self.seed}"

    @property
    def name(self) -> str:
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
    """The scores of an experiment by split. ``training`` is None if nothing was trained."""

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
    sampling: dict[str, Setting] = {"evaluate_n": n, "pass_k": 1, "pass_attempts": SAMPLES}
    config_class: type[EvalConfig | TrainConfig] = TrainConfig if method.trains else EvalConfig
    taskset = agent_r1.tasksets.build(TASKSET, None, None, seed)
    resolved = resolve_config(config_class, [Layer("paper", settings)], taskset).model_dump(mode="json")
    hashed = json.dumps([resolved, sampling, base.digest], sort_keys=True)
    return Experiment(method, base, seed, settings, sampling, hashlib.sha256(hashed.encode()).hexdigest()[:8])


def _options(settings: Mapping[str, Setting]) -> tuple[str, ...]:
    def text(value: Setting) -> str:
        return (
            ",".join(value)
            if isinstance(value, tuple)
            else str(value).lower()
            if isinstance(value, bool)
            else str(value)
        )

    return tuple(part for key, value in settings.items() for part in (f"--{key}", text(value)))


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


COLUMNS = 3
BASES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
"""Colors of the bases that color-blind readers can distinguish (Okabe and Ito); further bases begin again."""


def draw(methods: Sequence[Method], results: Sequence[Result]) -> bytes:
    """Return the learning curves as SVG: a panel for each trained method, a line and a band over seeds for each base.

    Equal results give equal bytes.
    """
    curves: dict[str, dict[int, list[Curve]]] = {}
    for result in results:
        if result.training is not None:
            curves.setdefault(result.method, {}).setdefault(result.base, []).append(result.training.curve)
    panels = [method for method in methods if method.name in curves]
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    # With a fixed salt the ids inside the file, and so its bytes, are the same each time.
    with rc_context({"svg.hashsalt": "agent-r1", "font.size": 9}):
        figure = Figure(figsize=(9.0, 0.8 + 1.9 * rows), layout="constrained")
        grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for index, method in enumerate(panels):
            axes = grid.flat[index]
            axes.set_title(method.title, fontsize=9)
            axes.set_ylim(-0.03, 1.03)
            axes.axhline(GOAL, color="#7F7F7F", linestyle=":", linewidth=1)
            axes.tick_params(labelbottom=index + COLUMNS >= len(panels))  # of the lowest panel in a column
            for base, seeds in sorted(curves[method.name].items()):
                points = list(zip(*(curve.em for curve in seeds), strict=False))  # a point for each step
                steps, color = seeds[0].attempts[: len(points)], BASES[base % len(BASES)]
                axes.fill_between(steps, [*map(min, points)], [*map(max, points)], color=color, alpha=0.15, linewidth=0)
                axes.plot(steps, [*map(statistics.fmean, points)], color=color, linewidth=1.4, label=f"base {base}")
        if panels:
            figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=9, frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


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

    out: Path = Path("runs/paper/report.md")
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
    another. Raise InvalidInput if the method does not exist, or if settings contradict each other.
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
