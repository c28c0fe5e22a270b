"""Tables 3 and 4 of the paper as text in rows and columns, made from results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from research.attempts_to_goal import GOAL, Curve, median
from research.paper.experiments import Result, Training
from research.paper.intervals import Estimate, estimate
from research.paper.methods import Method, by_name

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
