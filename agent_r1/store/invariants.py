"""Invariants of the run database, as queries. A query that returns a row has found a violation."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agent_r1.core.errors import AgentR1Error
from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import ToolResult
from agent_r1.core.trajectory import Status
from agent_r1.store.folder import CONFIG_FILE
from agent_r1.store.ledger import SEAL_FILE, Seal, contradicts, read_head
from agent_r1.store.manifest import (
    MODEL,
    CorruptCheckpoint,
    Manifest,
    check_manifest,
    checkpoint_step,
    list_checkpoints,
    read_manifest,
)
from agent_r1.store.rows import (
    CHECKPOINT_SAVED,
    TurnTokens,
    decode_action,
    decode_media,
    decode_messages,
    decode_result,
    decode_reward,
    decode_tools,
    decode_version_spans,
    unpack_columns,
    unpack_document,
)

COMPLETED = """EXISTS (SELECT 1 FROM events WHERE kind = 'completed'
                       AND segment = (SELECT max(segment) FROM segments))"""

_LAST_STEP = "(SELECT coalesce(max(step), 0) FROM current_metrics)"

INVARIANTS: Mapping[str, str] = {
    "each attempt has one current row": """
        SELECT attempt || ' has ' || count(*) FROM current_attempts
        GROUP BY attempt HAVING count(*) > 1""",
    "a fate is trained, dropped or superseded": """
        SELECT attempt || ' is ' || fate FROM fates JOIN attempts ON attempts.id = attempt_id
        WHERE fate NOT IN ('trained', 'dropped', 'superseded')""",
    "a superseded attempt gets no later fate": """
        SELECT attempt || ' got a fate in segment ' || fates.segment || ' after it was superseded'
        FROM fates JOIN fates AS superseded USING (attempt_id) JOIN attempts ON attempts.id = attempt_id
        WHERE superseded.fate = 'superseded' AND fates.segment > superseded.segment""",
    "only a later segment supersedes": """
        SELECT attempt || ' was superseded in the segment that started it'
        FROM fates JOIN attempts ON attempts.id = attempt_id
        WHERE fate = 'superseded' AND fates.segment <= attempts.segment""",
    "an attempt gets its fate after its start": """
        SELECT attempt || ' got a fate in an earlier segment' FROM fates JOIN attempts ON attempts.id = attempt_id
        WHERE fate <> 'superseded' AND fates.segment < attempts.segment""",
    "fates after a checkpoint are superseded": """
        SELECT attempt || ' still counts as ' || fates.fate || ' at step ' || fates.step
        FROM current_attempts AS attempts JOIN fates ON attempt_id = attempts.id
        JOIN segment_ends ON segment_ends.segment = fates.segment
        WHERE fates.step > last_step""",
    "an attempt that is not trained has a reason": """
        SELECT attempt || ' was ' || fate || ' without a reason' FROM fates JOIN attempts ON attempts.id = attempt_id
        WHERE fate IN ('dropped', 'superseded') AND trim(coalesce(reason, '')) = ''""",
    "a trained attempt has finished": """
        SELECT attempt || ' has no trajectory' FROM current_attempts
        WHERE fate = 'trained' AND id NOT IN (SELECT attempt_id FROM outcomes)""",
    "an attempt with token records has a fate": """
        SELECT attempt || ' has none' FROM current_attempts
        WHERE fate IS NULL AND id IN (SELECT attempt_id FROM token_records)""",
    "a trained attempt has action tokens": """
        SELECT attempt || ' has none' FROM current_attempts JOIN outcomes ON attempt_id = current_attempts.id
        WHERE fate = 'trained' AND newest_version < 0""",
    "a completed run has no pending attempts": f"""
        SELECT attempt || ' is pending' FROM current_attempts WHERE fate IS NULL AND {COMPLETED}""",
    "segments are numbered in order": """
        SELECT 'segment ' || segment || ' begins at step ' || step FROM (
            SELECT segment, step, row_number() OVER (ORDER BY segment) AS place FROM segments)
        WHERE segment <> place OR step < 0 OR (place = 1 AND step <> 0)""",
    "every step has metrics": f"""
        WITH RECURSIVE steps (step) AS (SELECT 1 UNION ALL SELECT step + 1 FROM steps WHERE step < {_LAST_STEP})
        SELECT 'step ' || step || ' has none' FROM steps
        WHERE {_LAST_STEP} > 0 AND step NOT IN (SELECT step FROM current_metrics WHERE reproducible)""",
    "the step of a fate has metrics": """
        SELECT attempt || ' was ' || fate || ' at step ' || step FROM current_attempts
        WHERE fate IS NOT NULL AND step NOT IN (SELECT step FROM current_metrics WHERE reproducible)""",
    "a completed run took all its steps": f"""
        SELECT 'the configuration has ' || steps || ', metrics exist for ' || {_LAST_STEP}
        FROM (SELECT json_extract(config, '$.steps') AS steps FROM segments ORDER BY segment DESC LIMIT 1)
        WHERE steps <> {_LAST_STEP} AND {COMPLETED}""",
    "versions count up from 0": """
        SELECT 'version ' || version || ' of step ' || step || ' comes after ' || coalesce(before, 'nothing') FROM (
            SELECT version, step, lag(version) OVER made AS before, lag(step) OVER made AS step_before
            FROM current_versions WINDOW made AS (ORDER BY step, segment, version))
        WHERE version <> coalesce(before + 1, 0) OR step <= coalesce(step_before, -1)""",
    "the step of a version has metrics": """
        SELECT 'version ' || version || ' of step ' || step FROM current_versions
        WHERE step > 0 AND step NOT IN (SELECT step FROM current_metrics WHERE reproducible)""",
    "attempts use published versions": """
        SELECT attempt || ' was sampled by version ' || max(version, coalesce(newest_version, -1))
        FROM current_attempts LEFT JOIN outcomes ON attempt_id = current_attempts.id
        WHERE max(version, coalesce(newest_version, -1)) > (SELECT coalesce(max(version), -1) FROM current_versions)
           OR version < 0 OR newest_version BETWEEN 0 AND version - 1""",
    "an attempt is sampled before it is trained": """
        SELECT attempt || ' was trained at step ' || attempts.step || ' but sampled by version ' || newest_version
        FROM current_attempts AS attempts JOIN outcomes ON attempt_id = attempts.id
        WHERE fate = 'trained' AND newest_version > (
            SELECT max(version) FROM current_versions AS made WHERE made.step < attempts.step)""",
}
"""A query for each invariant, by name. A query returns one line of text for each violation."""


def last_step(connection: sqlite3.Connection) -> int:
    """Return the last step with metrics, or 0."""
    return int(connection.execute("SELECT coalesce(max(step), 0) FROM current_metrics").fetchone()[0])


def last_checkpoint_step(connection: sqlite3.Connection) -> int | None:
    """Return the step of the last saved checkpoint, or None.

    A checkpoint of step 30 no longer counts after the run was resumed from step 20.
    """
    sql = f"""SELECT max(CAST(detail AS INTEGER)) FROM events JOIN segment_ends USING (segment)
              WHERE kind = '{CHECKPOINT_SAVED}' AND CAST(detail AS INTEGER) <= last_step"""
    found = connection.execute(sql).fetchone()[0]
    return None if found is None else int(found)


def check_checkpoint(connection: sqlite3.Connection, checkpoint: Path) -> Manifest:
    """Compare a checkpoint with the database of its run, and return its manifest.

    Raises:
        CorruptCheckpoint: a file is missing, additional or changed, or the checkpoint contradicts the database.
        InvalidInput: this version of agent-r1 does not read the format of the checkpoint.
    """
    manifest, step, last = check_manifest(checkpoint), checkpoint_step(checkpoint), last_step(connection)
    if step > last:
        raise CorruptCheckpoint(f"{checkpoint} is of a step after the last one with metrics, {last}")
    sql = "SELECT checksum FROM current_versions WHERE step <= ? ORDER BY version DESC LIMIT 1"
    row = connection.execute(sql, (step,)).fetchone()
    if row is None or row[0] not in (None, manifest.fingerprint.weights):  # None: no checksum was computed
        raise CorruptCheckpoint(f"{checkpoint} does not hold the weights of step {step}")
    if manifest.seal is not None and (problem := contradicts(connection, manifest.seal)) is not None:
        raise CorruptCheckpoint(f"{checkpoint} does not fit the ledger: {problem}")
    return manifest


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run.

    If a run is still training, list its files first and read its database afterwards. The database is then not older
    than the files.

    Attributes:
        checkpoints: the folders of the checkpoints, newest first.
        model: the inode of the model's folder, which changes if the model is replaced; None if there is no model.
        seal: the content of ``seal.json``, or None.
    """

    folder: Path
    checkpoints: Sequence[Path]
    model: int | None
    seal: bytes | None


def list_run_files(folder: Path) -> RunFiles:
    try:
        seal = (folder / SEAL_FILE).read_bytes()
    except FileNotFoundError:
        seal = None
    return RunFiles(folder, list_checkpoints(folder), _inode(folder / MODEL), seal)


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except FileNotFoundError:
        return None


def invalid_checkpoints(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield one message for each checkpoint that :func:`check_checkpoint` refuses.

    Training can continue during the check and remove an old checkpoint. No message is yielded for a removed checkpoint.
    """
    for checkpoint in reversed(files.checkpoints):
        try:
            check_checkpoint(connection, checkpoint)
        except AgentR1Error as error:
            if checkpoint.exists():
                yield str(error)


def missing_checkpoints(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield a message if the newest recorded checkpoint is missing on the disk.

    A complete run with its final model needs no checkpoint.
    """
    newest, present = last_checkpoint_step(connection), list_checkpoints(files.folder)
    needed = not (_is_complete(connection) and (files.folder / MODEL).exists())
    if needed and newest is not None and (not present or checkpoint_step(present[0]) < newest):
        yield f"the checkpoint of step {newest} was saved and is gone"


def invalid_model(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield a message if the final model is corrupt, or if its weights are none of the run's recorded versions.

    A run that still trains can replace its final model during the check. Then no message is yielded.
    """
    if files.model is None:
        return
    problem = _check_model(connection, files.folder / MODEL)
    if problem is not None and _inode(files.folder / MODEL) == files.model:
        yield problem


def _check_model(connection: sqlite3.Connection, model: Path) -> str | None:
    try:
        manifest = check_manifest(model)
    except AgentR1Error as error:
        return str(error)
    if manifest.seal is not None and (problem := contradicts(connection, manifest.seal)) is not None:
        return f"{model} does not fit the ledger: {problem}"
    # A run that is not complete can have saved this model before it was resumed.
    table = "current_versions" if _is_complete(connection) else "versions"
    # Versions without a checksum cannot be compared.
    weights = manifest.fingerprint.weights
    known = connection.execute(f"SELECT 1 FROM {table} WHERE checksum = ? OR checksum IS NULL", (weights,)).fetchone()
    return None if known else f"{model} holds weights that this run never published"


def changed_config(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield a message if the configuration file cannot be read, or differs from the configuration in the database.

    The database holds the configuration with which the run was first started.
    """
    file = files.folder / CONFIG_FILE
    recorded = json.loads(connection.execute("SELECT config FROM segments ORDER BY segment LIMIT 1").fetchone()[0])
    try:
        if json.loads(file.read_text(encoding="utf-8")) != recorded:
            yield f"{file} differs from the configuration in the run's database"
    except (OSError, ValueError, RecursionError) as error:
        yield f"{file} cannot be read: {error}"


def invalid_seal(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield a message if ``seal.json`` cannot be read, or if the database contradicts the seal in ``seal.json``.

    A seal is a hash of one row and all earlier rows.
    """
    if files.seal is None:
        return
    try:
        problem = contradicts(connection, Seal.from_json(json.loads(files.seal)))
    except (ValueError, KeyError, TypeError) as error:
        problem = f"it cannot be read: {type(error).__name__}: {error}"
    if problem is not None:
        yield f"{files.folder / SEAL_FILE} does not fit the ledger: {problem}"


def last_closed_row(files: RunFiles) -> int:
    """Return the number of the last row whose seal is in ``seal.json`` or in a manifest; 0 if there is no such seal."""
    folders = [*files.checkpoints, *([] if files.model is None else [files.folder / MODEL])]
    seals = [read_manifest(folder).seal for folder in folders if folder.exists()]
    seals += [] if files.seal is None else [Seal.from_json(json.loads(files.seal))]
    return max((seal.row for seal in seals if seal is not None), default=0)


def missing_seals(connection: sqlite3.Connection, files: RunFiles) -> Iterator[str]:
    """Yield a warning if the run is complete, but no file outside the database has the seal of the last row.

    The seal of a database row is a hash of this row and all earlier rows. The files that can have seals are
    ``seal.json`` and the manifests of the checkpoints and of the model.
    """
    rows = read_head(connection).row - last_closed_row(files)
    if rows and _is_complete(connection):  # only a warning: a run that is killed at its very end leaves no seal file
        yield (
            f"{files.folder / SEAL_FILE} is missing or old: the run is complete, and no seal outside of the database "
            f"covers its last {rows} rows, so a change of these rows and of all later seals would not be noticed"
        )


def _is_complete(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute(f"SELECT {COMPLETED}").fetchone()[0])


FILE_INVARIANTS: Mapping[str, Callable[[sqlite3.Connection, RunFiles], Iterator[str]]] = {
    "checkpoints": invalid_checkpoints,
    "newest checkpoint": missing_checkpoints,
    "model": invalid_model,
    "seal": invalid_seal,
    "configuration": changed_config,
}
"""A check for each invariant, by name. A check yields one line of text for each violation."""


DECODING_ERRORS = (zlib.error, struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError)
"""The errors that can be raised when a damaged turn or outcome is decoded."""


def invalid_turns(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield the first problem of each attempt with an unreadable or inconsistent trajectory."""
    columns = "attempts.id, attempt, status, start, newest_version, turns, action_tokens, calls, call_errors"
    sql = f"SELECT {columns} FROM attempts JOIN outcomes ON attempt_id = attempts.id ORDER BY attempts.id"
    for key, attempt, status, start, newest, *counts in connection.execute(sql):
        try:
            _ = Status(status), decode_messages(unpack_document(start))
            problem = next(_attempt_problems(connection, key, newest, _Counts(*counts)), None)
        except DECODING_ERRORS as error:
            problem = f"cannot be read: {type(error).__name__}: {error}"
        if problem is not None:
            yield f"{attempt} {problem}"


class _Counts(NamedTuple):
    """Counts of one attempt."""

    turns: int
    action_tokens: int
    calls: int
    call_errors: int


def _attempt_problems(connection: sqlite3.Connection, key: int, newest: int, counts: _Counts) -> Iterator[str]:
    newest_found = -1
    turns = env_turns = action_tokens = 0
    results: list[ToolResult] = []
    columns = "turn, parent, kind, tokens, content, numbers"
    tables = "turns LEFT JOIN token_records USING (attempt_id, turn)"
    rows = connection.execute(f"SELECT {columns} FROM {tables} WHERE attempt_id = ? ORDER BY turn", (key,))
    for turn, parent, kind, packed, content, numbers in rows:
        if turn != turns:
            yield f"lacks turn {turns}"
        if parent is not None and not 0 <= parent < turn:
            yield f"has turn {parent} as the parent of turn {turn}"
        tokens = TurnTokens.unpack(packed)
        turn_results, spans = _decode_content(content)
        yield from (f"turn {turn} {problem}" for problem in _token_problems(tokens, spans))
        if numbers is not None and (length := len(unpack_columns(numbers)[0])) != len(tokens.action_ids):
            yield f"turn {turn} has {len(tokens.action_ids)} action tokens and a token record of {length}"
        newest_found = max([newest_found, *(span.version for span in spans)])
        results += turn_results
        action_tokens += len(tokens.action_ids)
        turns += 1
        env_turns += kind == "act"
    if newest_found != newest:
        yield f"was sampled up to version {newest_found}, but its outcome has version {newest}"
    found = _Counts(turns, action_tokens, len(results), sum(not result.ok for result in results))
    for name, count, recorded in zip(_Counts._fields, found, counts, strict=True):
        if count != recorded:
            yield f"has {count} {name}, but its outcome has {recorded}"
    # A reward per turn has one number for each turn, or for each turn that is not a summary.
    yield from _reward_problems(connection, key, {turns, env_turns})


def _decode_content(content: bytes) -> tuple[list[ToolResult], tuple[PolicyVersionSpan, ...]]:
    action, observation, results, version_spans, (_call_ends, _calls_with_rewards), state, media = unpack_document(
        content
    )
    new_messages, tools = state
    _ = decode_action(action), decode_messages(observation), decode_messages(new_messages or ())
    _ = decode_tools(tools), decode_media(media)
    return [decode_result(result) for result in results], decode_version_spans(version_spans)


def _token_problems(tokens: TurnTokens, spans: tuple[PolicyVersionSpan, ...]) -> Iterator[str]:
    actions = len(tokens.action_ids)
    if actions != len(tokens.logprobs):
        yield f"has {actions} action tokens and {len(tokens.logprobs)} log-probabilities"
    if any(math.isnan(value) for value in tokens.logprobs):
        yield "has a log-probability that is not a number"
    starts = [span.start for span in spans]
    if actions and (starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] >= actions):
        yield f"has version spans that start at {starts} in {actions} action tokens"


def _reward_problems(connection: sqlite3.Connection, key: int, lengths: set[int]) -> Iterator[str]:
    names = set()
    sql = "SELECT turn, call, name, value FROM rewards WHERE attempt_id = ?"
    for turn, call, name, value in connection.execute(sql, (key,)):
        reward = decode_reward(value)
        if isinstance(reward, tuple) and (turn is not None or len(reward) not in lengths):
            yield f"has {len(reward)} numbers of reward {name} for {max(lengths)} turns"
        if (turn, call, name) in names:
            yield f"has reward {name} twice"
        names.add((turn, call, name))
