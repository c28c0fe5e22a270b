"""The report as Markdown: the compared methods, the tables, the learning curves, and how to reproduce them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from research.attempts_to_goal import GOAL, WINDOW
from research.paper.bases import Base
from research.paper.experiments import SAMPLES, Result
from research.paper.methods import BASE_TOOL_CALL, GRPO, NAIVE_RAG, SOURCE, Method, by_name
from research.paper.run_experiments import Failure, Outcomes
from research.paper.tables import (
    CRITIC_GOAL,
    Compared,
    Results,
    TextTable,
    compare_with,
    counted,
    difference_table,
    efficiency_table,
    exact_match_table,
    gather,
)

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
