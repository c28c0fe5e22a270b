"""A run as pandas DataFrames, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1.core.errors import InvalidInput, import_extra
from agent_r1.core.trajectory import Trajectory
from agent_r1.store.folder import is_run, run_folder
from agent_r1.store.reader import RunReader, read_results

if TYPE_CHECKING:
    import pandas

Cells = Mapping[str, Mapping[str, Mapping[str, Any] | None]]
"""The cells of a result table: values by method and split; None if every attempt failed."""


class RunData:
    """The recorded data of a run, which may still train. Each call reads the newest state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def metrics(self) -> pandas.DataFrame:
        """Return one row per step, the index, and one column per metric and timing (docs/reading_a_run.md)."""
        with self.reader() as reader:
            steps = {one.step: dict(one.values) for one in reader.metrics()}
        return _frame(steps, "step")

    def attempts(self) -> pandas.DataFrame:
        """Return one row per attempt: the fields of :class:`AttemptSummary`, its task, and ``reward/NAME`` columns.

        The index is the id of the attempt. ``reward/NAME`` is the sum of a reward over the attempt, without its weight.
        """
        with self.reader() as reader:
            rows = {str(one.attempt): asdict(one) | asdict(one.attempt) for one in reader.list_attempts(limit=-1)}
            rewards = [one for one in reader.reward_sums() if str(one[0]) in rows]  # the run may have added attempts
        for row in rows.values():
            del row["attempt"]
            row["status"] = None if row["status"] is None else row["status"].value
        for attempt, name, total in rewards:
            rows[str(attempt)][f"reward/{name}"] = total
        return _frame(rows, "attempt")

    def table(self) -> pandas.DataFrame:
        """Return one row per method and split of the table at the end of the run; no rows before its end."""
        with self.reader() as reader:
            tables = [result["table"] for result in read_results(reader, "table")]
        return table_frame(tables[-1] if tables else {})

    def attempt(self, name: str) -> Trajectory:
        """Return the conversation of an attempt, whose id is in the index of :meth:`attempts`."""
        with self.reader() as reader:
            found = reader.find_attempt(name)
            trajectory = None if found is None else reader.trajectory(found.attempt)
        if trajectory is None:
            do = "give one that has ended, from the index of attempts()"
            raise InvalidInput("attempt", got=f"{name!r}, which {self.folder} has not", do=do)
        return trajectory

    def reader(self) -> closing[RunReader]:
        """Return a reader of all records, to be used in a ``with`` block."""
        return closing(RunReader(self.folder))


def load_run(run: str | Path) -> RunData:
    """Return the data of a run: the name of one in runs/, or its folder."""
    folder = Path(run) if is_run(Path(run)) else run_folder(str(run))
    if not is_run(folder):
        raise InvalidInput("run", got=f"{folder}, which holds no run", do="give a name in runs/, or the folder of one")
    return RunData(folder)


def table_frame(cells: Cells) -> pandas.DataFrame:
    """Return a result table with the columns method, split, em, low, high, f1, n and more: one row per cell."""
    places = [(method, split) for method, row in cells.items() for split in row]
    rows = [{"method": method, "split": split, **(cells[method][split] or {})} for method, split in places]
    return _frame(dict(enumerate(rows)), None)


def _frame(rows: Mapping[Any, Mapping[str, Any]], index: str | None) -> pandas.DataFrame:
    made: pandas.DataFrame = import_extra("pandas", "pandas").DataFrame.from_dict(rows, orient="index")
    return made.rename_axis(index)
