"""The report as Markdown: the tables, the learning curves, and how to reproduce them."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    ABLATIONS,
    BASE_TOOL_CALL,
    GOAL,
    GRPO,
    METHODS,
    NAIVE_RAG,
    SAMPLES,
    WINDOW,
    Base,
    Method,
    PaperConfig,
    Result,
    Training,
    by_name,
    draw,
    median_text,
    plan_experiment,
    prepare_base,
    select_experiments,
)
from research.paper.run_experiments import Failure, Outcomes, load_finished, run_experiments


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``count`` runs. ``half`` is half the width of its 95 % interval, None for a single run."""

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
    """Return the 97.5 % quantile of Student's t with ``freedom`` >= 1 degrees of freedom, by bisection."""
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

Measure = Callable[[Result], float]

Run = tuple[int, int]
"""The seeds of the base and of the training."""

TextTable = tuple[tuple[str, ...], ...]
"""The rows of a table of text; the first has the titles."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a comparison by method and run; ``planned`` is the number of runs that a method should have."""

    by_method: Mapping[str, Mapping[Run, Result]]
    planned: Mapping[str, int]

    @classmethod
    def of_all(cls, results: Iterable[Result], planned: Mapping[str, int]) -> Results:
        by_method: dict[str, dict[Run, Result]] = {}
        for result in results:
            by_method.setdefault(result.method, {})[result.base, result.seed] = result
        return cls(by_method, planned)

    @property
    def splits(self) -> list[str]:
        runs = (result for runs in self.by_method.values() for result in runs.values())
        return list(dict.fromkeys(split for result in runs for split in result.scores))

    def of(self, method: Method) -> Mapping[Run, Result]:
        return self.by_method.get(method.name, {})

    def title(self, method: Method) -> str:
        """Return the method's title, with the number of runs if some are missing."""
        count, planned = len(self.of(method)), self.planned[method.name]
        return method.title if count == planned else f"{method.title} ({count} of {planned} runs)"

    def trainings(self, method: Method) -> list[Training]:
        return [result.training for result in self.of(method).values() if result.training is not None]

    def mean(self, method: Method, measure: Measure) -> Estimate | None:
        values = [measure(result) for result in self.of(method).values()]
        return estimate(values) if values else None

    def pairs(self, method: Method, other: Method) -> list[tuple[Result, Result]]:
        """Return the results of two methods with the same base and seed. A method without training pairs by base."""
        found = [
            (result, self.of(other).get((base, seed if other.trains else 0)))
            for (base, seed), result in self.of(method).items()
        ]
        return [(result, paired) for result, paired in found if paired is not None]

    def explained_variance(self, method: Method) -> Estimate | None:
        """Return what the critic of a method explains, over its runs; None without a critic or without runs."""
        found = [training.explained_variance for training in self.trainings(method)]
        values = [value for value in found if value is not None]
        return estimate(values) if values else None


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

    def on(split: str, kind: str) -> Measure:
        return lambda result: result.scores[split].greedy if kind == "greedy" else result.scores[split].sampled

    columns: dict[str, Measure] = {}
    for kind in ("greedy", "sampled"):
        columns |= {f"{kind}, {split}": on(split, kind) for split in results.splits}
        columns[f"{kind}, average"] = _average(kind)
    rows = [
        (
            results.title(method),
            *(format_estimate(results.mean(method, measure)) for measure in columns.values()),
            NOTHING if method.paper is None else f"{method.paper:.4f}",
        )
        for method in methods
    ]
    return (("method", *columns, "paper: average"), *rows)


def _average(kind: str) -> Measure:
    return lambda result: result.greedy if kind == "greedy" else result.sampled


def efficiency_table(methods: Sequence[Method], results: Results) -> TextTable:
    """Return attempts and tokens until the goal, over all runs and by base, and what clips and critics did."""
    bases = sorted({base for runs in results.by_method.values() for base, _ in runs})
    header = (
        *("method", f"runs that reached {GOAL}", "attempts", "sampled tokens"),
        *(f"attempts, base {base}" for base in bases),
        *("clipped tokens", "explained variance"),
    )
    rows = []
    for method in methods:
        runs = {key: run.training.curve for key, run in results.of(method).items() if run.training is not None}
        attempts = {key: curve.until_goal(curve.attempts) for key, curve in runs.items()}
        by_base = [[count for (own, _), count in attempts.items() if own == base] for base in bases]
        row = (
            (
                f"{sum(map(math.isfinite, attempts.values()))} of {len(runs)}",
                median_text([*attempts.values()]),
                median_text([curve.until_goal(curve.tokens) for curve in runs.values()]),
                *(median_text(counts).partition(" ")[0] if counts else NOTHING for counts in by_base),
                format_estimate(estimate([training.clip_fraction for training in results.trainings(method)])),
                format_estimate(results.explained_variance(method), digits=2),
            )
            if runs
            else (NOTHING,) * (len(header) - 1)
        )
        rows.append((results.title(method), *row))
    return (header, *rows)


@dataclass(frozen=True, slots=True)
class Compared:
    """The differences of a method to another one, run by run, of averages over splits.

    ``attempts`` until the goal is None if one of the two was not trained. A run without success counts with all its
    attempts.
    """

    method: Method
    other: Method
    pairs: int
    attempts: Estimate | None
    sampled: Estimate
    greedy: Estimate


def compare_with(methods: Sequence[Method], other: Method, results: Results) -> list[Compared]:
    """Compare each method with ``other``, run by run. Methods without pairs are left out."""

    def attempts(training: Training) -> float:
        return min(training.curve.until_goal(training.curve.attempts), training.curve.attempts[-1])

    found = []
    for method in methods:
        pairs = [] if method == other else results.pairs(method, other)
        if pairs:
            trained = [(a.training, b.training) for a, b in pairs]
            apart = [attempts(a) - attempts(b) for a, b in trained if a is not None and b is not None]
            sampled, greedy = (
                estimate([of(a) - of(b) for a, b in pairs]) for of in map(_average, ("sampled", "greedy"))
            )
            found.append(Compared(method, other, len(pairs), estimate(apart) if apart else None, sampled, greedy))
    return found


def difference_table(compared: Sequence[Compared]) -> TextTable:
    """Return the differences with their verdicts, and the paper's difference of the averages."""
    kinds = ("attempts", "result", "sampled", "result", "greedy", "result")
    rows = [
        (
            *(one.method.title, one.other.title, str(one.pairs)),
            format_estimate(one.attempts, digits=0, sign="+,"),
            NOTHING if one.attempts is None else one.attempts.verdict,
            *(format_estimate(one.sampled, sign="+"), one.sampled.verdict),
            *(format_estimate(one.greedy, sign="+"), one.greedy.verdict),
            _difference(one.method.paper, one.other.paper),
        )
        for one in compared
    ]
    return (("method", "compared with", "pairs", *kinds, "paper"), *rows)


def _difference(paper: float | None, other: float | None) -> str:
    return NOTHING if paper is None or other is None else f"{paper - other:+.4f}"


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


def markdown(table: TextTable) -> str:
    """Return a table in Markdown, with a newline at the end."""
    header, *rows = (f"| {' | '.join(line)} |" for line in table)
    return "\n".join([header, "|" + "---|" * len(table[0]), *rows, ""])


SETTING = f"""\
Agent-R1's paper (arXiv 2511.14460v1) trains Qwen2.5-3B-Instruct on questions of HotpotQA and 2WikiMultihopQA. Here the
same methods train models of 0.2M parameters on TinyWiki. The paper's figures are for reference only.

- A seed determines the training questions, the sampling and newly initialized weights. A method without training is
  measured once on each base. A batch is divided into two optimizer steps, so that clips act.
- **Attempts to {GOAL}**: until exact match of the training attempts has a mean of {GOAL} over {WINDOW} steps. Medians
  over runs, with 95 % intervals by a bootstrap over runs; a run that does not get there counts as "never".
- **Exact match** of the last weights: one greedy attempt and {SAMPLES} attempts at temperature 1 at each question. A
  mean over runs ± half of its 95 % interval by Student's t; an interval says little about bases in general.
- **Differences** are means over pairs of runs with the same base and seed. A difference whose interval includes 0 is
  not resolved.
- A method with a critic is compared only if its critic explains more than {CRITIC_GOAL} of the variance of the returns.
"""


@dataclass(frozen=True, slots=True)
class Report:
    """The contents of a report: its command, the methods, the bases, the seeds of a method that trains, the results."""

    command: str
    methods: tuple[Method, ...]
    bases: tuple[Base, ...]
    seeds: int
    outcomes: Outcomes

    @property
    def results(self) -> Results:
        planned = {method.name: len(self.bases) * (self.seeds if method.trains else 1) for method in self.methods}
        return Results.of_all(self.outcomes.results, planned)


def make_document(report: Report) -> str:
    """Return the whole report as Markdown."""
    results = report.results
    made = [method for method in report.methods if results.of(method)]
    methods = counted(made, results)
    trained = [method for method in methods if method.trains and method not in ABLATIONS and method.ablates is None]
    known = by_name(methods)
    ablations = [method for method in methods if method.ablates in known]
    masks = [method for method in methods if method in ablations or method.name in {one.ablates for one in ablations}]
    to_full = [one for method in ablations for one in compare_with([method], known[method.ablates or ""], results)]
    baselines = (NAIVE_RAG, BASE_TOOL_CALL, known.get("grpo", GRPO))
    apart = [method for method in made if method not in methods]
    parts = [
        f"# The paper's comparison in miniature\n\nMade by\n\n    {report.command}\n",
        SETTING,
        _incomplete(report),
        "## Table 3: methods\n",
        markdown(efficiency_table(trained, results)),
        markdown(exact_match_table([method for method in methods if method in trained or not method.trains], results)),
        markdown(difference_table([one for other in baselines for one in compare_with(trained, other, results)])),
        "## Table 4: masks switched off one after the other\n",
        markdown(efficiency_table(masks, results)),
        markdown(exact_match_table(masks, results)),
        markdown(difference_table(to_full)),
        *(
            ["## Not compared: the critic explains too little\n", markdown(efficiency_table(apart, results))]
            if apart
            else []
        ),
        *([markdown(exact_match_table(apart, results))] if apart else []),
        f"## Learning curves\n\n![Learning curves]({PICTURE})\n",
        _provenance(report),
    ]
    return "\n".join(part for part in parts if part)


def _incomplete(report: Report) -> str:
    planned, made = sum(report.results.planned.values()), len(report.outcomes.results)
    without = [method.title for method in report.methods if not report.results.of(method)]
    lines = [
        *([f"- {made} of {planned} runs were made."] if made < planned else []),
        *([f"- There are no runs of: {'; '.join(without)}."] if without else []),
        *(f"- Failed: {_line(failure)}" for failure in report.outcomes.failures),
    ]
    return "\n".join(["## Missing\n", *lines, ""]) if lines else ""


def _line(failure: Failure) -> str:
    return f"{failure.method} base {failure.base} seed {failure.seed}: {failure.reason}"


def _provenance(report: Report) -> str:
    results = report.outcomes.results
    provenances = [result.provenance for result in results]
    versions = [", ".join(f"{name} {version}" for name, version in one.versions.items()) for one in provenances]
    codes = dict.fromkeys(one.code for one in provenances)
    mixed = " It changed between experiments; remove runs/paper to run all of them again." if len(codes) > 1 else ""
    first = [result for result in results if (result.base, result.seed) == (0, 0)]
    lines = [
        "## Commands for base 0 and seed 0\n",
        *(f"    {command}" for result in first for command in result.commands),
        "",
        *(f"- Base {base.seed}: {base.model}, weights {base.digest}." for base in report.bases),
        f"- Processor: {'; '.join(dict.fromkeys(one.processor for one in provenances))}, one thread.",
        f"- Versions: {'; '.join(dict.fromkeys(versions))}.",
        f"- Hash of the code: {', '.join(codes)}.{mixed}",
    ]
    return "\n".join(lines) + "\n"


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
            raise ExperimentsFailed(f"{len(failures)} of {total} experiments failed: {'; '.join(map(_line, failures))}")


def compare(config: PaperConfig, progress: Progress, methods: Sequence[Method] = METHODS) -> Comparison:
    """Run the selected experiments that have no result yet, and write the report if the whole comparison is selected.

    Raise InvalidInput, before any experiment runs, if one of them cannot run.
    """
    selected = select_experiments(config, methods)
    folder = run_folder(EXPERIMENTS)
    bases = {seed: prepare_base(seed, folder, progress) for seed in sorted({one.base for one in selected})}
    experiments = [plan_experiment(one.method, bases[one.base], one.seed, config.n, config.steps) for one in selected]
    if config.finished:
        outcomes = load_finished(experiments, folder)
    else:
        outcomes = asyncio.run(run_experiments(experiments, folder, config.jobs, progress))
    chosen = tuple(by_name(one.method for one in selected).values())
    seeds = len({one.seed for one in selected})
    report = Report(command_of(config), chosen, tuple(bases.values()), seeds, outcomes)
    table = exact_match_table(chosen, report.results)
    return Comparison(outcomes, table, () if config.method else write_report(report, config.out))


def write_report(report: Report, out: Path) -> tuple[Path, ...]:
    """Write the report and, beside it, its picture, and return their paths. Write nothing if there are no results."""
    if not report.outcomes.results:
        return ()
    picture = out.with_name(PICTURE)
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
    grid = Table(*map(escape, comparison.table[0]), box=box.SIMPLE_HEAD)
    for row in comparison.table[1:]:
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
