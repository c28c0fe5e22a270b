"""Metrics of a run as CSV and as lines of JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from agent_r1.export.attempts import finite, valid_text
from agent_r1.store import RunReader


def write_metrics(folder: Path, reader: RunReader) -> int:
    """Write ``metrics.csv`` and ``metrics.jsonl`` to ``folder``, one line per step. Return the number of steps.

    A metric without a value is an empty cell in CSV, and is absent in JSON. NaN is ``nan`` in CSV and null in JSON.
    """
    names = [valid_text(name) for name in reader.metric_names()]
    count = 0
    with (
        (folder / "metrics.csv").open("w", encoding="utf-8", newline="") as table,
        (folder / "metrics.jsonl").open("w", encoding="utf-8", newline="\n") as lines,
    ):
        rows = csv.DictWriter(table, ["step", *names])
        rows.writeheader()
        for step in reader.metrics():
            values = {valid_text(name): value for name, value in step.values.items()}
            rows.writerow({"step": step.step, **values})
            numbers = {name: finite(value) for name, value in values.items()}
            lines.write(json.dumps({"step": step.step, **numbers}, ensure_ascii=False) + "\n")
            count += 1
    return count
