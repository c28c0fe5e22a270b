"""The profiles of a run's steps, for the run's database and the progress display."""

from __future__ import annotations

from agent_r1.core.profile import Profiler, StepProfile, format_profile, mean_profile
from agent_r1.training.progress import Progress


class ProfileLog:
    """A log of the profile of each step.

    ``every`` is the number of steps between two printed tables; 0: no tables.
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
        """Print a mean profile, every N steps and after the last step. N is the constructor's argument ``every``.

        If ``is_last`` is true, the mean is over all steps. Otherwise, the mean is over the last N steps. If N is 0,
        nothing is printed.
        """
        if not self._every or not (is_last or step % self._every == 0):
            return
        shown = self._profiles if is_last else self._profiles[-self._every :]
        title = f"time of a step, mean of {len(shown)}"
        self._progress.print_line(format_profile(mean_profile(shown), title))
