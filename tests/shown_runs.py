"""Runs for the command `show`: attempts with tools, failures, token records, warnings and hostile texts."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from recorded_runs import record_all

from agent_r1.core.events import (
    AttemptFate,
    AttemptFinished,
    AttemptStarted,
    Event,
    LogEvent,
    PolicyPublished,
    StepMetrics,
    TokenRecord,
    TokensRecorded,
)
from agent_r1.core.inference import PolicyVersion, PolicyVersionSpan
from agent_r1.core.messages import Action, Message, Text, ToolCall, ToolResult
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn, TurnTiming
from agent_r1.store.folder import create_run
from agent_r1.store.reader import result_event

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp\u200b\r\x08 [bold]markup[/bold] [link=http://x]"
"""A text with terminal control sequences, a reversed direction, a character without width, and markup of rich."""

STEPS = 3
CONFIG = {"steps": STEPS, "taskset": "films", "model": "no-model", "record_tokens": 1, "algorithm": {"name": "grpo"}}


def attempt_id(step: int, index: int) -> AttemptId:
    return AttemptId("demo", f"style-a/{step}", 10 * step, index)


def make_trajectory(step: int, index: int, text: str = "Bruno") -> Trajectory:
    """Return an attempt of two turns: a search that fails or succeeds, and an answer."""
    call = ToolCall("call_0", "search", {"query": text}, "{}")
    failed = index == 0
    result = ToolResult((Text(text),), not failed, f"timed out: {text}" if failed else None, seconds=0.25)
    spans = (PolicyVersionSpan(0, step - 1),)
    tokens = {"action_ids": (9, 2), "logprobs": (-0.5, -0.25), "version_spans": spans, "finish_reason": "stop"}
    turns = (
        Turn(
            index=0,
            parent=None,
            new_ids=(5, 6, 7),
            action=Action(Message.assistant(text, (call,)), f"I look up {text}"),
            observation=(Message.tool(f"Alba : capital {text} .", "call_0"), Message.user(f"go on {text}")),
            results=(result,),
            call_rewards=({"found": float(index)},),
            call_ends=(1,),
            timing=TurnTiming(start_seconds=0.0, end_seconds=0.5, first_token_seconds=0.25, env_seconds=0.75),
            **tokens,
        ),
        Turn(
            index=1,
            parent=0,
            new_ids=(8,),
            action=Action(Message.assistant(text), f"The answer is {text}"),
            rewards={"format": -0.5},
            **tokens,
        ),
    )
    return Trajectory(
        attempt=attempt_id(step, index),
        task_id=f"style-a/{step}",
        turns=turns,
        status=Status.COMPLETED,
        rewards={"em": float(index)},
        start=(Message.system("Answer."), Message.user(f"Who rules {text}?")),
        seconds=1.5,
        start_time=1_767_323_045.0,
        wait_seconds=2.5,
    )


def make_records(attempt: AttemptId) -> TokensRecorded:
    return TokensRecorded(
        tuple(
            TokenRecord(attempt, turn, (-0.5, math.nan), (0.75, -0.125), (0.5, 0.0), (1.25, 2.5), (0.3, 0.4))
            for turn in (0, 1)
        )
    )


def step_events(step: int, text: str) -> list[Event]:
    """Return the events of a step: attempts 0 to 10 are trained, 11 failed, and 0 has token records."""
    trajectories = [make_trajectory(step, index, text) for index in range(11)]
    trajectories.append(
        replace(
            make_trajectory(step, 11, text), status=Status.ENGINE_FAILED, reason=f"gone {text}", turns=(), rewards={}
        )
    )
    fates = [AttemptFate(t.attempt, "trained", step, credit=t.attempt.sample_index - 5) for t in trajectories[:11]]
    metrics = {"reward": step / 4, "reward/em": step / 8, "entropy": math.nan if step == 2 else 1 / step}
    validation = {
        "step": step,
        "split": "dev",
        "measure": "exact match",
        "em": step / 4,
        "f1": 0.5,
        "n": 20,
        "low": 0.1,
        "high": 0.9,
    }
    return [
        *(AttemptStarted(t.attempt, "train", step - 1) for t in trajectories),
        *map(AttemptFinished, trajectories),
        *fates,
        AttemptFate(trajectories[11].attempt, "dropped", step, f"engine_failed: gone {text}"),
        make_records(trajectories[0].attempt),
        PolicyPublished(PolicyVersion(step, step, f"weights {step}")),
        result_event("validation", validation),
        StepMetrics(step, {**metrics, "validation_em": step / 4}),
        LogEvent("warning", f"gradient_spike: far above {text}"),
    ]


def write_run(folder: Path, *ending: Event, steps: int = STEPS, text: str = "Bruno") -> None:
    with closing(create_run(folder, CONFIG)) as writer:
        record_all(writer, [PolicyPublished(PolicyVersion(0, 0, "begin"))])
        record_all(writer, *(step_events(step, text) for step in range(1, steps + 1)), [*ending])
