"""The name of one try at a task, and the seeds derived from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """Identifies one try at one task.

    ``group`` is the serial number of the group in the run, ``member`` the position in the group,
    ``retry`` counts tries again after a failure. Attempts order as they were dispatched.

    Example:
        >>> str(AttemptId("demo", "style-a/7", 3, 0))
        'demo:3.0.0:style-a/7'
    """

    run: str
    task: str
    group: int
    member: int
    retry: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """Where the attempt stands among those of its run, independent of names and of time."""
        return (self.group, self.member, self.retry)

    def seed(self, root: int, *path: int) -> int:
        """A 63-bit seed that depends on the root seed, the attempt's place and ``path`` only.

        The run's name is left out, so that two runs of one configuration draw the same numbers.
        """
        text = f"{root}|{self.task}|{self.order}|{path}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def __str__(self) -> str:
        return f"{self.run}:{self.group}.{self.member}.{self.retry}:{self.task}"
