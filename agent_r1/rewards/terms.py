"""Rewards that need no gold answer, such as the number of tool calls or of sampled tokens.

A cost, such as the number of tool calls, is 0 or more. Give a cost a negative weight, so that it lowers the return.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import fmean

from agent_r1.core.messages import Text
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory
from agent_r1.rewards.answers import calls_are_valid, final_answer, normalize
from agent_r1.rewards.scoring import RewardFunction


def calls(trajectory: Trajectory, task: Task) -> float:
    """Return the number of tool calls in the attempt."""
    return float(sum(len(turn.action.message.calls) for turn in trajectory.env_turns))


def repeated_calls(trajectory: Trajectory, task: Task) -> float:
    """Return the number of tool calls that repeat an earlier call of the attempt: same tool, same arguments."""
    made = [
        (call.name, call.raw if call.arguments is None else json.dumps(call.arguments, sort_keys=True, default=str))
        for turn in trajectory.env_turns
        for call in turn.action.message.calls
    ]
    return float(len(made) - len(set(made)))


def failed_calls(trajectory: Trajectory, task: Task) -> float:
    """Return the number of tool calls that failed, because of an error of the agent or of the tool."""
    return float(sum(not result.ok for turn in trajectory.env_turns for result in turn.results))


def tokens(trajectory: Trajectory, task: Task) -> float:
    """Return the number of tokens that the policy sampled in the attempt."""
    return float(sum(len(turn.action_ids) for turn in trajectory.turns))


def logprob(trajectory: Trajectory, task: Task) -> float:
    """Return the mean log-probability with which the policy sampled its tokens, or 0.0 if there is no token."""
    values = [value for turn in trajectory.turns for value in turn.logprobs]
    return fmean(values) if values else 0.0


def format(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 if the attempt gives a final answer and no tool call is invalid; otherwise 0.0."""
    return float(final_answer(trajectory) is not None and calls_are_valid(trajectory))


def grounded(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 if the normalized final answer occurs in the result of a tool call of the attempt, otherwise 0.0."""
    answer = normalize(final_answer(trajectory) or "")
    results = (result for turn in trajectory.env_turns for result in turn.results)
    texts = (normalize(" ".join(part.text for part in result.parts if isinstance(part, Text))) for result in results)
    return float(bool(answer) and any(f" {answer} " in f" {text} " for text in texts))


TERMS: Mapping[str, RewardFunction] = {
    function.__name__: function for function in (calls, repeated_calls, failed_calls, tokens, logprob, format, grounded)
}
"""The rewards of this module by name, for the option ``--extra_rewards.NAME``."""
