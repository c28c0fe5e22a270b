"""The report as Markdown: the compared methods, the tables, the learning curves, and how to reproduce them."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from research.paper.experiments import (
    BASE_TOOL_CALL,
    GOAL,
    GRPO,
    METHODS,
    NAIVE_RAG,
    SAMPLES,
    SOURCE,
    WINDOW,
    Base,
    Curve,
    Method,
    PaperConfig,
    Result,
    Training,
    by_name,
    median,
    plan_experiment,
    prepare_base,
    select_experiments,
)
from research.paper.run_experiments import Failure, Outcomes, load_finished, run_experiments


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``count`` runs. ``half`` is half the width of its 95 % interval, None for a single run.

    Example:
        Estimate(mean=0.5, half=0.2484, count=3)
    """

    mean: float
    half: float | None
    count: int

    @property
    def verdict(self) -> str:
        """The direction of a difference; "not resolved" if its interval includes 0, "equal" if all runs agree on 0."""
        if self.half is None:
            return "one run is not enough"
        if self.mean == self.half == 0:
            return "equal"
        if abs(self.mean) <= self.half:
            return "not resolved"
        return "lower" if self.mean < 0 else "higher"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and the 95 % interval, mean +- t * s / sqrt(n), t with n - 1 degrees of freedom (Student 1908).

    Raises:
        statistics.StatisticsError: if there are no values.

    Example:
        >>> estimate([0.4, 0.5, 0.6])
        Estimate(mean=0.5, half=0.2484..., count=3)
    """
    count = len(values)
    mean = statistics.fmean(values)
    if count == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, student_975(count - 1) * statistics.stdev(values) / math.sqrt(count), count)


def student_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with ``freedom`` >= 1 degrees of freedom, by bisection.

    Example:
        >>> student_975(2)
        4.3026...
    """
    low, high = 1.0, 13.0  # the quantile is 12.71 for 1 degree of freedom and falls to 1.96 as they grow
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _two_sided_probability(middle, freedom) < 0.95 else (low, middle)
    return high


def _two_sided_probability(t: float, freedom: int) -> float:
    """Return P(|T| <= t), a finite sum for integer degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    share = math.sin(angle) * total
    return 2 / math.pi * (angle + share) if odd else share


NOTHING = "-"

CRITIC_GOAL = 0.3
"""A method with a critic is compared if its critic explains more than this share of the variance of the returns."""

PAPER_COLUMN = "paper: average"

Measure = Callable[[Result], float]

Run = tuple[int, int]
"""The seeds of the base and of the training."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text.

    Example:
        TextTable(("method", "style-a"), (("GRPO", "0.997 ± 0.007"),))
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a comparison by method and run. ``planned`` holds the number of runs that each method should have.

    Example:
        Results({"grpo": {(0, 0): result}}, ("style-a",), {"grpo": 9})
    """

    by_method: Mapping[str, Mapping[Run, Result]]
    splits: tuple[str, ...]
    planned: Mapping[str, int]

    def of(self, method: Method) -> Mapping[Run, Result]:
        return self.by_method.get(method.name, {})

    def title(self, method: Method) -> str:
        """Return the method's title, with the number of runs if some are missing."""
        count, planned = len(self.of(method)), self.planned[method.name]
        return method.title if count == planned else f"{method.title} ({count} of {planned} runs)"

    def trainings(self, method: Method) -> list[Training]:
        return [result.training for result in self.of(method).values() if result.training is not None]

    def mean(self, method: Method, measure: Measure) -> Estimate | None:
        """Return the estimate of a measure over the runs of a method, None if there are no results."""
        values = [measure(result) for result in self.of(method).values()]
        return estimate(values) if values else None

    def pairs(self, method: Method, other: Method) -> list[tuple[Result, Result]]:
        """Return the results of two methods with the same base and seed. A method without training pairs by base."""
        others = self.of(other)
        own = self.of(method).items()
        found = [(result, others.get((base, seed if other.trains else 0))) for (base, seed), result in own]
        return [(result, paired) for result, paired in found if paired is not None]

    def explained_variance(self, method: Method) -> Estimate | None:
        """Return what the critic of a method explains, over its runs; None without a critic or without runs."""
        found = [training.explained_variance for training in self.trainings(method)]
        values = [value for value in found if value is not None]
        return estimate(values) if values else None


def gather(results: Iterable[Result], planned: Mapping[str, int]) -> Results:
    """Group results by method and run; ``planned`` is the number of runs of each method."""
    by_method: dict[str, dict[Run, Result]] = {}
    splits: dict[str, None] = {}
    for result in results:
        by_method.setdefault(result.method, {})[result.base, result.seed] = result
        splits |= dict.fromkeys(result.scores)
    return Results(by_method, tuple(splits), planned)


def counted(methods: Sequence[Method], results: Results) -> list[Method]:
    """Return the methods that are compared: without a critic, or with a critic that explains enough.

    An ablation (a method with a mask switched off) is compared if its full method is compared, because the missing mask
    may be the reason for a poor critic.
    """

    def explains(method: Method) -> bool:
        explained = results.explained_variance(method)
        return not method.critic or (explained is not None and explained.mean > CRITIC_GOAL)

    known = by_name(methods)
    return [method for method in methods if explains(known.get(method.ablates or method.name, method))]


def exact_match_table(methods: Sequence[Method], results: Results) -> TextTable:
    """Return exact match, greedy and sampled, on each split and on average, and the paper's average."""
    columns = [f"{kind}, {split}" for kind in ("greedy", "sampled") for split in (*results.splits, "average")]
    header = ("method", *columns, PAPER_COLUMN)
    measures = [*map(greedy_on, results.splits), greedy, *map(sampled_on, results.splits), sampled]
    rows = [
        (
            results.title(method),
            *(format_estimate(results.mean(method, measure)) for measure in measures),
            NOTHING if method.figures is None else f"{method.figures.average:.4f}",
        )
        for method in methods
    ]
    return TextTable(header, tuple(rows))


def greedy(result: Result) -> float:
    return result.greedy


def sampled(result: Result) -> float:
    return result.sampled


def greedy_on(split: str) -> Measure:
    return lambda result: result.scores[split].greedy


def sampled_on(split: str) -> Measure:
    return lambda result: result.scores[split].sampled


def efficiency_table(methods: Sequence[Method], results: Results) -> TextTable:
    """Return attempts and tokens until the goal, over all runs and by base, and what clips and critics did."""
    bases = sorted({base for runs in results.by_method.values() for base, _ in runs})
    header = (
        *("method", f"runs that reached {GOAL}", "attempts", "sampled tokens"),
        *(f"attempts, base {base}" for base in bases),
        *("clipped tokens", "explained variance"),
    )
    return TextTable(header, tuple(_efficiency_row(method, results, bases) for method in methods))


def _efficiency_row(method: Method, results: Results, bases: Sequence[int]) -> tuple[str, ...]:
    trainings = results.trainings(method)
    if not trainings:
        return (results.title(method), *[NOTHING] * (len(bases) + 5))
    runs = [(base, run.training.curve) for (base, _), run in results.of(method).items() if run.training is not None]
    by_base = [[curve.attempts_to_goal() for own, curve in runs if own == base] for base in bases]
    return (
        results.title(method),
        f"{sum(curve.reached() is not None for _, curve in runs)} of {len(runs)}",
        str(median([curve.attempts_to_goal() for _, curve in runs])),
        str(median([curve.tokens_to_goal() for _, curve in runs])),
        *(str(median(numbers)).partition(" ")[0] if numbers else NOTHING for numbers in by_base),
        format_estimate(estimate([training.clip_fraction for training in trainings])),
        format_estimate(results.explained_variance(method), digits=2),
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """A method compared with another one, run by run.

    Attributes:
        attempts: the difference of the attempts until the goal; None if one of the two was not trained.
        sampled: the difference of sampled exact match, the average over splits.
        greedy: the difference of greedy exact match.
    """

    method: Method
    other: Method
    pairs: int
    attempts: Estimate | None
    sampled: Estimate
    greedy: Estimate


def compare_with(methods: Sequence[Method], other: Method, results: Results) -> list[Compared]:
    """Compare each method with ``other``, run by run. Methods without pairs are left out."""
    found = []
    for method in methods:
        pairs = [] if method == other else results.pairs(method, other)
        if pairs:
            trainings = [(one.training, two.training) for one, two in pairs]
            attempts = [_attempts_apart(one, two) for one, two in trainings if one is not None and two is not None]
            found.append(
                Compared(
                    method,
                    other,
                    len(pairs),
                    estimate(attempts) if attempts else None,
                    estimate([one.sampled - two.sampled for one, two in pairs]),
                    estimate([one.greedy - two.greedy for one, two in pairs]),
                )
            )
    return found


def _attempts_apart(one: Training, other: Training) -> float:
    """Return the difference of the attempts until the goal. A run without success counts with all its attempts."""

    def attempts(curve: Curve) -> float:
        return min(curve.attempts_to_goal(), curve.attempts[-1])

    return attempts(one.curve) - attempts(other.curve)


def difference_table(compared: Sequence[Compared]) -> TextTable:
    """Return the differences with their verdicts, and the paper's difference of the averages."""
    header = (
        "method",
        "compared with",
        "pairs",
        "attempts",
        "result",
        "sampled",
        "result",
        "greedy",
        "result",
        "paper",
    )
    return TextTable(header, tuple(_difference_row(one) for one in compared))


def _difference_row(one: Compared) -> tuple[str, ...]:
    figures, others = one.method.figures, one.other.figures
    return (
        *(one.method.title, one.other.title, str(one.pairs)),
        format_estimate(one.attempts, digits=0, sign="+,"),
        NOTHING if one.attempts is None else one.attempts.verdict,
        *(format_estimate(one.sampled, sign="+"), one.sampled.verdict),
        *(format_estimate(one.greedy, sign="+"), one.greedy.verdict),
        NOTHING if figures is None or others is None else f"{figures.average - others.average:+.4f}",
    )


def format_estimate(estimate: Estimate | None, digits: int = 3, sign: str = "") -> str:
    """Return an estimate as text.

    Example:
        >>> format_estimate(Estimate(0.5, 0.2484, 3))
        '0.500 ± 0.248'
    """
    if estimate is None:
        return NOTHING
    mean = f"{estimate.mean:{sign}.{digits}f}"
    return mean if estimate.half is None else f"{mean} ± {estimate.half:{sign.strip('+')}.{digits}f}"


INTRODUCTION = f"""\
# The paper's comparison in miniature

Agent-R1's paper ({SOURCE}) trains Qwen2.5-3B-Instruct to answer questions of HotpotQA and 2WikiMultihopQA with a
search over Wikipedia. Here the same methods train models of 0.2M parameters on TinyWiki, a generated encyclopedia with
a search tool. The paper's figures are for reference only: neither the order of the methods nor their ratios can be
compared.

The models are tiny-base (base 0) and bases that were pretrained in the same way with other seeds. Their pretraining
holds no right transcript of two hops, and no stage asks for three: three-hop measures whether the trained agent
generalizes to longer questions. Naive RAG, the simplest baseline, cannot answer more than the one-hop questions, which
are a quarter of style-a and of style-b, and none of three-hop.
"""

SETTING = """\
- **Runs.** Each method that trains has {seeds} on each of {bases}. A seed determines the training questions, the
  sampling and newly initialized weights. A method without training is measured once on each base.
- **Algorithms differ.** A batch is divided into two optimizer steps, so that the importance ratios of the second are
  not 1 and clips act: the column of clipped tokens shows how much.
- **Attempts to {goal}.** Exact match of the training attempts, which are sampled at temperature 1 at questions that are
  each asked once, first has a mean of {goal} over {window} steps. This measure is not saturated if all methods end at
  the ceiling. Tokens are the sampled ones. Figures are medians over runs (of an even number, the lower middle value),
  with 95 % intervals by a bootstrap over runs (of three runs, their range). A run that does not get there counts as
  "never". A run has {steps} steps of 16 questions with 16 attempts.
- **Exact match** of the last weights is measured on {questions} questions per split, with one greedy attempt and
  {samples} attempts sampled at temperature 1. A figure is a mean over runs ± half the width of its 95 % interval by
  Student's t. Runs count as independent draws although some share a base, so an interval says little about bases in
  general.
- **Differences** are means over pairs of runs with the same base and the same seed. A difference whose interval
  includes 0 is not resolved: it may be zero, or too small or too noisy to see. Of twenty differences that are zero, one
  is resolved by chance. In differences of attempts, a run that never gets there counts with all its attempts.
- **Critics.** A method with a critic is compared only if its critic explains more than {critic} of the variance of the
  returns (predicted before the update, mean over the last third of the steps and over runs). With lambda below 1 the
  returns that a critic learns include its own values, which makes its share larger. Methods with masks switched off
  count with the critic of their full method.
"""

MASKS = """\
The masks are switched off one after the other. Differences are to the method with all its masks. PPO has lambda 0.95
here: with lambda 1, GAE is the return minus the value, whatever tokens are between, so that the advantage mask could
not show its effect.
"""

CURVES = """\
## Learning curves

![Learning curves]({picture})

Exact match of the training attempts over attempts. Lines are means over the seeds of a base, bands reach from the
lowest seed to the highest, and the dotted line is the goal. Methods that are not compared have curves too.
"""

MIXED = " It changed between experiments; remove runs/paper to run all of them again."


@dataclass(frozen=True, slots=True)
class Report:
    """The contents of a report.

    Attributes:
        command: the command that makes the report.
        methods: the methods of the comparison.
        bases: the base models.
        seeds: the number of seeds of a method that trains.
        outcomes: the results, and the experiments that failed.
        picture: the path of the learning curves relative to the report.
    """

    command: str
    methods: tuple[Method, ...]
    bases: tuple[Base, ...]
    seeds: int
    outcomes: Outcomes
    picture: str

    @property
    def planned(self) -> Mapping[str, int]:
        """The number of runs that each method should have."""
        return {method.name: len(self.bases) * (self.seeds if method.trains else 1) for method in self.methods}


def make_document(report: Report) -> str:
    """Return the whole report as Markdown."""
    results = gather(report.outcomes.results, report.planned)
    made = [method for method in report.methods if results.of(method)]
    methods = counted(made, results)
    parts = [
        INTRODUCTION,
        f"Made by\n\n    {report.command}\n",
        *([_failed(report.outcomes.failures)] if report.outcomes.failures else []),
        "## Setting\n",
        _setting(report),
        *_missing(report, results),
        *_methods_section([method for method in methods if method.table == 3], results),
        *_masks_section(methods, results),
        *_left_out([method for method in made if method not in methods], results),
        CURVES.format(picture=report.picture),
        _provenance(report),
    ]
    return "\n".join(parts)


def _setting(report: Report) -> str:
    results = report.outcomes.results
    questions = {score.n for result in results for score in result.scores.values()}
    steps = {len(result.training.curve.em) for result in results if result.training is not None}
    return SETTING.format(
        seeds=_count(report.seeds, "seed"),
        bases=_count(len(report.bases), "base"),
        steps=" or ".join(map(str, sorted(steps))),
        goal=GOAL,
        window=WINDOW,
        questions=" or ".join(map(str, sorted(questions))),
        samples=SAMPLES,
        critic=CRITIC_GOAL,
    )


def _count(number: int, noun: str) -> str:
    return f"one {noun}" if number == 1 else f"{number} {noun}s"


def _missing(report: Report, results: Results) -> list[str]:
    """Return a paragraph on runs that were planned and not made; [] if there are none."""
    planned, made = sum(report.planned.values()), len(report.outcomes.results)
    if made == planned:
        return []
    without = [method.title for method in report.methods if not results.of(method)]
    none = f" There are no runs of: {'; '.join(without)}." if without else ""
    text = f"{made} of {planned} were made; a method that has fewer than planned has their number beside its name."
    return [f"**Fewer runs than planned.** {text}{none}\n"]


def _methods_section(methods: Sequence[Method], results: Results) -> list[str]:
    trained = [method for method in methods if method.trains]
    baselines = [compare_with(trained, other, results) for other in (NAIVE_RAG, BASE_TOOL_CALL)]
    to_grpo = compare_with(trained, by_name(methods).get("grpo", GRPO), results)
    return [
        "## Table 3: methods\n",
        "Attempts and tokens until half of the sampled attempts are right:\n",
        markdown(efficiency_table(trained, results)),
        "Exact match of the last weights:\n",
        markdown(exact_match_table(methods, results)),
        "Differences, in the averages over splits for exact match:\n",
        markdown(difference_table([one for compared in (*baselines, to_grpo) for one in compared])),
        *(_findings(compared) for compared in (*baselines, to_grpo) if compared),
    ]


def _masks_section(methods: Sequence[Method], results: Results) -> list[str]:
    known = by_name(methods)
    fulls = dict.fromkeys(method.ablates for method in methods if method.ablates in known)
    shown = [method for method in methods if method.ablates in known or method.name in fulls]
    compared = [
        one
        for name in fulls
        if name is not None
        for one in compare_with([method for method in methods if method.ablates == name], known[name], results)
    ]
    heading = ["## Table 4: masks switched off\n", MASKS]
    if not compared:
        return [*heading, "None of these methods is compared: see below.\n"]
    return [
        *heading,
        markdown(efficiency_table(shown, results)),
        markdown(exact_match_table(shown, results)),
        markdown(difference_table(compared)),
        *(_findings([one for one in compared if one.other.name == name]) for name in fulls),
    ]


def _findings(compared: Sequence[Compared]) -> str:
    """Return one sentence per measure that says in which direction the differences are resolved."""
    lines = []
    measures = {
        "attempts to the goal": [(one.method, one.attempts) for one in compared],
        "sampled exact match": [(one.method, one.sampled) for one in compared],
        "greedy exact match": [(one.method, one.greedy) for one in compared],
    }
    for name, differences in measures.items():
        verdicts: dict[str, list[str]] = {}
        for method, difference in differences:
            if difference is not None:
                verdicts.setdefault(difference.verdict, []).append(method.title)
        texts = [f"{verdict} with {', '.join(titles)}" for verdict, titles in verdicts.items()]
        if texts:
            lines.append(f"- Compared with {compared[0].other.title}, {name}: {'; '.join(texts)}.")
    return "\n".join(lines) + "\n"


def _left_out(methods: Sequence[Method], results: Results) -> list[str]:
    """Return the section on methods whose critics explain too little; [] if there are none."""
    if not methods:
        return []
    return [
        "## Not compared\n",
        f"The critics of these methods, or of their full methods, did not explain more than {CRITIC_GOAL} of "
        "the\nvariance, so these figures do not test a critic.\n",
        markdown(efficiency_table(methods, results)),
        markdown(exact_match_table(methods, results)),
    ]


def markdown(table: TextTable) -> str:
    """Return a table in Markdown, with a newline at the end.

    Example:
        >>> print(markdown(TextTable(("method", "em"), (("GRPO", "1.0"),))))
        | method | em |
        |---|---|
        | GRPO | 1.0 |
    """
    header, *rows = (f"| {' | '.join(line)} |" for line in (table.header, *table.rows))
    return "\n".join([header, "|" + "---|" * len(table.header), *rows, ""])


def _failed(failures: Sequence[Failure]) -> str:
    lines = "\n".join(
        f"- {failure.method}, base {failure.base}, seed {failure.seed}: {failure.reason}" for failure in failures
    )
    return f"## Failed experiments\n\nThe tables do not include them.\n\n{lines}\n"


def _provenance(report: Report) -> str:
    """Return the section with the commands of each method, the bases, the versions and the hash of the code."""
    results = report.outcomes.results
    first = [result for result in results if (result.base, result.seed) == (0, 0)]
    codes = dict.fromkeys(result.provenance.code for result in results)
    versions = dict.fromkeys(_versions(result) for result in results)
    processors = dict.fromkeys(result.provenance.processor for result in results)
    lines = [
        "## Commands\n",
        "These are the commands for base 0 and seed 0; all other settings come from TinyWiki's recipe.\n",
        *(f"    {command}" for result in first for command in result.commands),
        "",
        *(f"- Base {base.seed}: {base.model}, weights {base.digest}." for base in report.bases),
        f"- Processor: {'; '.join(processors)}, one thread.",
        f"- Versions: {'; '.join(versions)}.",
        f"- Hash of the code: {', '.join(codes)}.{MIXED if len(codes) > 1 else ''}",
    ]
    return "\n".join(lines) + "\n"


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result.provenance.versions.items())


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
    from research.paper.experiments import draw

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
