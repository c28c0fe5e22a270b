"""Invariants of the run database, as queries. A query that returns a row has found a violation."""

from __future__ import annotations

from collections.abc import Mapping

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
