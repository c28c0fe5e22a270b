"""Invariants of a run: what must hold between its rows, and between its rows and its files."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import AgentR1Error
from agent_r1.core.events import PENDING_AT_END, STOPPED_EARLY, TokenRecord
from agent_r1.core.trajectory import Status, Trajectory, Turn, total_reward
from agent_r1.store.folder import CONFIG_FILE
from agent_r1.store.manifest import (
    MODEL,
    check_closed,
    check_manifest,
    checkpoint_step,
    list_checkpoints,
    read_digest_file,
)
from agent_r1.store.reader import RunReader
from agent_r1.store.rows import DECODING_ERRORS, Counts, count_turns, decode_token_record, encode_reward
from agent_r1.store.schema import COMPLETED

# The attempts that a step was made of, with their outcomes: without those that were pending when the run ended.
_STEP_ATTEMPTS = f"""
    SELECT current_attempts.*, outcomes.status, outcomes.reward, action_tokens,
        coalesce(json_extract(config, '$.reward_schedules'), '{{}}') <> '{{}}' AS is_scheduled,
        sample_index >= coalesce(json_extract(config, '$.group_size'), 1e9) AS greedy
    FROM current_attempts JOIN segments USING (segment) JOIN outcomes ON attempt_id = current_attempts.id
    WHERE fate IS NOT NULL AND current_attempts.reason IS NOT '{PENDING_AT_END}'"""

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
        WHERE fate = 'trained' AND action_tokens = 0""",
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
        WHERE steps <> {_LAST_STEP} AND {COMPLETED} AND NOT EXISTS (SELECT 1 FROM events
              WHERE kind = '{STOPPED_EARLY}' AND segment = (SELECT max(segment) FROM segments))""",
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
    "each reward is recorded once": """
        SELECT attempt || ' has reward ' || name || ' twice' FROM rewards JOIN attempts ON attempts.id = attempt_id
        GROUP BY attempt_id, turn, call, name HAVING count(*) > 1""",
    "the statuses of a step are those of its attempts": f"""
        SELECT 'step ' || step || ' has ' || name || ' ' || coalesce(value, 'unknown') || ', its attempts ' || counted
        FROM (
            SELECT step, name, value, coalesce(counted, 0) AS counted FROM current_metrics LEFT JOIN (
                SELECT step, status AS name, count(*) AS counted FROM ({_STEP_ATTEMPTS}) WHERE NOT greedy
                GROUP BY step, status) USING (step, name)
            WHERE name IN ({", ".join(f"'{status}'" for status in Status)}))
        WHERE value IS NOT counted""",
    "the tokens of a step are those of its attempts": f"""
        SELECT 'step ' || step || ' has ' || coalesce(value, 'no') || ' tokens, but its attempts ' || counted
        FROM current_metrics JOIN (
            SELECT step, sum(action_tokens) AS counted FROM (
                SELECT step, action_tokens, max(retry) FROM ({_STEP_ATTEMPTS}) WHERE NOT greedy
                GROUP BY step, group_id, sample_index)
            GROUP BY step) USING (step)
        WHERE name = 'tokens' AND value IS NOT counted""",
    "the mean total of a step is that of its attempts": f"""
        SELECT 'step ' || step || ' has reward ' || value || ', but its attempts ' || mean
        FROM current_metrics JOIN (
            SELECT step, avg(reward) AS mean FROM (
                SELECT step, reward, action_tokens, is_scheduled, max(retry) FROM ({_STEP_ATTEMPTS}) WHERE NOT greedy
                GROUP BY step, group_id, sample_index)
            WHERE reward IS NOT NULL AND action_tokens > 0 AND NOT is_scheduled GROUP BY step) USING (step)
        WHERE name = 'reward' AND abs(value - mean) > 1e-9 * max(1, abs(mean))""",
    # The mean is over the scored attempts of the environments with this reward. Without it an attempt counts as 0; if
    # it is not known, the attempt is left out. A split such as "calc/train" begins with the environment.
    "the mean rewards of a step are those of its attempts": f"""
        WITH last AS (
            SELECT step, substr(split, 1, instr(split, '/')) AS env, id, max(retry) FROM ({_STEP_ATTEMPTS})
            WHERE NOT greedy GROUP BY step, group_id, sample_index),
        attempt AS (SELECT step, env, id FROM last WHERE id IN (SELECT attempt_id FROM rewards WHERE turn IS NULL)),
        size AS (SELECT step, env, count(*) AS attempts FROM attempt GROUP BY step, env),
        total AS (
            SELECT step, env, name, attempt_id, sum(value) AS total,
                max(typeof(value) = 'text' OR abs(value) > 1e9) AS is_odd,
                max(value IS NULL) AS unknown
            FROM attempt JOIN rewards ON attempt_id = attempt.id GROUP BY attempt_id, name),
        part AS (
            SELECT step, name, sum(total) FILTER (WHERE NOT unknown) AS sum, attempts - sum(unknown) AS known,
                max(is_odd) AS is_odd
            FROM total JOIN size USING (step, env) GROUP BY step, env, name),
        mean AS (
            SELECT step, 'reward/' || name AS name, sum(sum) / sum(known) AS mean
            FROM part WHERE sum IS NOT NULL GROUP BY step, name HAVING NOT max(is_odd))
        SELECT 'step ' || step || ' has ' || name || ' ' || value || ', but its attempts ' || mean
        FROM current_metrics JOIN mean USING (step, name)
        WHERE abs(value - mean) > 1e-9 * max(1, abs(mean))""",
    "an attempt is sampled before it is trained": """
        SELECT attempt || ' was trained at step ' || attempts.step || ' but sampled by version ' || newest_version
        FROM current_attempts AS attempts JOIN outcomes ON attempt_id = attempts.id
        WHERE fate = 'trained' AND newest_version > (
            SELECT max(version) FROM current_versions AS made WHERE made.step < attempts.step)""",
}
"""A query for each invariant, by name. A query returns one line of text for each violation."""


def invalid_attempts(connection: sqlite3.Connection, reader: RunReader) -> Iterator[str]:
    """Yield the first problem of each attempt, superseded or not, with an unreadable or inconsistent trajectory."""
    weights = {
        segment: json.loads(config).get("reward_weights", {})
        for segment, config in connection.execute("SELECT segment, config FROM segments")
    }
    columns = f"attempts.id, attempt, attempts.segment, reward, credit, {', '.join(Counts._fields)}"
    sql = f"""
        SELECT {columns} FROM attempts JOIN outcomes ON outcomes.attempt_id = attempts.id
        LEFT JOIN fates ON fates.attempt_id = attempts.id AND fate = 'trained' ORDER BY attempts.id"""
    for row_id, attempt, segment, reward, credit, *counts in connection.execute(sql):
        try:
            rows = connection.execute("SELECT turn, numbers FROM token_records WHERE attempt_id = ?", (row_id,))
            trajectory = reader.trajectory_of_row(row_id)
            records = [decode_token_record(trajectory.attempt, *row) for row in rows]
            problem = next(_trajectory_problems(trajectory, records, Counts(*counts)), None)
            if problem is None and encode_reward(total_reward(trajectory, weights[segment])) != reward:
                problem = f"has reward {reward}, which is not the weighted sum of its rewards"
            if problem is None and records and credit is not None:
                total = math.fsum(value for record in records for value in record.advantages)
                if not math.isclose(total, float(credit), rel_tol=1e-3, abs_tol=1e-3):  # sums in float32
                    problem = f"was trained with credit {credit:g}, but its token records sum to {total:g}"
        except DECODING_ERRORS as error:
            problem = f"cannot be read: {type(error).__name__}: {error}"
        if problem is not None:
            yield f"{attempt} {problem}"


def _trajectory_problems(trajectory: Trajectory, records: Sequence[TokenRecord], recorded: Counts) -> Iterator[str]:
    for place, turn in enumerate(trajectory.turns):
        if turn.index != place:
            yield f"lacks turn {place}"
        if turn.parent is not None and not 0 <= turn.parent < turn.index:
            yield f"has turn {turn.parent} as the parent of turn {turn.index}"
        yield from (f"turn {turn.index} {problem}" for problem in _token_problems(turn))
    for record in records:
        tokens = len(trajectory.turns[record.turn].action_ids)
        if len(record.logprobs) != tokens:
            yield f"turn {record.turn} has {tokens} action tokens and a token record of {len(record.logprobs)}"
    for name, count, expected in zip(Counts._fields, count_turns(trajectory), recorded, strict=True):
        if count != expected:
            yield f"has {name} {count}, but its outcome has {expected}"
    for name, value in trajectory.rewards.items():
        if isinstance(value, tuple) and trajectory.turns_for_rewards(len(value)) is None:
            yield f"has {len(value)} numbers of reward {name} for {len(trajectory.turns)} turns"
    for turn in trajectory.turns:
        for rewards in (turn.rewards, *turn.call_rewards):
            yield from (
                f"has several numbers of reward {name} in a turn"
                for name in rewards
                if isinstance(rewards[name], tuple)
            )


def _token_problems(turn: Turn) -> Iterator[str]:
    actions = len(turn.action_ids)
    if actions != len(turn.logprobs):
        yield f"has {actions} action tokens and {len(turn.logprobs)} log-probabilities"
    if any(math.isnan(value) for value in turn.logprobs):
        yield "has a log-probability that is not a number"
    starts = [span.start for span in turn.version_spans]
    if actions and (starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] >= actions):
        yield f"has version spans that start at {starts} in {actions} action tokens"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run.

    If a run is still training, list its files first and read its database afterwards. The database is then not older
    than the files.
    """

    folder: Path
    checkpoints: Sequence[Path]  # the folders of the checkpoints, newest first
    # the inode of the model's folder, which changes if the model is replaced; None if there is no model
    model: int | None
    closed: bytes | None  # the content of ``digest.json``, or None


def list_run_files(folder: Path) -> RunFiles:
    return RunFiles(folder, list_checkpoints(folder), _inode(folder / MODEL), read_digest_file(folder))


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except FileNotFoundError:
        return None


def changed_rows(connection: sqlite3.Connection, reader: RunReader, files: RunFiles) -> Iterator[str]:
    """Yield a message for each table that has changed since the run was closed."""
    if files.closed is not None:
        changes = check_closed(connection, files.closed)
        if read_digest_file(files.folder) == files.closed:  # otherwise a process opened the run during the check
            yield from [", ".join(changes)] if changes else []


def invalid_checkpoints(connection: sqlite3.Connection, reader: RunReader, files: RunFiles) -> Iterator[str]:
    """Yield a message for each checkpoint that :meth:`RunReader.check_checkpoint` refuses.

    Training can continue during the check and remove an old checkpoint. No message is yielded for a removed checkpoint.
    """
    for checkpoint in reversed(files.checkpoints):
        try:
            reader.check_checkpoint(checkpoint)
        except AgentR1Error as error:
            if checkpoint.exists():
                yield str(error)


def missing_checkpoints(connection: sqlite3.Connection, reader: RunReader, files: RunFiles) -> Iterator[str]:
    """Yield a message if the newest recorded checkpoint is missing on the disk.

    A complete run with its final model needs no checkpoint.
    """
    newest, present = reader.last_checkpoint_step(), list_checkpoints(files.folder)
    needed = not (reader.is_complete() and (files.folder / MODEL).exists())
    if needed and newest is not None and (not present or checkpoint_step(present[0]) < newest):
        yield f"the checkpoint of step {newest} was saved and is gone"


def invalid_model(connection: sqlite3.Connection, reader: RunReader, files: RunFiles) -> Iterator[str]:
    """Yield a message if the final model is corrupt, or if its weights are none of the run's recorded versions.

    A run that still trains can replace its final model during the check. Then no message is yielded.
    """
    if files.model is None:
        return
    model = files.folder / MODEL
    try:
        manifest = check_manifest(model)
        reader.check_rows(model, manifest)
    except AgentR1Error as error:
        problem = str(error)
    else:
        # A run that is not complete can have saved this model before it was resumed.
        table = "current_versions" if reader.is_complete() else "versions"
        # Versions without a checksum cannot be compared.
        sql = f"SELECT 1 FROM {table} WHERE checksum = ? OR checksum IS NULL"
        known = connection.execute(sql, (manifest.fingerprint.weights,)).fetchone()
        problem = "" if known else f"{model} holds weights that this run never published"
    if problem and _inode(model) == files.model:
        yield problem


def changed_config(connection: sqlite3.Connection, reader: RunReader, files: RunFiles) -> Iterator[str]:
    """Yield a message if ``config.json`` cannot be read, or differs from the configuration of the first segment."""
    file = files.folder / CONFIG_FILE
    recorded = json.loads(connection.execute("SELECT config FROM segments ORDER BY segment LIMIT 1").fetchone()[0])
    try:
        if json.loads(file.read_text(encoding="utf-8")) != recorded:
            yield f"{file} differs from the configuration in the run's database"
    except (OSError, ValueError, RecursionError) as error:
        yield f"{file} cannot be read: {error}"


FILE_INVARIANTS: Mapping[str, Callable[[sqlite3.Connection, RunReader, RunFiles], Iterator[str]]] = {
    "rows": changed_rows,
    "checkpoints": invalid_checkpoints,
    "newest checkpoint": missing_checkpoints,
    "model": invalid_model,
    "configuration": changed_config,
}
"""A check for each invariant, by name. A check yields one line of text for each violation."""
