"""The charts of a run: their metrics and units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agent_r1.core.profile import CPU_SECONDS, SECONDS
from agent_r1.core.trajectory import Status
from agent_r1.viewer.charts import NUM_COLORS, Chart, Curve, Line, draw

VALIDATION = "validation_"
"""The prefix of the metrics of a validation."""

BEST_BY = f"{VALIDATION}em"

Curves = Mapping[str, Curve]
"""The curves of a run, by metric."""

Named = Sequence[tuple[str, Curve]]
"""The curves of one chart, as pairs (label, curve)."""


@dataclass(frozen=True, slots=True)
class Panel:
    """The description of a chart.

    Attributes:
        select: takes all curves of a run, and returns the curves of the chart with their labels.
        log: whether the vertical axis is logarithmic, if the values allow it.
        from_zero: whether the vertical axis must contain 0.
        missing: the text in place of a chart without values. "": the chart is left out.
        are_parts: whether the curves are parts of a whole, such as the parts of a step.
    """

    title: str
    unit: str
    select: Callable[[Curves], Named]
    log: bool = False
    from_zero: bool = False
    missing: str = ""
    are_parts: bool = False


def best_step(curves: Curves) -> int | None:
    """Return the step with the largest exact match in validation; None without a validation.

    If several steps are equally good, return the last of them.
    """
    validated = curves.get(BEST_BY, {})
    return max(validated, key=lambda step: (validated[step], step)) if validated else None


def _only(*names: str) -> Callable[[Curves], Named]:
    return lambda curves: [(_label(name), curves[name]) for name in names if name in curves]


def _rewards(curves: Curves) -> Named:
    named = [(name.removeprefix("reward/"), curve) for name, curve in curves.items() if name.startswith("reward/")]
    total = [("total", curves["reward"])] if "reward" in curves else []
    return [*total, *named]


def _validation(curves: Curves) -> Named:
    return [(name.removeprefix(VALIDATION), curve) for name, curve in curves.items() if name.startswith(VALIDATION)]


def _per_attempt(*names: str) -> Callable[[Curves], Named]:
    def select(curves: Curves) -> Named:
        attempts = _sum(curves.get(status.value, {}) for status in Status)
        return [(_label(name), _share(curves[name], attempts)) for name in names if name in curves]

    return select


def _call_errors(curves: Curves) -> Named:
    calls = curves.get("calls", {})
    names = {"invalid_calls": "invalid call of the agent", "failed_calls": "failure of the tool"}
    return [(label, _share(curves[name], calls, 100)) for name, label in names.items() if name in curves]


def _endings(curves: Curves) -> Named:
    counts = {status.value: curves[status.value] for status in Status if status.value in curves}
    attempts = _sum(counts.values())
    occurring = {name: curve for name, curve in counts.items() if any(curve.values())}
    return [(_label(name), _share(curve, attempts, 100)) for name, curve in occurring.items()]


def _seconds(curves: Curves) -> Named:
    phases = {name: curve for name, curve in curves.items() if name.endswith("_seconds")}
    longest = max((max(curve.values(), default=0) for curve in phases.values()), default=0)
    return [
        (name.removesuffix("_seconds"), curve)
        for name, curve in phases.items()
        if max(curve.values(), default=0) >= longest / 100  # phases that take no time make the legend long
    ]


def _engine_tokens(curves: Curves) -> Named:
    prefix, suffix = "engine/", "_tokens"
    return [
        (name.removeprefix(prefix).removesuffix(suffix), curve)
        for name, curve in curves.items()
        if name.startswith(prefix) and name.endswith(suffix)
    ]


def _starting_with(prefix: str) -> Callable[[Curves], Named]:
    return lambda curves: [
        (name.removeprefix(prefix), curve)
        for name, curve in curves.items()
        if name.startswith(prefix) and any(curve.values())
    ]


def _ending_with(suffix: str) -> Callable[[Curves], Named]:
    return lambda curves: [(_label(name), curve) for name, curve in curves.items() if name.endswith(suffix)]


def _label(name: str) -> str:
    return {"logprob_gap": "largest", "logprob_gap_mean": "mean", "tokens": "tokens", "calls": "calls"}.get(
        name, name.replace("_", " ")
    )


def _unless_zero(select: Callable[[Curves], Named]) -> Callable[[Curves], Named]:
    def select_others(curves: Curves) -> Named:
        selected = select(curves)
        return selected if any(any(curve.values()) for _, curve in selected) else []

    return select_others


def _sum(curves: Iterable[Curve]) -> Curve:
    total: dict[int, float] = {}
    for curve in curves:
        for step, value in curve.items():
            total[step] = total.get(step, 0.0) + value
    return total


def _share(curve: Curve, whole: Curve, scale: float = 1.0) -> Curve:
    return {step: scale * value / whole[step] for step, value in curve.items() if whole.get(step)}


PANELS = (
    Panel("Reward", "mean over attempts", _rewards, missing="No step yet"),
    Panel("Validation", "mean over questions", _validation, missing="No validation: --evaluate_every sets how often"),
    Panel("Entropy", "nats per token", _only("entropy"), from_zero=True),
    Panel("Length", "sampled tokens per attempt", _per_attempt("tokens"), from_zero=True),
    Panel("Tool calls", "per attempt", _per_attempt("calls"), from_zero=True),
    Panel("Tool errors", "% of calls", _call_errors, from_zero=True),
    Panel("Endings", "% of attempts", _endings, from_zero=True),
    Panel("Throughput", "tokens per second", _only("tokens_per_second"), from_zero=True),
    Panel("Tokens of the engine", "per step", _engine_tokens, from_zero=True),
    Panel("Engine in use", "share of the time", _only("engine/utilization"), from_zero=True),
    Panel("Time of a step", "seconds", _seconds, from_zero=True),
    Panel("Profile of a step", "seconds", _starting_with(SECONDS), from_zero=True, are_parts=True),
    Panel(
        "CPU time of a step", "CPU seconds of all threads", _starting_with(CPU_SECONDS), from_zero=True, are_parts=True
    ),
    Panel("Staleness", "steps", _unless_zero(_only("staleness")), from_zero=True),
    Panel("Log-probability gap", "|trainer - engine|", _only("logprob_gap", "logprob_gap_mean"), log=True),
    Panel("KL divergence", "nats per token", _unless_zero(_only("kl_old", "kl_reference"))),
    Panel("Gradient norm", "before clipping", _ending_with("gradient_norm"), from_zero=True),
    Panel("Loss", "per term", _ending_with("_loss")),
    Panel("Critic", "explained variance", _only("critic/explained_variance")),
)
"""The charts on the page of a run, in their order."""

_SHOWN = frozenset({*(status.value for status in Status), "tokens", "calls", "invalid_calls", "failed_calls", "reward"})


def draw_run(curves: Curves) -> tuple[Chart, ...]:
    best = best_step(curves)
    charts = []
    for panel in PANELS:
        selected = _largest(panel.select(curves)) if panel.are_parts else panel.select(curves)
        if selected or panel.missing:
            marked = best if panel.title == "Validation" else None
            lines = [
                Line(label, curve, color, marked if label == BEST_BY.removeprefix(VALIDATION) else None)
                for color, (label, curve) in enumerate(selected)
            ]
            chart = draw(panel.title, panel.unit, lines, log=panel.log, from_zero=panel.from_zero)
            charts.append(replace(chart, missing=panel.missing))
    return tuple(charts)


def _largest(parts: Named) -> Named:
    """Return at most ``NUM_COLORS`` parts: if there are more, the sum of the smallest parts becomes one part "rest"."""
    if len(parts) <= NUM_COLORS:
        return parts
    by_size = sorted(parts, key=lambda part: sum(part[1].values()), reverse=True)
    labels = {label for label, _ in by_size[: NUM_COLORS - 1]}
    rest = _sum(curve for label, curve in parts if label not in labels)
    return [*(part for part in parts if part[0] in labels), ("rest", rest)]


def draw_other(curves: Curves) -> tuple[Chart, ...]:
    """Return a chart for each metric that :func:`draw_run` does not show. Constant metrics are left out."""
    drawn = {id(curve) for panel in PANELS for _, curve in panel.select(curves)}
    return tuple(
        draw(name, "", [Line(name, curve, 0)])
        for name, curve in curves.items()
        if id(curve) not in drawn and name not in _SHOWN and len(set(curve.values())) > 1
    )


def draw_comparison(runs: Mapping[str, Curves]) -> tuple[Chart, ...]:
    """Return the charts that compare several runs: one metric per chart, one line per run."""
    return tuple(chart for panel in PANELS if not panel.are_parts for chart in _compare(panel, runs))


def draw_compared_parts(runs: Mapping[str, Curves]) -> tuple[Chart, ...]:
    """Return the charts that compare the parts of a training step between runs, such as the time of the forward passes.

    There is one chart for each part that all runs have. Each chart has one line per run.
    """
    charts = []
    for panel in PANELS:
        if panel.are_parts:
            charts += [chart for chart in _compare(panel, runs) if len(chart.lines) == len(runs)]
    return tuple(charts)


def _compare(panel: Panel, runs: Mapping[str, Curves]) -> Iterator[Chart]:
    selected = {run: dict(panel.select(curves)) for run, curves in runs.items()}
    labels = dict.fromkeys(label for named in selected.values() for label in named)
    for label in labels:
        lines = [
            Line(run, named[label], color, best_step(runs[run]) if panel.title == "Validation" else None)
            for color, (run, named) in enumerate(selected.items())
            if label in named
        ]
        title = panel.title if len(labels) == 1 else f"{panel.title}: {label}"
        yield draw(title, panel.unit, lines, log=panel.log, from_zero=panel.from_zero)
