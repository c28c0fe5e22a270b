"""Process rewards in training: with weight 0 they change no bit, with another weight they change the result."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_r1.config import Layer, resolve
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Group
from agent_r1.data.batch import select_trainable
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.tasksets.tinywiki.search import search
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train

SMALL = {"steps": 2, "groups_per_step": 3, "group_size": 4, "evaluate_n": 1, "seed": 5, "pass_k": 0}


@pytest.fixture(scope="module")
def tasksets():
    taskset = replace(build("tinywiki", None, None, 0), baselines={}, evaluation=("style-a",))
    return {True: taskset, False: replace(taskset, env=ToolEnv(tools=[search], max_turns=taskset.env.max_turns))}


@pytest.fixture(scope="module")
def runs(tasksets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    variants = {"weight 0": (True, {}), "without": (False, {}), "weight 0.5": (True, {"reward_weights.found": 0.5})}
    for name, (rewarded, changes) in variants.items():
        taskset = tasksets[rewarded]
        layers = [Layer("test", {**SMALL, "run": str(folder / name), **changes}), Layer("recipe", taskset.recipe)]
        train(resolve(TrainConfig, layers), taskset, SilentProgress())
    return {name: folder / name for name in variants}


def recorded(folder):
    """Return trajectories, fates and metrics without the rewards of calls."""
    reader = RunReader(folder)
    trajectories = {
        t.attempt.sort_key: (
            t.status,
            t.rewards,
            [(u.new_ids, u.action_ids, u.logprobs, u.rewards, u.call_ends, u.observation) for u in t.turns],
        )
        for t in reader.trajectories()
    }
    fates = {fate.attempt.sort_key: (fate.fate, fate.step, fate.reason) for fate in reader.fates()}
    metrics = [
        {name: value for name, value in measured.values.items() if name != "reward/found"}
        for measured in reader.reproducible_metrics()
    ]
    reader.close()
    return trajectories, fates, metrics


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


def call_rewards(folder):
    reader = RunReader(folder)
    found = [u.call_rewards for t in reader.trajectories() for u in t.turns if u.call_rewards]
    reader.close()
    return found


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_with_weight_0_a_run_equals_one_without_the_reward(runs):
    assert recorded(runs["weight 0"]) == recorded(runs["without"])
    assert equal(weights(runs["weight 0"]), weights(runs["without"]))
    assert call_rewards(runs["weight 0"]) and not call_rewards(runs["without"])
    assert {given["found"] for calls in call_rewards(runs["weight 0"]) for given in calls} == {0.0, 1.0}


def test_another_weight_changes_the_trained_model(runs):
    assert not equal(weights(runs["weight 0.5"]), weights(runs["without"]))


def test_the_weight_scales_the_total_reward(runs):
    reader = RunReader(runs["weight 0"])
    trajectories = tuple(t for t in reader.trajectories() if t.attempt.group_id == 0)
    reader.close()
    group = Group(0, Task("task", ()), trajectories)
    sparse, dense = (select_trainable([group], {"f1": 0.0, "found": weight}).samples for weight in (0.0, 0.5))
    gains = [more.total - less.total for less, more in zip(sparse, dense, strict=True)]
    pages = [sum(given["found"] for u in t.turns for given in u.call_rewards) for t in trajectories]
    assert gains == [0.5 * count for count in pages] and len(set(gains)) > 1
