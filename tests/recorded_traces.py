"""A run whose attempts succeed exactly if a certain token was sampled, for tests of reward models."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

from learning_fixtures import Make
from recorded_runs import record_all

from agent_r1.core.events import AttemptFinished, AttemptStarted, Event
from agent_r1.core.trajectory import Trajectory
from agent_r1.store.folder import create_run
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER

GOOD, BAD = 7, 3
"""The token that makes an attempt succeed, and the one that makes it fail."""


def attempts(tasks: int = 24, members: int = 4) -> list[Trajectory]:
    """Return attempts of two turns at ``tasks`` tasks; half of the attempts at each task succeed."""
    make, shuffle = Make(), random.Random(0)
    made = []
    for group in range(tasks):
        prompt = [shuffle.randrange(100, 200) for _ in range(4)]
        for member in range(members):
            is_good = member % 2 == 0
            turns = make.chain(
                (prompt, [shuffle.randrange(200, 300)]), ([shuffle.randrange(300, 400)], [GOOD if is_good else BAD])
            )
            made.append(make.trajectory(turns, {"em": float(is_good), "bonus": 0.25}, group=group, member=member))
    return made


def record(folder: Path, trajectories: list[Trajectory], model: str = str(TINY_BASE_FOLDER)) -> Path:
    """Write a run with ``trajectories``, and return its folder."""
    config = {"model": model, "reward_weights": {"bonus": 0.0}}
    with closing(create_run(folder, config)) as writer:
        starts: list[Event] = [AttemptStarted(one.attempt, "train", 0) for one in trajectories]
        record_all(writer, starts, [AttemptFinished(one) for one in trajectories])
    return folder
