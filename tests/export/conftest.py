"""Runs to export: one that is recorded event by event, with hostile text, and one that is trained with LoRA."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
from recorded_runs import record_all
from resuming import config_of
from scenarios import micro_taskset

from agent_r1.core.events import AttemptFate, AttemptFinished, AttemptStarted, Event, LogEvent, StepMetrics
from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message, ToolCall, ToolSpec
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn
from agent_r1.store.folder import create_run
from agent_r1.store.reader import tools_event
from agent_r1.training import run
from agent_r1.training.progress import SilentProgress

HOSTILE = '</script>\n\r\t"\\ \u202e \U0001f600 \x00 \u2028 {{ x }} | `#` ---\n= HYPERLINK("x")'
"""A text that every format must keep as it is."""

CONFIG = {"taskset": "/home/ann/mix.toml", "model": "tiny-base", "steps": 2, "seed": 0}
CONFIG |= {"algorithm": {"name": "grpo", "paper": "2402.03300"}}
CONFIG |= {"data": "/home/ann/secret place/questions.json", "corpus": "http://ann:pass-7@10.0.0.1:8800"}


def trajectory(index: int, text: str = "Who rules Alba?", turns: int = 1) -> Trajectory:
    """Return an attempt with a call of ``search`` in each turn but the last."""
    name = AttemptId("demo", f"task-{index}", index, 0)
    made = []
    for number in range(turns):
        is_last = number == turns - 1
        call = () if is_last else (ToolCall(f"call_{number}", "search", {"query": text, "k": number}, ""),)
        made.append(
            Turn(
                index=number,
                parent=number - 1 if number else None,
                new_ids=(5, 6),
                action_ids=(9, 2),
                logprobs=(-0.1, -0.2),
                version_spans=(PolicyVersionSpan(0, 0),),
                finish_reason="stop",
                action=Action(Message.assistant(f"look {text}", call), f"look {text} raw"),
                observation=() if is_last else (Message.tool(f"page of {text}", f"call_{number}"),),
                rewards={"format": -0.5},
                call_rewards=() if is_last else ({"found": 1.0},),
                new_messages=made[-1].observation if made else (Message.user(text),),
            )
        )
    rewards = {"em": float(index % 2), "judge": math.nan if index == 1 else 0.0}
    return Trajectory(name, name.task, tuple(made), Status.COMPLETED, rewards=rewards, start=(Message.user(text),))


def record(folder: Path, trajectories: list[Trajectory]) -> Path:
    """Record a run of which every second attempt was trained, in steps of two attempts."""
    tool = ToolSpec(
        "search", f"Find a page. {HOSTILE}", {"type": "object", "properties": {"query": {"type": "string"}}}
    )
    events: list[Event] = [tools_event([tool])]
    for index, one in enumerate(trajectories):
        step = index // 2 + 1
        events += [AttemptStarted(one.attempt, "train" if index % 3 else "extra", 0), AttemptFinished(one)]
        trained = index % 2 == 0
        events.append(
            AttemptFate(one.attempt, "trained" if trained else "dropped", step, credit=0.5 if trained else None)
        )
    steps = [StepMetrics(step, {"reward": 0.5, "kl": math.nan, f"reward/{HOSTILE}": step / 3}) for step in (1, 2)]
    with closing(create_run(folder, CONFIG)) as writer:
        record_all(writer, events, [*steps, LogEvent("completed", "2 steps")])
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    attempts = [trajectory(index) for index in range(6)]
    attempts[2] = trajectory(2, HOSTILE, turns=2)
    return record(tmp_path_factory.mktemp("recorded") / "demo", attempts)


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {
        "model": "tiny-base",
        "trainer.lora.rank": 4,
        "trainer.learning_rate": 1e-2,
        "steps": 2,
        "algorithm": "grpo",
    }
    settings |= {"groups_per_step": 1, "evaluate_every": 1, "evaluate_n": 2}
    folder = tmp_path_factory.mktemp("adapted") / "adapted"
    return run.train(config_of(micro_taskset(), folder, settings), micro_taskset(), SilentProgress()).run
