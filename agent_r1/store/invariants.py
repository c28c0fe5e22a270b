"""The conservation law, and what else must hold among the rows of a ledger, as questions that must have no answer.

Within a lineage every attempt that was dispatched is trained once, or dropped for a reason, or superseded, or pending.
"""

from __future__ import annotations

from collections.abc import Mapping

COMPLETED = """EXISTS (SELECT 1 FROM events WHERE kind = 'completed'
                       AND lineage = (SELECT max(lineage) FROM lineages))"""

LAST_STEP = "(SELECT coalesce(max(step), 0) FROM standing_metrics)"

LAW: Mapping[str, str] = {
    "one attempt stands once": """
        SELECT attempt || ' stands ' || count(*) || ' times' FROM standing_attempts
        GROUP BY attempt HAVING count(*) > 1""",
    "a fate is trained, dropped or superseded": """
        SELECT attempt || ' is ' || fate FROM fates JOIN attempts ON id = attempt_id
        WHERE fate NOT IN ('trained', 'dropped', 'superseded')""",
    "what is superseded stays so": """
        SELECT attempt || ' met a fate in lineage ' || fates.lineage || ' after it was superseded'
        FROM fates JOIN fates AS gone USING (attempt_id) JOIN attempts ON id = attempt_id
        WHERE gone.fate = 'superseded' AND fates.lineage > gone.lineage""",
    "only a later lineage supersedes": """
        SELECT attempt || ' was superseded in its own lineage' FROM fates JOIN attempts ON id = attempt_id
        WHERE fate = 'superseded' AND fates.lineage <= attempts.lineage""",
    "no fate before its lineage": """
        SELECT attempt || ' met a fate before it was dispatched' FROM fates JOIN attempts ON id = attempt_id
        WHERE fate <> 'superseded' AND fates.lineage < attempts.lineage""",
    "what came after a checkpoint is superseded": """
        SELECT attempt || ' still counts as ' || fates.fate || ' at step ' || fates.step
        FROM standing_attempts JOIN fates ON attempt_id = id JOIN ends ON ends.lineage = fates.lineage
        WHERE fates.step > last_step""",
    "what is not trained has a reason": """
        SELECT attempt || ' was ' || fate || ' without one' FROM fates JOIN attempts ON id = attempt_id
        WHERE fate IN ('dropped', 'superseded') AND trim(coalesce(reason, '')) = ''""",
    "what is trained had finished": """
        SELECT attempt || ' has no trajectory' FROM standing_attempts
        WHERE fate = 'trained' AND id NOT IN (SELECT attempt_id FROM outcomes)""",
    "what is trained has action tokens": """
        SELECT attempt || ' sampled none' FROM standing_attempts JOIN outcomes ON attempt_id = id
        WHERE fate = 'trained' AND newest_version < 0""",
    "a completed run leaves nothing pending": f"""
        SELECT attempt || ' is' FROM standing_attempts WHERE fate IS NULL AND {COMPLETED}""",
    "lineages follow each other": """
        SELECT 'lineage ' || lineage || ' begins at step ' || step FROM (
            SELECT lineage, step, row_number() OVER (ORDER BY lineage) AS place FROM lineages)
        WHERE lineage <> place OR step < 0 OR (place = 1 AND step <> 0)""",
    "every step is measured": f"""
        WITH RECURSIVE steps (step) AS (SELECT 1 UNION ALL SELECT step + 1 FROM steps WHERE step < {LAST_STEP})
        SELECT 'step ' || step || ' is not' FROM steps
        WHERE {LAST_STEP} > 0 AND step NOT IN (SELECT step FROM standing_metrics WHERE exact)""",
    "fates fall on measured steps": """
        SELECT attempt || ' was ' || fate || ' at step ' || step FROM standing_attempts
        WHERE fate IS NOT NULL AND step NOT IN (SELECT step FROM standing_metrics WHERE exact)""",
    "a completed run took all its steps": f"""
        SELECT 'the configuration says ' || steps || ', measured are ' || {LAST_STEP}
        FROM (SELECT json_extract(config, '$.steps') AS steps FROM lineages ORDER BY lineage DESC LIMIT 1)
        WHERE steps <> {LAST_STEP} AND {COMPLETED}""",
    "versions count up from 0": """
        SELECT 'version ' || version || ' of step ' || step || ' comes after ' || coalesce(before, 'nothing') FROM (
            SELECT version, step, lag(version) OVER made AS before, lag(step) OVER made AS step_before
            FROM standing_versions WINDOW made AS (ORDER BY step, lineage, version))
        WHERE version <> coalesce(before + 1, 0) OR step <= coalesce(step_before, -1)""",
    "versions fall on measured steps": """
        SELECT 'version ' || version || ' on step ' || step FROM standing_versions
        WHERE step > 0 AND step NOT IN (SELECT step FROM standing_metrics WHERE exact)""",
    "only known weights act": """
        SELECT attempt || ' was acted by version ' || max(version, coalesce(newest_version, -1))
        FROM standing_attempts LEFT JOIN outcomes ON attempt_id = id
        WHERE max(version, coalesce(newest_version, -1)) > (SELECT coalesce(max(version), -1) FROM standing_versions)
           OR version < 0 OR newest_version BETWEEN 0 AND version - 1""",
    "training follows acting": """
        SELECT attempt || ' was trained at step ' || attempts.step || ' but acted by version ' || newest_version
        FROM standing_attempts AS attempts JOIN outcomes ON attempt_id = id
        WHERE fate = 'trained' AND newest_version > (
            SELECT max(version) FROM standing_versions AS made WHERE made.step < attempts.step)""",
}
"""Each rule by name: a query for the offenders, one line of text each."""
