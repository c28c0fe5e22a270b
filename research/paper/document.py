"""The report as Markdown: the compared methods, the tables, the learning curves, and how to reproduce them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from research.paper.experiments import Provenance
from research.paper.methods import SOURCE, Method
from research.paper.run_experiments import Failure, Outcomes
from research.paper.tables import TextTable, ablation_table, comparison_table, gather

INTRODUCTION = f"""\
# The paper's comparison in miniature

Agent-R1's paper ({SOURCE}) trains Qwen2.5-3B-Instruct to answer questions of HotpotQA and 2WikiMultihopQA with a
search over Wikipedia. Here the same methods train tiny-base, a model of 0.2M parameters, on TinyWiki, a generated
encyclopedia with a search tool. The paper's figures stand beside ours for reference only. Neither the order of the
methods nor their ratios can be compared. The multiple of Naive RAG is bounded by construction: Naive RAG answers
exactly the one-hop questions, a quarter of two splits and none of the third, so no model can exceed 6.0.

The pretraining of tiny-base holds no right transcript of two hops, and no stage asks for three: three-hop measures
whether the trained agent generalizes to longer questions.
"""

READING = """\
- A figure is the mean of greedy exact match over {seeds}, on {questions} questions per split, ± half the width of its
  95 % interval by Student's t over seeds. The interval estimates the mean over all possible seeds, for these questions
  and this base model. The paper reports one run each, without a spread.
- A seed determines the training questions, the sampling and any newly initialized weights. The test questions and the
  base model are the same for all seeds, so a method without training gives the same figure each time. ± 0.000 means
  that seeds agree, not that a figure is exact: a share p of n questions has an error of about 2 sqrt(p (1 - p) / n).
- A difference whose interval includes 0 is not resolved by these seeds: it may be zero, or too small or too noisy to
  see. Differences and multiples are paired by seed.
- Each batch is used once, so all importance ratios are 1 and no clip acts. Methods that differ in their clip only are
  identical here. StepPO differs from PPO by its credit per turn.
- The critic of PPO and StepPO explained nothing of the returns at the time of these runs, so these two rows do not
  test a critic.
- Exact match is greedy. Sampled at temperature 1, the same weights are much worse: see docs/performance.md.
- Training keeps the weights that were best on a validation encyclopedia: a method that learns and then forgets shows
  this in the learning curves, not in the tables.
"""

ABLATED = """\
## Table 4: masks switched off

Each ablation is compared with its full method under the same seeds. With gamma and lambda 1, in the paper's scripts as
here, GAE is the return minus the value, whatever tokens are between. The advantage mask then changes only which values
are whitened, so the comparison cannot show its effect. With lambda 0.95 the effect has the direction of the paper: in a
separate trial without the mask, sampled exact match over the last five steps was lower by 0.11 and 0.16 (two seeds).
"""

CURVES = """\
## Learning curves

![Learning curves]({picture})

Lines are means over seeds; bands reach from the lowest seed to the highest. The reward is that of the training
attempts, sampled from one- and two-hop questions; validation is greedy, and a third of its questions is three-hop.
"""

MIXED = " It changed between experiments; remove runs/paper to run all of them again."


@dataclass(frozen=True, slots=True)
class Report:
    """The contents of a report. ``picture`` is the path of the learning curves relative to the report."""

    command: str
    methods: tuple[Method, ...]
    seeds: int
    outcomes: Outcomes
    picture: str


def make_document(report: Report) -> str:
    """Return the whole report as Markdown."""
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
        _provenance(report),
    ]
    return "\n".join(parts)


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
    lines = "\n".join(f"- {failure.method}, seed {failure.seed}: {failure.reason}" for failure in failures)
    return f"## Failed experiments\n\nThe tables do not include them.\n\n{lines}\n"


def _seeds(count: int) -> str:
    return "seed 0 (a single seed has no interval)" if count == 1 else f"seeds 0 to {count - 1}"


def _questions(report: Report) -> str:
    counts = {score.n for result in report.outcomes.results for score in result.scores.values()}
    return " or ".join(str(count) for count in sorted(counts))


def _provenance(report: Report) -> str:
    """Return the section with the command of each method, the versions and the hash of the code."""
    results = report.outcomes.results
    commands = dict.fromkeys(result.command for result in results if result.seed == 0)
    codes = dict.fromkeys(result.provenance.code for result in results)
    versions = dict.fromkeys(_versions(result.provenance) for result in results)
    lines = [
        "## Commands\n",
        "These are the commands for seed 0; all other settings come from TinyWiki's recipe.\n",
        *(f"    {command}" for command in commands),
        "",
        f"- Versions: {'; '.join(versions)}.",
        f"- Hash of the code: {', '.join(codes)}.{MIXED if len(codes) > 1 else ''}",
        "- Seconds measure the training loop; other processes ran on the machine at the same time.",
    ]
    return "\n".join(lines) + "\n"


def _versions(provenance: Provenance) -> str:
    return ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
