"""Small, complete trajectories, and a scripted run of four steps."""

import math
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from recorded_runs import record_all, save

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
    TokenRecord,
    TokensRecorded,
)
from agent_r1.core.inference import PolicyVersion, PolicyVersionSpan
from agent_r1.core.messages import Action, Image, Message, Text, ToolCall, ToolResult
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn, TurnTiming
from agent_r1.store.folder import create_run, reopen_run
from agent_r1.store.manifest import read_digest

MAP = Image.from_data_url(
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""A picture of one pixel."""


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
        timing=TurnTiming(
            start_seconds=2.0 * index,
            end_seconds=2.0 * index + 0.5,
            first_token_seconds=2.0 * index + 0.1,
            env_seconds=1.5,
        ),
    )


def make_trajectory(group: int = 0, index: int = 0, turns: int = 3) -> Trajectory:
    attempt = AttemptId("demo", f"style-a/{group}", group, index)
    return Trajectory(
        attempt=attempt,
        task_id=attempt.task,
        turns=tuple(make_turn(index) for index in range(turns)),
        status=Status.OUT_OF_TURNS,
        truncated=True,
        rewards={"exact_match": 1.0, "steps": tuple(0.5 for _ in range(turns)), "judge": None},
        reason="no turns left",
        start=(Message.system("Answer."), Message("user", (MAP, Text("Who rules Alba?")))),
        seconds=1.5,
    )


def make_token_records(attempt: AttemptId, step: int) -> tuple[TokenRecord, ...]:
    """Return the token records of an attempt with three turns. The first token's log-probability was not computed."""
    numbers = {"advantages": (step / 3, 0.5), "loss_weights": (0.125, 0.0), "entropies": (0.5, 0.25)}
    return tuple(TokenRecord(attempt, turn, (math.nan, -0.25), **numbers) for turn in range(3))


@pytest.fixture
def make() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "demo"


CONFIG = {"steps": 4}
WEIGHTS = ["begin", "one", "three", "four"]
"""The checksums of versions 0 to 3; step 2 publishes none."""


class Script:
    """The events of a run of four steps: in group ``step - 1`` two attempts are trained and a third fails.

    Nothing is learned in step 2. The attempts of step 4 are sampled with the weights of step 1, as stale ones may be.
    """

    SAMPLED_BY: ClassVar = {1: 0, 2: 1, 3: 1, 4: 1}

    def trajectory(self, step: int, index: int) -> Trajectory:
        version = self.SAMPLED_BY[step]
        trajectory = make_trajectory(step - 1, index)
        turns = tuple(replace(turn, version_spans=(PolicyVersionSpan(0, version),)) for turn in trajectory.turns)
        return replace(trajectory, turns=turns, rewards={**trajectory.rewards, "exact_match": float(step + index)})

    def sampling(self, step: int) -> list[Event]:
        trajectories = [self.trajectory(step, index) for index in (0, 1, 2)]
        started = [AttemptStarted(t.attempt, "train", self.SAMPLED_BY[step]) for t in trajectories]
        return [*started, *map(AttemptFinished, trajectories[:2])]

    def update(self, step: int) -> list[Event]:
        good = [self.trajectory(step, index).attempt for index in (0, 1)]
        fates = [AttemptFate(attempt, "trained", step, credit=step + 1.5) for attempt in good]
        if step == 2:
            fates = [AttemptFate(attempt, "dropped", step, "no advantage in the whole batch") for attempt in good]
        broken = AttemptFate(self.trajectory(step, 2).attempt, "dropped", step, "the engine failed")
        version = max(1, step - 1)
        published = [PolicyPublished(PolicyVersion(version, step, WEIGHTS[version]))]
        return [
            *fates,
            broken,
            TokensRecorded(() if step == 2 else make_token_records(good[0], step)),
            *([] if step == 2 else published),
            StepMetrics(step, {"loss": step / 7}),
            StepTimings(step, {"seconds": random.random()}),
        ]

    def step(self, step: int) -> list[list[Event]]:
        return [self.sampling(step), self.update(step)]

    def start(self) -> list[Event]:
        return [PolicyPublished(PolicyVersion(0, 0, WEIGHTS[0]))]

    def end(self) -> list[Event]:
        return [PendingDropped(4, "the run took its last step"), LogEvent("completed", "4 steps")]


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_uninterrupted(Script(), folder / "uninterrupted")
    write_resumed(Script(), folder / "resumed")
    return folder


@pytest.fixture
def uninterrupted(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "uninterrupted", tmp_path / "runs" / "uninterrupted"))


@pytest.fixture
def resumed(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "resumed", tmp_path / "runs" / "resumed"))


def write_uninterrupted(script: Script, folder: Path) -> None:
    with closing(create_run(folder, CONFIG)) as writer:
        record_all(
            writer, script.start(), *(events for step in (1, 2, 3, 4) for events in script.step(step)), script.end()
        )


def write_resumed(script: Script, folder: Path) -> None:
    stray = AttemptId("demo", "stray", 9, 0)
    with closing(create_run(folder, CONFIG)) as writer:
        record_all(writer, script.start(), *script.step(1), *script.step(2))
        record_all(
            writer, script.sampling(3), [AttemptStarted(stray, "train", 1), AttemptFate(stray, "dropped", 3, "late")]
        )
        record_all(writer, script.sampling(4), script.update(3))
        save(folder, "checkpoints/step-2", WEIGHTS[1], read_digest(folder / "run.db"))
    with closing(reopen_run(folder)) as writer:
        writer.open_segment(2, CONFIG)
        again = [event for event in script.sampling(4) if is_not_second(event)]
        record_all(writer, script.sampling(3), again, script.update(3), script.update(4), script.end())
        save(folder, "model", WEIGHTS[3], read_digest(folder / "run.db"))


def is_not_second(event: Event) -> bool:
    match event:
        case AttemptStarted(attempt, _, _):
            return attempt.sample_index != 1
        case AttemptFinished(trajectory):
            return trajectory.attempt.sample_index != 1
    return True
