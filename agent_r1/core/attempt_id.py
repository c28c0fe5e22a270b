"""The identity of one attempt at a task, and its seeds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """The identity of one attempt at one task.

    Attributes:
        group_id: the index of the group in the run.
        sample_index: the index of the attempt in its group.
        retry: the count of failed attempts that this attempt replaces.

    Example:
        >>> str(AttemptId("demo", "style-a/7", 3, 0))
        'demo:3.0.0:style-a/7'
    """

    run: str
    task: str
    group_id: int
    sample_index: int
    retry: int = 0

    @property
    def sort_key(self) -> tuple[int, int, int]:
        return (self.group_id, self.sample_index, self.retry)

    def seed(self, root: int, *path: int) -> int:
        """Return a 63-bit seed for the random numbers of the attempt.

        ``root`` is the seed of the run. The name of the run has no effect. The integers ``path`` distinguish several
        seeds of one attempt: ``seed(root, 0)`` and ``seed(root, 1)`` are different.
        """
        text = f"{root}|{self.task}|{self.sort_key}|{path}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def __str__(self) -> str:
        return f"{self.run}:{self.group_id}.{self.sample_index}.{self.retry}:{self.task}"
