"""The runs that the viewer shows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agent_r1.store.folder import is_run


class Catalog:
    """The runs that the viewer shows. Each of the ``folders`` is a run, or contains folders of runs."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)

    @property
    def places(self) -> tuple[str, ...]:
        return tuple(map(str, self._folders))

    def runs(self) -> Mapping[str, Path]:
        """Return the folder of each run, by the name of the run. New runs appear at the next call.

        The name of a run is the name of its folder. If several folders have the name ``demo``, the second run is
        ``demo-2``.
        """
        runs: dict[str, Path] = {}
        for folder in self._all():
            name, count = folder.resolve().name.encode("utf-8", "backslashreplace").decode(), 1
            while (unique := name if count == 1 else f"{name}-{count}") in runs:
                count += 1
            runs[unique] = folder
        return runs

    def _all(self) -> Iterator[Path]:
        seen = set()
        for folder in self._folders:
            for run in [folder] if is_run(folder) else _inside(folder):
                if run.resolve() not in seen:
                    seen.add(run.resolve())
                    yield run


def _inside(folder: Path) -> list[Path]:
    try:
        found = [Path(entry) for entry in os.scandir(folder) if is_run(Path(entry))]
    except (OSError, ValueError):  # ValueError: the text cannot be a path
        return []
    return sorted(found, key=lambda run: run.joinpath("config.json").stat().st_mtime, reverse=True)
