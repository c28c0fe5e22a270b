"""The report as Markdown: what was compared, the tables, the curves, how to make it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from research.paper.experiments import Origin
from research.paper.methods import SOURCE, Method
from research.paper.run_experiments import Failure, Outcomes
from research.paper.tables import TextTable, ablation_table, comparison_table, gather

INTRODUCTION = f"""\
# The paper's comparison in miniature

Agent-R1's paper ({SOURCE}) trains Qwen2.5-3B-Instruct to answer questions of HotpotQA and 2WikiMultihopQA with a
search over Wikipedia. Here the same methods train tiny-base, a model of 0.2M parameters, on TinyWiki, a generated
encyclopedia whose pages it can search. The paper's figures stand beside ours so that order and ratios can be compared;
the numbers themselves measure different things. three-hop, like MuSiQue, is out of domain: no method trains on it.
"""

READING = """\
- A figure is the mean of greedy exact match over {seeds}, on {questions} questions per split, ± half the width of its
  95 % interval by Student's t over seeds: where the mean of ever more seeds may lie, for these questions and this base
  model. The paper reports one run each, without a spread.
- A seed draws training questions, sampling and new weights; test questions and base model are the same for all seeds.
  What is not trained therefore comes out alike each time. ± 0.000 says that seeds agree, not that a figure is exact: a
  share p of n questions is itself uncertain by about 2 sqrt(p (1 - p) / n).
- A difference whose interval includes 0 is no difference. Differences and multiples are taken seed by seed.
- Each batch is used once, so ratios are 1: StepPO differs from PPO by its credit per turn, not by its clipping.
- Training keeps the weights that were best on a validation encyclopedia: a method that learns and then forgets shows
  it in the learning curves, not in the tables.
"""

ABLATED = """\
## Table 4: masks switched off

Each row against its full row under the same seeds. With gamma and lambda 1, in the paper's scripts as here, GAE is the
return minus the value, whatever stands between: the advantage mask then changes no more than what is whitened.
"""

CURVES = """\
## Learning curves

![Learning curves]({picture})

Lines are means over seeds; bands reach from the lowest seed to the highest. The reward is that of the attempts trained
on, sampled from one- and two-hop questions; validation is greedy, and a third of its questions is three-hop.
"""

MIXED = " It changed between cells; without runs/paper, all are made anew."


@dataclass(frozen=True, slots=True)
class Report:
    """What a report is made of. ``picture`` is the curves' file as seen from the report."""

    command: str
    methods: tuple[Method, ...]
    seeds: int
    outcomes: Outcomes
    picture: str


def document(report: Report) -> str:
    """The whole report."""
    results = gather(report.outcomes.results, report.seeds)
    table = comparison_table([method for method in report.methods if method.ablates is None], results)
    parts = [
        INTRODUCTION,
        f"Made by\n\n    {report.command}\n",
        *([_failed(report.outcomes.failures)] if report.outcomes.failures else []),
        "## Table 3: methods\n",
        markdown(table),
        READING.format(seeds=_seeds(report.seeds), questions=_questions(report)),
        ABLATED,
        markdown(ablation_table(report.methods, results)),
        CURVES.format(picture=report.picture),
        _making(report),
    ]
    return "\n".join(parts)


def markdown(table: TextTable) -> str:
    """A table in Markdown, ending in a newline.

    Example:
        >>> print(markdown(TextTable(("method", "em"), (("GRPO", "1.0"),))))
        | method | em |
        |---|---|
        | GRPO | 1.0 |
    """
    header, *rows = (f"| {' | '.join(line)} |" for line in (table.header, *table.rows))
    return "\n".join([header, "|" + "---|" * len(table.header), *rows, ""])


def _failed(failures: Sequence[Failure]) -> str:
    lines = "\n".join(f"- {failure.method}, seed {failure.seed}: {failure.reason}" for failure in failures)
    return f"## Cells that failed\n\nThe tables leave them out.\n\n{lines}\n"


def _seeds(count: int) -> str:
    return "seed 0 (one seed has no interval)" if count == 1 else f"seeds 0 to {count - 1}"


def _questions(report: Report) -> str:
    counts = {score.n for result in report.outcomes.results for score in result.scores.values()}
    return " or ".join(str(count) for count in sorted(counts))


def _making(report: Report) -> str:
    """What each row ran, and what it ran on."""
    results = report.outcomes.results
    commands = dict.fromkeys(result.command for result in results if result.seed == 0)
    codes = dict.fromkeys(result.origin.code for result in results)
    versions = dict.fromkeys(_versions(result.origin) for result in results)
    lines = [
        "## What each row ran\n",
        "Under seed 0; all that is not said is TinyWiki's recipe.\n",
        *(f"    {command}" for command in commands),
        "",
        f"- Versions: {'; '.join(versions)}.",
        f"- Digest of the code: {', '.join(codes)}.{MIXED if len(codes) > 1 else ''}",
        "- Seconds are those of the training loop, beside whatever else the machine did.",
    ]
    return "\n".join(lines) + "\n"


def _versions(origin: Origin) -> str:
    return ", ".join(f"{name} {version}" for name, version in origin.versions.items())
