"""The protocol of trackers (clients of W&B, MLflow and the like), and the values that trackers receive."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from agent_r1.core.messages import to_openai
from agent_r1.core.redaction import redact_values
from agent_r1.core.trajectory import RewardValue, Trajectory

RunEnd = Literal["completed", "stopped", "failed"]
"""How a run ended. ``completed``: all steps are done. ``stopped``: a signal stopped the run. ``failed``: an error ended
the run."""

PROJECT = "agent-r1"
"""The default name of the project (in MLflow: experiment) to which a tracker adds a run."""

TRACKERS_FOLDER = "trackers"
"""The name of a subfolder of a run's folder. The subfolder has a file for each tracker that gave the run an id.

For example, the file ``wandb`` contains the id that W&B gave to the run.
"""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker shows.

    Attributes:
        settings: the settings by dotted key, without credentials.
        step: the step from which the run was resumed; None for a new run.
    """

    name: str
    folder: Path
    settings: Mapping[str, str | int | float | bool | None]
    step: int | None = None

    def saved_id(self, tracker: str) -> str | None:
        """Return the id that the run has in ``tracker``, or None if :meth:`save_id` was not called."""
        path = self.folder / TRACKERS_FOLDER / tracker
        return path.read_text("utf-8").strip() if path.is_file() else None

    def save_id(self, tracker: str, value: str) -> None:
        """Save ``value``, the id that the run has in ``tracker``. A resumed run keeps this id."""
        path = self.folder / TRACKERS_FOLDER / tracker
        path.parent.mkdir(exist_ok=True)
        path.write_text(value + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class AttemptSample:
    """An attempt that trackers show as text. Credentials in the messages are hidden.

    Attributes:
        rewards: the rewards of the whole trajectory.
        messages: the conversation, in the OpenAI format.
    """

    name: str
    status: str
    rewards: Mapping[str, RewardValue]
    messages: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, trajectory: Trajectory) -> AttemptSample:
        shown = (message.with_images_as_text() for message in trajectory.messages)
        messages = tuple(redact_values(to_openai(message)) for message in shown)
        return cls(str(trajectory.attempt), trajectory.status.value, trajectory.rewards, messages)

    @property
    def summary(self) -> str:
        """The status and the rewards of the attempt, in one line."""
        rewards = (f"{name} {value}" for name, value in self.rewards.items())
        return ", ".join([self.status, *rewards])

    @property
    def text(self) -> str:
        """The id, status, rewards and conversation of the attempt, as plain text."""
        return "\n".join([self.name, self.summary, *map(_message_text, self.messages)])


def _message_text(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    lines = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n".join([f"[{message['role']}] {message['content']}".rstrip(), *lines])


class Tracker(Protocol):
    """A client that shows the metrics of one run.

    One thread makes the tracker and calls its methods. A method may block, and may raise any exception. If a call
    raises an exception or takes too long, the run continues without the tracker.
    """

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of a step, for example {"reward/em": 0.5}. Values can be NaN or infinite."""
        ...

    def log_attempts(self, step: int, attempts: Sequence[AttemptSample]) -> None:
        """Show a few attempts that ended since the previous step. ``step`` is the current step."""
        ...

    def finish(self, end: RunEnd) -> None:
        """Send all remaining data. No method is called after ``finish``."""
        ...
