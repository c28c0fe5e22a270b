"""The profiles of a run's steps: their numbers for the run's database, and tables for the progress display."""

from __future__ import annotations

from agent_r1.core.profile import Profiler, StepProfile, format_profile, mean_profile
from agent_r1.training.progress import Progress


class ProfileLog:
    """A log that takes the profile of each step, and prints tables.

    Args:
        profiler: measures the steps. The first step begins when the log is made.
        every: the number of steps between two tables. 0: no tables.
        progress: prints the tables.
    """

    def __init__(self, profiler: Profiler, every: int, progress: Progress) -> None:
        self._profiler, self._every, self._progress = profiler, every, progress
        self._profiles: list[StepProfile] = []
        profiler.take()  # drop the time before the first step

    def take(self) -> dict[str, float]:
        """End a step, and return its profile as numbers by name; {} if nothing is measured."""
        profile = self._profiler.take()
        if self._every:
            self._profiles.append(profile)
        return profile.timings()

    def on_step(self, step: int, is_last: bool) -> None:
        """Print a table if ``step`` is a multiple of ``every``, or the last step of the run (``is_last``).

        The table shows the mean profile of the last ``every`` steps. After the last step, it shows the mean profile of
        all steps. If ``every`` is 0, print nothing.
        """
        if not self._every or not (is_last or step % self._every == 0):
            return
        shown = self._profiles if is_last else self._profiles[-self._every :]
        title = f"time of a step, mean of {len(shown)}"
        self._progress.print_line(format_profile(mean_profile(shown), title))
