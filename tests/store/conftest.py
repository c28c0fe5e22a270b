"""Trajectories as episodes leave them, small and complete."""

import asyncio
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.events import (
    AttemptFate,
    AttemptFinished,
    AttemptStarted,
    Event,
    LogEvent,
    PendingDropped,
    PolicyPublished,
    StepMetrics,
    StepTimings,
)
from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message, Text, ToolCall
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Status, Trajectory, Turn
from agent_r1.store import Ledger, create_run, reopen_run
from agent_r1.store.atomic_fs import appearing
from agent_r1.store.manifest import Identity, write_manifest


def make_turn(index: int) -> Turn:
    call = ToolCall("call_0", "search", {"query": "Alba", "k": 3}, '{"name": "search"}')
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        new_ids=(5, 6, 7 + index),
        action_ids=(9, 2),
        logprobs=(-0.1 / 3, -1e-17),
        version_spans=(PolicyVersionSpan(0, 4), PolicyVersionSpan(1, 5)),
        finish_reason="stop",
        action=Action(Message.assistant("look", (call,), reasoning="who?"), "look <tool_call>"),
        observation=(Message.tool("Alba : capital Bruno .", "call_0"),),
        results=(ToolResult((Text("Alba"),), True, None, {"titles": ("Alba", "Bruno")}, 0.25),),
        rewards={"format": -0.5},
        call_rewards=({"found": 1.0, "cost": -0.1 / 3}, {})[:index],
        call_ends=(1, 1)[:index],
    )


def make_trajectory(group: int = 0, member: int = 0, turns: int = 3) -> Trajectory:
    attempt = AttemptId("demo", f"style-a/{group}", group, member)
    return Trajectory(
        attempt=attempt,
        task_id=attempt.task,
        turns=tuple(make_turn(index) for index in range(turns)),
        status=Status.OUT_OF_TURNS,
        truncated=True,
        rewards={"exact_match": 1.0, "steps": tuple(0.5 for _ in range(turns)), "judge": None},
        reason="no turns left",
        start=(Message.system("Answer."), Message.user("Who rules Alba?")),
        seconds=1.5,
    )


@pytest.fixture
def live() -> Callable[..., Trajectory]:
    """``live(group, member, turns)`` is a trajectory of one attempt in the run ``demo``."""
    return make_trajectory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the run of a test goes; it does not exist yet."""
    return tmp_path / "runs" / "demo"


CONFIG = {"steps": 4}
WEIGHTS = ["begin", "one", "three", "four"]
"""The digests of versions 0 to 3; step 2 makes none."""


class Script:
    """A run of four steps, told as its events: group ``step - 1`` has two attempts that are trained, a third that
    breaks. Step 2 teaches nothing. The attempts of step 4 are acted by the weights of step 1, as stale ones may be."""

    ACTED_BY: ClassVar = {1: 0, 2: 1, 3: 1, 4: 1}

    def lived(self, step: int, member: int) -> Trajectory:
        version = self.ACTED_BY[step]
        lived = make_trajectory(step - 1, member)
        turns = tuple(replace(turn, version_spans=(PolicyVersionSpan(0, version),)) for turn in lived.turns)
        return replace(lived, turns=turns, rewards={**lived.rewards, "exact_match": float(step + member)})

    def acted(self, step: int) -> list[Event]:
        lived = [self.lived(step, member) for member in (0, 1, 2)]
        started = [AttemptStarted(t.attempt, "train", self.ACTED_BY[step]) for t in lived]
        return [*started, *map(AttemptFinished, lived[:2])]

    def learned(self, step: int) -> list[Event]:
        good = [self.lived(step, member).attempt for member in (0, 1)]
        fates = [AttemptFate(attempt, "trained", step, credit=step / 3) for attempt in good]
        if step == 2:
            fates = [AttemptFate(attempt, "dropped", step, "no advantage in the whole batch") for attempt in good]
        broken = AttemptFate(self.lived(step, 2).attempt, "dropped", step, "the engine failed")
        made = [] if step == 2 else [PolicyPublished((version := max(1, step - 1)), step, WEIGHTS[version])]
        return [
            *fates,
            broken,
            *made,
            StepMetrics(step, {"loss": step / 7}),
            StepTimings(step, {"seconds": random.random()}),
        ]

    def step(self, step: int) -> list[list[Event]]:
        return [self.acted(step), self.learned(step)]

    def begin(self) -> list[Event]:
        return [PolicyPublished(0, 0, WEIGHTS[0])]

    def end(self) -> list[Event]:
        return [PendingDropped(4, "the run had taken its last step"), LogEvent("completed", "4 steps")]


def tell(ledger: Ledger, *chapters: list[Event]) -> None:
    for events in chapters:
        asyncio.run(ledger.record(*events))


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both runs below, made once."""
    folder = tmp_path_factory.mktemp("told")
    tell_uninterrupted(Script(), folder / "uninterrupted")
    tell_resumed(Script(), folder / "resumed")
    return folder


@pytest.fixture
def uninterrupted(told: Path, tmp_path: Path) -> Path:
    """A run that never stopped."""
    return Path(shutil.copytree(told / "uninterrupted", tmp_path / "runs" / "uninterrupted"))


@pytest.fixture
def resumed(told: Path, tmp_path: Path) -> Path:
    """The same run, which stopped after step 3 and went on from the checkpoint of step 2.

    Of the attempts for step 4, which had been acted by then, the first is dispatched again and the second is trained
    as it is. Another attempt, dropped at step 3, never comes back.
    """
    return Path(shutil.copytree(told / "resumed", tmp_path / "runs" / "resumed"))


def tell_uninterrupted(script: Script, folder: Path) -> None:
    with closing(create_run(folder, CONFIG)) as ledger:
        tell(ledger, script.begin(), *(events for step in (1, 2, 3, 4) for events in script.step(step)), script.end())


def tell_resumed(script: Script, folder: Path) -> None:
    stray = AttemptId("demo", "stray", 9, 0)
    with closing(create_run(folder, CONFIG)) as ledger:
        tell(ledger, script.begin(), *script.step(1), *script.step(2))
        tell(ledger, script.acted(3), [AttemptStarted(stray, "train", 1), AttemptFate(stray, "dropped", 3, "late")])
        tell(ledger, script.acted(4), script.learned(3))
    with closing(reopen_run(folder)) as ledger:
        ledger.open_lineage(2, CONFIG)
        again = [event for event in script.acted(4) if not_second(event)]
        tell(ledger, script.acted(3), again, script.learned(3), script.learned(4), script.end())
    save(folder / "checkpoints" / "step-2", WEIGHTS[1])
    save(folder / "model", WEIGHTS[3])


def not_second(event: Event) -> bool:
    match event:
        case AttemptStarted(attempt, _, _):
            return attempt.member != 1
        case AttemptFinished(trajectory):
            return trajectory.attempt.member != 1
    return True


def save(folder: Path, weights: str) -> None:
    """A saved model, as far as a ledger's reader can tell."""
    with appearing(folder) as half:
        (half / "model.safetensors").write_text(weights)
        write_manifest(half, Identity("a model", "a tokenizer", "a template", weights))
