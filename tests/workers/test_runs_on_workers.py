"""Runs whose environments are on workers: the results of a run without, and the death of a worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from scenarios import MICRO, micro_taskset
from served_environments import forked, serving

from agent_r1.cli import main
from agent_r1.config import Layer, resolve
from agent_r1.core.environment import Env, RolloutContext, Transition
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Action
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Status
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import run_digest, verify
from agent_r1.tasksets import build
from agent_r1.training.config import TrainConfig
from agent_r1.training.environments import describe_environments, environments_of, with_environments
from agent_r1.training.mixture import load_mixture
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train
from agent_r1.workers.client import check_workers
from agent_r1.workers.protocol import EnvironmentConfig
from agent_r1.workers.server import EnvironmentWorker


def test_the_command_serves_until_a_signal(tmp_path: Path) -> None:
    config = resolve(TrainConfig, [Layer("test", {"model": "none"})])

    def serve(pipe: int) -> None:
        sys.stdout = os.fdopen(pipe, "w", encoding="utf-8")
        os._exit(main(["serve-env", "tinywiki", "--port", "0", "--json"]))

    with forked(serve) as (child, pipe):
        announced = json.loads(os.fdopen(os.dup(pipe), encoding="utf-8").readline())
        workers = EnvironmentConfig(workers=(announced["url"],))
        check_workers(workers, describe_environments(config, build("tinywiki", None, None, 0)))
        os.kill(child, signal.SIGTERM)
        assert os.read(pipe, 1) == b""


def train_micro(folder: Path, taskset: TaskSet, workers: tuple[str, ...] = ()) -> None:
    settings = {
        **MICRO,
        "steps": 1,
        "group_size": 2,
        "checkpoint_every": 0,
        "run": str(folder),
        "environment.workers": workers,
    }
    config = resolve(TrainConfig, [Layer("test", settings), Layer("recipe", taskset.recipe)])
    train(config, taskset, SilentProgress())


@dataclass
class Dying:
    """An environment that kills its process at the second step of all its episodes."""

    env: Env
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.tools = self.env.tools

    async def open(self, task: Task, context: RolloutContext) -> Any:
        return DyingEpisode(self, await self.env.open(task, context))


class DyingEpisode:
    def __init__(self, env: Dying, episode: Any) -> None:
        self.env, self.episode, self.start = env, episode, episode.start

    async def step(self, action: Action) -> Transition:
        self.env.num_steps += 1
        if self.env.num_steps == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return await self.episode.step(action)

    async def close(self) -> None:
        await self.episode.close()


@pytest.fixture(scope="module")
def taskset() -> TaskSet:
    return micro_taskset()


def test_a_run_on_a_worker_is_the_run_without(tmp_path: Path, taskset: TaskSet) -> None:
    config = resolve(TrainConfig, [Layer("test", {"model": "none"})])
    train_micro(tmp_path / "alone", taskset)
    tasks = {split: taskset.tasks(split) for split in ("train", "style-a")}
    with serving(environments_of(taskset), describe_environments(config, taskset), tasks) as worker:
        train_micro(tmp_path / "remote", taskset, (worker.url,))
        assert worker.num_episodes == 0
    with closing(RunReader(tmp_path / "alone")) as alone, closing(RunReader(tmp_path / "remote")) as remote:
        assert run_digest(alone) == run_digest(remote)


def test_each_of_several_environments_is_served_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mix.toml").write_text('[a]\ntaskset = "tinywiki"\n[b]\ntaskset = "tinywiki"\n', "utf-8")
    mixture = replace(load_mixture(tmp_path / "mix.toml", 0, ""), baselines={}, evaluation=("b/renamed-tool",))
    config = resolve(TrainConfig, [Layer("test", {"model": "none"})])
    train_micro(tmp_path / "alone", mixture)
    tasks = {split: mixture.tasks(split) for split in ("a/train", "b/train", "b/renamed-tool")}
    description = describe_environments(config, replace(mixture, name="mix.toml"))  # in another folder
    with serving(environments_of(mixture), description, tasks) as worker:
        train_micro(tmp_path / "remote", mixture, (worker.url,))
    with closing(RunReader(tmp_path / "alone")) as alone, closing(RunReader(tmp_path / "remote")) as remote:
        assert run_digest(alone) == run_digest(remote)
        assert {one.task_id.partition("/")[0] for one in remote.trajectories("train")} == {"a", "b"}


def test_a_run_survives_the_death_of_one_of_two_workers(tmp_path: Path, taskset: TaskSet) -> None:
    config = resolve(TrainConfig, [Layer("test", {"model": "none"})])
    envs, description = environments_of(taskset), describe_environments(config, taskset)
    tasks = {split: taskset.tasks(split) for split in ("train", "style-a")}

    def serve(pipe: int) -> None:
        async def run() -> None:
            worker = EnvironmentWorker({**envs, "env": Dying(taskset.env)}, taskset.tasks, description)
            worker.start()
            os.write(pipe, worker.url.encode() + b"\n")
            await asyncio.Event().wait()

        asyncio.run(run())

    with forked(serve) as (_, pipe), serving(envs, description, tasks) as working:
        dying = os.fdopen(os.dup(pipe), encoding="utf-8").readline().strip()
        train_micro(tmp_path / "run", taskset, (dying, working.url))
        assert working.num_episodes == 0
    assert verify(tmp_path / "run").is_valid
    with closing(RunReader(tmp_path / "run")) as reader:
        assert reader.is_complete() and reader.count_statuses()[Status.ENVIRONMENT_FAILED] >= 1
        failed = [one for one in reader.trajectories() if one.status is Status.ENVIRONMENT_FAILED]
        assert all(f"{dying} failed" in (one.reason or "") for one in failed)


def test_an_agent_of_its_own_has_no_workers(taskset: TaskSet) -> None:
    config = resolve(TrainConfig, [Layer("test", {"model": "m", "environment.workers": ("http://127.0.0.1:9",)})])
    with pytest.raises(InvalidInput, match="an agent of your own runs its tools itself"):
        with_environments(replace(taskset, agent=lambda url, key, task: None), config)
