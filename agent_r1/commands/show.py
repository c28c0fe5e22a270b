"""The command ``show``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource
from rich.console import RenderableType

from agent_r1.commands.command import EncodableText, find_run, json_option, show as print_result
from agent_r1.core.errors import AgentR1Error, InvalidInput, suggest
from agent_r1.core.trajectory import Status
from agent_r1.store.attempt_list import AttemptFilter, AttemptOrder
from agent_r1.store.folder import run_argument
from agent_r1.store.invariants import DECODING_ERRORS
from agent_r1.store.reader import RunReader

ORDERS = get_args(AttemptOrder)
SORTS = [name for order in ORDERS for name in (order, f"-{order}")]
FATES = ("trained", "dropped", "pending")
POSITIVE, TEXT = click.IntRange(1, 2**32 - 1), EncodableText()
CONDITIONS = ("fate", "step", "task", "reward_below", "text")
OF_A_LIST = ("sort", "limit")
"""The options that have an effect only on a list of attempts."""


@click.command()
@click.argument("run")
@click.argument("attempt", required=False, type=TEXT)
@click.option("--metric", type=TEXT, metavar="NAME", help="Print one curve: the value of a metric at each step.")
@click.option("--critic", is_flag=True, help="Print how well the critic predicts: explained variance, calibration.")
@click.option("--attempts", "lists", is_flag=True, help="List attempts. The options below do so too.")
@click.option("--status", type=click.Choice([str(status) for status in Status]), help="Attempts that ended so.")
@click.option("--fate", type=click.Choice(FATES), help="Attempts with this fate.")
@click.option("--step", type=POSITIVE, help="Attempts that this optimizer step trained or dropped.")
@click.option("--task", type=TEXT, metavar="ID", help="Attempts at this task.")
@click.option("--reward_below", type=float, help="Attempts with a smaller reward.")
@click.option("--text", type=TEXT, metavar="TEXT", help="Attempts with this text in their id or in a reason.")
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    default="-started",
    show_default=True,
    metavar="COLUMN",
    help=f"Column to sort by: {', '.join(ORDERS)}; with - in front, the largest first.",
)
@click.option("--limit", type=POSITIVE, default=30, show_default=True, help="Largest number of attempts.")
@click.option("--tokens", is_flag=True, help="Print each token of an attempt, with its numbers if it was sampled.")
@click.option("--all_tokens", is_flag=True, help="As --tokens, with all tokens of long prompts and tool results.")
@json_option
def show(
    run: str,
    attempt: str | None,
    metric: str | None,
    lists: bool,
    critic: bool,
    tokens: bool,
    all_tokens: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show a run, or one of its attempts, also while the run trains. RUN is a name in runs/, or a folder.

    ATTEMPT is an id such as 3.0.0:style-a/7, its beginning, or one of the words best, worst, failed, longest and last.
    Without ATTEMPT, an option such as --step prints a list of the matching attempts. With ATTEMPT, the option limits
    the choice to the matching attempts: 'worst --step 20' is the worst attempt of step 20.
    """
    if sum((metric is not None, lists, critic, attempt is not None)) > 1:
        do = "give one of ATTEMPT, --metric, --attempts and --critic"
        raise InvalidInput("show", got="several things to show", do=do)
    tokens = tokens or all_tokens
    if tokens and attempt is None:
        raise InvalidInput("tokens", got="no attempt", do="name one: 'agent-r1 show RUN ATTEMPT --tokens'")
    lists = _check_list_options(attempt, metric, critic) or lists
    folder = find_run(run)
    where = AttemptFilter(
        status=options["status"] and Status(options["status"]),
        **{name: options[name] for name in CONDITIONS},
    )
    with closing(RunReader(folder)) as reader:
        if metric is not None:
            _show_metric(folder, reader, metric, as_json)
        elif critic:
            _show_critic(reader, as_json)
        elif lists:
            _show_attempts(reader, where, options["sort"], options["limit"], as_json)
        elif attempt is not None:
            _show_attempt(folder, reader, attempt, where, tokens, all_tokens, as_json)
        else:
            _show_run(folder, reader, as_json)


def _check_list_options(attempt: str | None, metric: str | None, critic: bool) -> bool:
    """Return whether the user gave an option that asks for a list of attempts, such as ``--limit 5``.

    If the user named no attempt, a condition such as ``--status failed`` also asks for a list. If the user named an
    attempt, a condition does not: ``show RUN worst --status failed`` shows one attempt, the worst failed attempt.

    Raise InvalidInput if an option that asks for a list is combined with an attempt, a metric or ``--critic``.
    """
    source = click.get_current_context().get_parameter_source
    refused = OF_A_LIST if attempt is not None else ("status", *CONDITIONS, *OF_A_LIST)
    given = [name for name in refused if source(name) is ParameterSource.COMMANDLINE]
    if not given or (attempt is None and metric is None and not critic):
        return bool(given)
    shown = f"the attempt {attempt}" if attempt is not None else "--critic" if critic else f"the metric {metric}"
    raise InvalidInput(f"--{given[0]}", got=f"it and {shown}", do="leave one out: the option is for a list of attempts")


def _show_run(folder: Path, reader: RunReader, as_json: bool) -> None:
    from agent_r1.commands.recorded_run import default_settings
    from agent_r1.commands.show_run import RunText, read_report

    report = read_report(folder, reader, default_settings())
    _print(as_json, report.to_json(), RunText(report))


def _show_metric(folder: Path, reader: RunReader, name: str, as_json: bool) -> None:
    from agent_r1.commands.show_run import MetricText
    from agent_r1.viewer.text import one_line

    names = reader.metric_names()
    if name not in names and f"reward/{name}" in names:  # the curves of a run show a reward without this prefix
        name = f"reward/{name}"
    curve = reader.curve(name)
    if not curve:
        known = ", ".join(map(one_line, names)) or "none yet"
        do = f"{suggest(name, names)} there are: {known}".strip()
        raise InvalidInput("metric", got=repr(name), do=do)
    _print(as_json, {"run": str(folder), "metric": name, "curve": dict(curve)}, MetricText(name, curve))


def _show_attempts(reader: RunReader, where: AttemptFilter, sort: str, limit: int, as_json: bool) -> None:
    from agent_r1.commands.show_attempts import AttemptTable, summary_json

    order: Any = sort.removeprefix("-")
    found = reader.list_attempts(where, sort=order, descending=sort.startswith("-"), limit=limit)
    total = reader.count_attempts(where)
    _print(as_json, {"attempts": [*map(summary_json, found)], "total": total}, AttemptTable(found, total))


def _show_critic(reader: RunReader, as_json: bool) -> None:
    from agent_r1.commands.show_attempt import read_critic

    report = read_critic(reader)
    _print(as_json, report.to_json(), report)


def _show_attempt(
    folder: Path, reader: RunReader, name: str, where: AttemptFilter, tokens: bool, all_tokens: bool, as_json: bool
) -> None:
    from agent_r1.commands.recorded_run import find_model
    from agent_r1.commands.show_attempt import AttemptText, read_attempt
    from agent_r1.commands.show_attempts import WORDS, find_attempt, short_id

    if tokens and name in WORDS and reader.count_attempts(replace(where, recorded=True)):
        where = replace(where, recorded=True)  # so that the numbers of the trainer are known
    summary = find_attempt(folder, reader, name, where)
    try:
        report = read_attempt(folder, reader, summary, find_model(str(reader.config().get("model", ""))), tokens)
    except DECODING_ERRORS as error:
        line = f"the record of {short_id(summary.attempt)} is damaged: {type(error).__name__}: {error}"
        raise AgentR1Error(f"{line}; 'agent-r1 verify {run_argument(folder)}' lists all damage") from error
    _print(as_json, report.to_json(), AttemptText(report, all_tokens))


def _print(as_json: bool, data: Mapping[str, Any], text: RenderableType) -> None:
    """Print ``data`` as JSON if ``as_json`` is true. Otherwise, print ``text``.

    In JSON, numbers that are not finite become null.
    """
    print_result(as_json, _finite(data) if as_json else data, text)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
