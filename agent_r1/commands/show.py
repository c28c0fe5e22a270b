"""The command ``show``: one screen about a run, or one of its conversations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from agent_r1.commands.command import RUNS, EncodableText, find_run, json_option, named_folder, show as print_result
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.store.folder import is_run, run_argument
from agent_r1.store.reader import AttemptFilter, AttemptSummary, RunReader
from agent_r1.store.rows import DECODING_ERRORS
from agent_r1.viewer.catalog import Catalog

WORDS: Mapping[str, str] = {
    "best": "the newest of the attempts with the highest reward",
    "worst": "the newest of the attempts with the lowest reward",
    "failed": "the newest attempt that failed, or whose reward could not be computed",
}
"""The words that name an attempt, each with its meaning."""

MAX_CANDIDATES = 5


@click.command()
@click.argument("run", required=False)
@click.argument("attempt", required=False, type=EncodableText())
@click.option("--tokens", is_flag=True, help="Print each token of an attempt, with its numbers if it was sampled.")
@click.option("--tasks", is_flag=True, help="Print the attempts at each task: how many, and their rewards.")
@json_option
def show(run: str | None, attempt: str | None, tokens: bool, tasks: bool, as_json: bool) -> None:
    """Show a run, or one of its attempts, also while the run trains. RUN is a name in runs/, or a folder.

    If RUN is a folder of runs, by default runs/, they are listed, and the one that was changed last comes first.
    ATTEMPT is an id such as 3.0.0:style-a/7, its beginning, or one of the words best, worst and failed.
    """
    if tokens and attempt is None:
        raise InvalidInput("tokens", got="no attempt", do="name one: 'agent-r1 show RUN ATTEMPT --tokens'")
    if tasks and attempt is not None:
        raise InvalidInput("tasks", got=f"it and the attempt {attempt}", do="leave one out")
    run = f"{RUNS}/" if run is None else run
    if attempt is None and not tasks and not is_run(folder := named_folder(run)) and (runs := Catalog([folder]).runs()):
        return _list_runs(runs, as_json)
    folder = find_run(run)
    with closing(RunReader(folder)) as reader:
        try:
            if tasks:
                from agent_r1.commands.show_run import task_table

                found = reader.list_tasks()
                print_result(as_json, {"tasks": [asdict(one) for one in found]}, task_table(found))
            elif attempt is None:
                _show_run(folder, reader, as_json)
            else:
                _show_attempt(folder, reader, attempt, tokens, as_json)
        except DECODING_ERRORS as error:
            line = f"a record of {folder} is damaged: {type(error).__name__}: {error}"
            raise AgentR1Error(f"{line}; 'agent-r1 verify {run_argument(folder)}' lists all damage") from error


def _list_runs(runs: Mapping[str, Path], as_json: bool) -> None:
    from agent_r1.commands.show_run import run_table
    from agent_r1.viewer.report import summarize

    found = sorted((summarize(*one) for one in runs.items()), key=lambda one: one.updated, reverse=True)
    fields = ("state", "step", "steps", "taskset", "reward", "updated", "error")
    data = [{"run": str(one.folder), **{name: asdict(one)[name] for name in fields}} for one in found]
    print_result(as_json, {"runs": _json_value(data)}, run_table(found))


def _show_run(folder: Path, reader: RunReader, as_json: bool) -> None:
    from agent_r1.commands.recorded_run import default_settings
    from agent_r1.commands.show_run import RunText
    from agent_r1.viewer.report import read_report

    report = read_report(folder.resolve().name, folder, reader, default_settings())
    print_result(as_json, _json_value(report.to_json()) if as_json else {}, RunText(report))


def _show_attempt(folder: Path, reader: RunReader, name: str, tokens: bool, as_json: bool) -> None:
    from agent_r1.commands.recorded_run import find_model
    from agent_r1.commands.show_attempt import AttemptText, attempt_json
    from agent_r1.viewer.conversation import make_conversation
    from agent_r1.viewer.tokens import find_tokenizer, load_tokenizer

    summary = find_attempt(folder, reader, name, prefers_recorded=tokens)
    trajectory, records = reader.trajectory(summary.attempt), reader.token_records(summary.attempt)
    config = reader.config()
    tokenizer = load_tokenizer(find_tokenizer(folder, find_model(str(config.get("model", ""))))) if tokens else None
    most = None if tokens else 0
    conversation = None
    if trajectory is not None:
        conversation = make_conversation(trajectory, records, tokenizer, most, with_state=tokens)
    siblings = reader.siblings(summary.attempt)
    text = AttemptText(summary, conversation, siblings, tokens, int(config.get("record_tokens", 0)))
    data = _json_value(attempt_json(summary, conversation, siblings)) if as_json else {}
    print_result(as_json, data, text)


def find_attempt(folder: Path, reader: RunReader, name: str, prefers_recorded: bool = False) -> AttemptSummary:
    """Return the attempt with this id, beginning of an id, or word. ``prefers_recorded``: one with token records."""
    run = run_argument(folder)
    if name in WORDS:
        found = _by_word(reader, name, AttemptFilter(recorded=True)) if prefers_recorded else None
        found = found or _by_word(reader, name, AttemptFilter())
        if found is None:
            raise InvalidInput(
                "attempt", got=f"{name}, but {folder} has no such attempt", do=f"see 'agent-r1 show {run}'"
            )
        return found
    if (exact := reader.find_attempt(name)) is not None:
        return exact
    candidates: tuple[AttemptSummary, ...] = ()
    for prefix in (f"{name}:", f"{name}.", name):  # "3.1" means group 3, attempt 1, and not attempt 10 of group 3
        candidates = reader.list_attempts(AttemptFilter(id_prefix=prefix), limit=MAX_CANDIDATES + 1)
        if len(candidates) == 1:
            return candidates[0]
    if not candidates:
        do = f"give an id such as 3.0.0:TASK ('agent-r1 view {run}' lists them), its beginning, or {', '.join(WORDS)}"
        raise InvalidInput("attempt", got=f"{name!r}, which is no attempt of {folder}", do=do)
    ids = ", ".join(str(one.attempt).partition(":")[2] for one in candidates[:MAX_CANDIDATES])
    more = " .." if len(candidates) > MAX_CANDIDATES else ""
    raise InvalidInput("attempt", got=f"{name!r}, which several ids begin with: {ids}{more}", do="give more of the id")


def _by_word(reader: RunReader, word: str, where: AttemptFilter) -> AttemptSummary | None:
    if word == "failed":
        return next(iter(reader.list_attempts(replace(where, failed=True), descending=True, limit=1)), None)
    found = reader.list_attempts(where, sort="reward", descending=word == "best", limit=1)
    return next((one for one in found if one.reward is not None), None)


def _json_value(value: Any) -> Any:
    # JSON has no numbers that are not finite.
    if isinstance(value, Mapping):
        return {str(key): _json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
