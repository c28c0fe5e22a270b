"""Tables 3 and 4 of the paper as text in rows and columns, made from results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from research.paper.experiments import Result
from research.paper.intervals import Estimate, estimate
from research.paper.methods import NAIVE_RAG, Figures, Method

NOTHING = "-"

PAPER_COLUMN = "paper: HotpotQA"
"""The first column of table 3 with the paper's figures."""

Measure = Callable[[Result], float]


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
    """The results of a comparison by method and seed."""

    by_method: Mapping[str, Mapping[int, Result]]
    splits: tuple[str, ...]
    seeds: int

    def mean(self, method: Method, measure: Measure) -> Estimate | None:
        """Return the estimate of a measure over the seeds of a method, None if there are no results."""
        values = [measure(result) for result in self.by_method.get(method.name, {}).values()]
        return estimate(values) if values else None

    def compare_paired(
        self, method: Method, other: str, measure: Measure, compare: Callable[[float, float], float | None]
    ) -> Estimate | None:
        """Compare two methods seed by seed, over the seeds that both have; leave out pairs that cannot be compared."""
        others = self.by_method.get(other, {})
        own = self.by_method.get(method.name, {})
        pairs = [compare(measure(own[seed]), measure(others[seed])) for seed in own if seed in others]
        values = [value for value in pairs if value is not None]
        return estimate(values) if values else None

    def measures(self) -> list[Measure]:
        """Return the measures of the table: exact match on each split, then their average."""
        return [*(_em(split) for split in self.splits), _average]


def gather(results: Sequence[Result], seeds: int) -> Results:
    """Group results by method and seed; ``seeds`` is the number of seeds of the comparison."""
    by_method: dict[str, dict[int, Result]] = {}
    for result in results:
        by_method.setdefault(result.method, {})[result.seed] = result
    splits = dict.fromkeys(split for result in results for split in result.scores)
    return Results(by_method, tuple(splits), seeds)


def comparison_table(methods: Sequence[Method], results: Results) -> TextTable:
    """Return table 3: exact match, the ratio to naive RAG, the seconds of training, and the paper's figures."""
    ours = (*results.splits, "average", "x Naive RAG", "train s")
    header = ("method", *ours, PAPER_COLUMN, "2Wiki", "MuSiQue", "average", "x Naive RAG")
    return TextTable(header, tuple(_comparison_row(method, results) for method in methods))


def _comparison_row(method: Method, results: Results) -> tuple[str, ...]:
    means = [format_estimate(results.mean(method, measure)) for measure in results.measures()]
    multiple = results.compare_paired(method, NAIVE_RAG.name, _average, _ratio)
    seconds = results.mean(method, _seconds) if method.command == "train" else None
    return (
        _title(method, results),
        *means,
        format_estimate(multiple, digits=2),
        NOTHING if seconds is None else f"{seconds.mean:.0f}",
        *_figures(method.figures),
    )


def _figures(figures: Figures | None) -> tuple[str, ...]:
    if figures is None:
        return (NOTHING,) * 5
    assert NAIVE_RAG.figures is not None, "the paper reports naive RAG"
    numbers = (figures.hotpotqa, figures.two_wiki, figures.musique, figures.average)
    return (*(f"{number:.4f}" for number in numbers), f"{figures.average / NAIVE_RAG.figures.average:.2f}")


def ablation_table(methods: Sequence[Method], results: Results) -> TextTable:
    """Return table 4: each ablation's differences to its full method, paired by seed, and the paper's difference."""
    by_name = {method.name: method for method in methods}
    rows: list[tuple[str, ...]] = []
    for full in dict.fromkeys(method.ablates for method in methods if method.ablates is not None):
        rows.append(_full_row(by_name[full], results))
        rows += (_ablation_row(method, by_name[full], results) for method in methods if method.ablates == full)
    differences = (*(f"{split}: difference" for split in results.splits), "average: difference")
    return TextTable(("method", "average", *differences, "result", "paper: average", "difference"), tuple(rows))


def _full_row(method: Method, results: Results) -> tuple[str, ...]:
    empty = (NOTHING,) * (len(results.splits) + 2)
    return (
        _title(method, results),
        format_estimate(results.mean(method, _average)),
        *empty,
        *_paper_figures(method, None),
    )


def _ablation_row(method: Method, full: Method, results: Results) -> tuple[str, ...]:
    differences = [results.compare_paired(method, full.name, measure, _difference) for measure in results.measures()]
    return (
        _title(method, results),
        format_estimate(results.mean(method, _average)),
        *(format_estimate(difference, sign="+") for difference in differences),
        NOTHING if differences[-1] is None else differences[-1].verdict,
        *_paper_figures(method, full.figures),
    )


def _paper_figures(method: Method, full: Figures | None) -> tuple[str, str]:
    if method.figures is None:
        return (NOTHING, NOTHING)
    average = method.figures.average
    return (f"{average:.4f}", NOTHING if full is None else f"{average - full.average:+.4f}")


def format_estimate(estimate: Estimate | None, digits: int = 3, sign: str = "") -> str:
    """Return an estimate as text.

    Example:
        >>> format_estimate(Estimate(0.5, 0.2484, 3))
        '0.500 ± 0.248'
    """
    if estimate is None:
        return NOTHING
    mean = f"{estimate.mean:{sign}.{digits}f}"
    return mean if estimate.half is None else f"{mean} ± {estimate.half:.{digits}f}"


def _title(method: Method, results: Results) -> str:
    """Return the method's title, with the number of seeds if some are missing."""
    count = len(results.by_method.get(method.name, {}))
    return method.title if count == results.seeds else f"{method.title} ({count} of {results.seeds} seeds)"


def _em(split: str) -> Measure:
    return lambda result: result.scores[split].em


def _average(result: Result) -> float:
    return result.average


def _seconds(result: Result) -> float:
    return result.seconds or 0.0


def _ratio(one: float, other: float) -> float | None:
    return one / other if other > 0 else None


def _difference(one: float, other: float) -> float | None:
    return one - other
