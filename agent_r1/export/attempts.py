"""Read the trajectories of a run, and convert them to JSON values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from agent_r1.core.messages import Message, to_openai
from agent_r1.core.trajectory import Conversation, Trajectory, Turn
from agent_r1.export.config import ExportConfig
from agent_r1.store import RunReader
from agent_r1.store.attempt_list import AttemptFilter, AttemptSummary
from agent_r1.store.results import read_tools
from agent_r1.training.reward_totals import sum_rewards

PAGE = 2000
"""The number of attempts whose summaries are read from the database at once."""


@dataclass(frozen=True, slots=True)
class ExportedAttempt:
    """An ended attempt, and the environment's tools in the OpenAI format."""

    summary: AttemptSummary
    trajectory: Trajectory
    tools: Sequence[Mapping[str, Any]]

    def tools_of(self, conversation: Conversation) -> list[dict[str, Any]]:
        if conversation.tools is None:
            return [dict(tool) for tool in self.tools]
        return [tool.to_openai() for tool in conversation.tools]

    def facts(self) -> dict[str, Any]:
        """Return ids, status, rewards and fate of the attempt as JSON values.

        The fate is "trained", "dropped" or "pending" (neither so far).

        Example:
            {"id": "demo:3.0.0:style-a/7", .., "fate": "trained", "status": "completed", "reward": 1.0, ..}
        """
        summary, trajectory = self.summary, self.trajectory
        return {
            "id": str(trajectory.attempt),
            "run": trajectory.attempt.run,
            "task": trajectory.task_id,
            "split": summary.split,
            "group": trajectory.attempt.group_id,
            "sample": trajectory.attempt.sample_index,
            "retry": trajectory.attempt.retry,
            "version": summary.version,
            "step": summary.step,
            "fate": summary.fate or "pending",
            "fate_reason": summary.fate_reason,
            "status": trajectory.status.value,
            "status_reason": trajectory.reason,
            "truncated": trajectory.truncated,
            "seconds": trajectory.seconds,
            "answer": trajectory.answer,
            "reward": finite(summary.reward),
            "rewards": {name: finite(value) for name, value in sum_rewards(trajectory).items()},
        }


def read_attempts(reader: RunReader, config: ExportConfig) -> Iterator[ExportedAttempt]:
    """Yield the ended attempts that ``config`` selects, in the order of their start.

    Only one trajectory is in memory at a time.
    """
    tools = read_tools(reader)
    where = AttemptFilter(split=config.split, status=config.status, fate=config.fate, reward_from=config.min_reward)
    for offset in count(0, PAGE):
        page = reader.list_attempts(where, limit=PAGE, offset=offset)
        for summary in page:
            trajectory = reader.trajectory(summary.attempt) if _is_in_steps(summary.step, config) else None
            if trajectory is not None:
                yield ExportedAttempt(summary, reader.with_images(trajectory), tools)
        if len(page) < PAGE:
            return


def _is_in_steps(step: int | None, config: ExportConfig) -> bool:
    first, last = config.first_step, config.last_step
    if first is None and last is None:
        return True
    return step is not None and (first is None or first <= step) and (last is None or step <= last)


def openai_messages(messages: Sequence[Message], *, arguments_as_text: bool) -> list[dict[str, Any]]:
    """Return a conversation in the OpenAI format.

    With ``arguments_as_text``, the arguments of calls are JSON text, as in the OpenAI API. Otherwise they are objects,
    as chat templates of transformers expect.
    """
    converted = [to_openai(message) for message in messages]
    for call in (call for message in converted for call in message.get("tool_calls", ())) if arguments_as_text else ():
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return converted


def turn_record(turn: Turn) -> dict[str, Any]:
    """Return the exact tokens, text and process rewards of a turn as JSON values.

    Example:
        {"index": 0, "parent": None, "kind": "act", .., "new_ids": (5, 6), "action_ids": (9, 2), "text": "Alba", ..}
    """
    return {
        "index": turn.index,
        "parent": turn.parent,
        "kind": turn.kind,
        "finish_reason": turn.finish_reason,
        "new_ids": turn.new_ids,
        "action_ids": turn.action_ids,
        "logprobs": turn.logprobs,
        "text": turn.action.text,
        "rewards": {name: finite(value) for name, value in turn.rewards.items()},
        "call_rewards": [{name: finite(value) for name, value in call.items()} for call in turn.call_rewards],
    }


def finite(value: float | None) -> float | None:
    """Return ``value``, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def valid_text(value: Any) -> Any:
    """Return a JSON value that can be written as UTF-8.

    Each lone surrogate is escaped, as ``\\udc80``. NaN and infinite numbers become None.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {valid_text(key): valid_text(item) for key, item in value.items()}
    if isinstance(value, float):
        return finite(value)
    return [valid_text(item) for item in value] if isinstance(value, list | tuple) else value
