"""A whole run on tiny-base: exact, repeatable, written down, and learning."""

import asyncio
import copy
import gc
import json
import random
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from golden_base import GOLDEN_BASE
from transformers import AutoModelForCausalLM, AutoTokenizer
from updating import make_updater, update

from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import AttemptFate
from agent_r1.core.messages import Message
from agent_r1.core.trajectory import Status
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.rewards.scoring import f1
from agent_r1.rollout.collector import RolloutLimits
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.training.config import TrainConfig
from agent_r1.training.evaluate import Method, attempts
from agent_r1.training.policy import load_policy
from agent_r1.training.progress import SilentProgress
from agent_r1.training.resume import DECODE_STEP
from agent_r1.training.run import _frozen_objects, train

SMALL = {"steps": 2, "groups_per_step": 4, "group_size": 4, "evaluate_n": 8, "pass_k": 0, "seed": 5}


@pytest.fixture(scope="module")
def taskset():
    return build("tinywiki", None, None, 0)


@pytest.fixture(scope="module")
def untabled(taskset):
    return replace(taskset, baselines={}, evaluation=("style-a",))


def config_of(taskset, **changes):
    return resolve(TrainConfig, [Layer("test", {**SMALL, **changes}), Layer("recipe", taskset.recipe)])


@pytest.fixture(scope="module")
def lived(taskset):
    config = config_of(taskset)
    policy = load_policy(config, taskset)
    engine = TorchEngine(copy.deepcopy(policy.model), policy.context_length)
    method = Method("test", policy.agent(engine, config, 0.7), taskset.env)
    groups = asyncio.run(attempts(method, taskset.scorers, taskset.tasks("train")[:8], 4, RolloutLimits()))
    return policy, groups


def update_of(policy, groups, temperature, minibatches=1):
    updater = make_updater(
        copy.deepcopy(policy.model),
        "reinforce++",
        temperature=temperature,
        reward_weights={"f1": 0.0},
        minibatches=minibatches,
    )
    return update(updater, groups)


def test_engine_and_trainer_agree_on_every_logprob(lived):
    policy, groups = lived
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    assert max(turn.index for turn in turns) >= 2
    assert update_of(policy, groups, 0.7).metrics["logprob_gap"] < 1e-5


def test_a_trainer_at_another_temperature_does_not_agree(lived):
    policy, groups = lived
    assert update_of(policy, groups, 1.0).metrics["logprob_gap"] > 1e-2


def test_the_first_ratio_is_one(lived):
    policy, groups = lived
    assert update_of(policy, groups, 0.7, minibatches=2).metrics["first_ratio_deviation"] < 1e-5


class Dawdling:
    """The same world, whose steps take a random time."""

    def __init__(self, env, seed):
        self._env, self._random, self.tools = env, random.Random(seed), env.tools

    async def open(self, task, context):
        episode = await self._env.open(task, context)
        step = episode.step

        async def late(action):
            await asyncio.sleep(self._random.random() * 0.02)
            return await step(action)

        class Late:
            start = episode.start
            close = staticmethod(episode.close)

        Late.step = staticmethod(late)
        return Late()


def bits(folder):
    """What two equal runs have in common: all that was lived, what became of it, and the weights."""
    reader = RunReader(folder)
    lived = sorted(
        (
            t.attempt.sort_key,
            t.status,
            tuple((u.new_ids, u.action_ids, u.logprobs, u.rewards) for u in t.turns),
            t.rewards,
        )
        for t in reader.trajectories()
    )
    fates = sorted((fate.attempt.sort_key, fate.fate, fate.step, fate.reason or "") for fate in reader.fates())
    reader.close()
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    return lived, fates, dict(model.state_dict())


def equal(one, other):
    return one[:2] == other[:2] and all(torch.equal(one[2][name], other[2][name]) for name in one[2])


def test_the_same_run_twice_gives_equal_bits_whatever_the_tools_timing(untabled, tmp_path):
    taskset, algorithm = untabled, {"constant_groups": "drop", "max_refill_rounds": 1}
    runs = {"a": taskset, "b": replace(taskset, env=Dawdling(taskset.env, 1)), "other seed": taskset}
    small = {"evaluate_every": 0, "evaluate_n": 1, "groups_per_step": 3, "group_size": 3}
    for name, version in runs.items():
        changes = {"seed": 6} if name == "other seed" else {}
        train(
            config_of(taskset, run=str(tmp_path / name), algorithm=algorithm, **small, **changes),
            version,
            SilentProgress(),
        )
    a, b, other = (bits(tmp_path / name) for name in runs)
    assert equal(a, b)
    assert not equal(a, other)


def test_a_run_is_written_down_whole(taskset, tmp_path):
    config = config_of(taskset, run=str(tmp_path / "run"), checkpoint_every=1)
    report = train(config, taskset, SilentProgress())
    assert report.run == tmp_path / "run" and report.steps == 2 and report.train_seconds > 0
    assert set(report.table.cells) == {"naive-rag", "base-tool-call", "trained"}
    assert set(report.table.cells["trained"]) == {"style-a", "style-b", "three-hop"}
    reader = RunReader(report.run)
    fates = list(reader.fates())
    assert len(fates) == len({fate.attempt for fate in fates}) == 2 * 4 * 4
    assert {fate.attempt for fate in fates} == {event.attempt for event in reader.attempts()}
    metrics = list(reader.metrics())
    assert [step.step for step in metrics] == [1, 2]
    assert {"reward", "em", "tokens_per_second", "rollout_seconds", "update_seconds"} <= set(metrics[0].values)
    assert max(step.values.get("padding", 0) for step in metrics) < 0.1
    kinds = [event.kind for event in reader.events() if event.kind != DECODE_STEP]  # only with a C++ compiler
    *first, one, two, three, table, completed = kinds
    between = [one, two, three]
    assert [*first, table, completed] == ["fingerprint", "update", "tools", "hardware", "table", "completed"]
    assert sorted(between) == ["checkpoint_saved", "checkpoint_saved", "validation"]
    assert json.loads((report.run / "config.json").read_text("utf-8"))["group_size"] == 4
    reader.close()
    tokenizer = AutoTokenizer.from_pretrained(report.run / "model")
    assert tokenizer.chat_template
    assert AutoModelForCausalLM.from_pretrained(report.run / "checkpoints" / "step-2").num_parameters() > 0


def test_training_ahead_of_the_update_stays_within_its_staleness(untabled, tmp_path):
    config = config_of(untabled, run=str(tmp_path / "run"), steps=4, max_staleness=2)
    train(config, untabled, SilentProgress())
    reader = RunReader(tmp_path / "run")
    staleness = [step.values["staleness"] for step in reader.metrics() if "staleness" in step.values]
    reader.close()
    assert 0 < max(staleness) <= 2


class Breaking(Dawdling):
    """A world where one task cannot be opened."""

    async def open(self, task, context):
        if context.id.group_id == 1:
            raise OSError("no page could be read")
        return await self._env.open(task, context)


def test_training_uses_the_environment_that_the_task_set_has_for_the_split_train(untabled, tmp_path):
    short = ToolEnv(tools=list(untabled.env.tools_by_name.values()), max_turns=1, system=untabled.env.system)
    config = config_of(untabled, steps=1, groups_per_step=2, checkpoint_every=0, run=str(tmp_path / "run"))
    train(config, replace(untabled, variants={"train": short}), SilentProgress())
    with closing(RunReader(tmp_path / "run")) as reader:
        attempts_in_training = [t for t in reader.trajectories() if t.task_id.startswith("train")]
    assert attempts_in_training and all(len(t.turns) == 1 for t in attempts_in_training)


def test_a_control_run_trains_on_the_same_rewards_in_another_order(untabled, tmp_path):
    config = config_of(
        untabled, steps=1, groups_per_step=8, checkpoint_every=0, shuffle_rewards=True, run=str(tmp_path / "run")
    )
    train(config, untabled, SilentProgress())
    tasks = {task.id: task for task in untabled.tasks("train")}
    with closing(RunReader(tmp_path / "run")) as reader:
        trained = [t for t in reader.trajectories() if t.task_id.startswith("train")]
    true = [(t.attempt.group_id, f1(t, tasks[t.task_id])) for t in trained]
    recorded = [(t.attempt.group_id, t.rewards["f1"]) for t in trained]
    assert sorted(true) == sorted(recorded) and true != recorded


def test_failing_episodes_are_dropped_with_their_reason_and_the_run_goes_on(untabled, tmp_path):
    broken = replace(untabled, env=Breaking(untabled.env, 0))
    report = train(config_of(broken, run=str(tmp_path / "run"), steps=1), broken, SilentProgress())
    reader = RunReader(report.run)
    fates = {fate.attempt.sort_key[:2]: fate for fate in reader.fates()}
    broken = [fates[1, member] for member in range(4)]
    statuses = {t.status for t in reader.trajectories() if t.attempt.group_id == 1}
    reader.close()
    assert statuses == {Status.ENVIRONMENT_FAILED}
    assert all(isinstance(fate, AttemptFate) and fate.fate == "dropped" for fate in broken)
    assert all(Status.ENVIRONMENT_FAILED in (fate.reason or "") for fate in broken)
    assert len(fates) == 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "no/such/folder"}, "model"),
        ({"algorithm": "gpro"}, "grpo"),
        ({"algorithm": {"loss": {"clip_hihg": 0.3}}}, "did you mean 'algorithm.loss.clip_high'"),
        ({"algorithm": {"masks": {"advantage": False}}}, "masks.advantage has no effect"),
        ({"algorithm": "distillation"}, "teacher: got none"),
        ({"context": 20}, "a prompt of"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(taskset, tmp_path, changes, said):
    with pytest.raises(InvalidInput, match=said):
        train(config_of(taskset, run=str(tmp_path / "run"), **changes), taskset, SilentProgress())
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_longer_than_the_model_is_refused(taskset, tmp_path):
    long = Message.user("Alba " * 5000)
    tasks = [replace(taskset.tasks("train")[0], id="long", messages=(long,))]
    with pytest.raises(InvalidInput, match="task long: got a prompt of"):
        train(
            config_of(taskset, run=str(tmp_path / "run")), replace(taskset, tasks=lambda split: tasks), SilentProgress()
        )
    assert list(tmp_path.iterdir()) == []


def test_training_learns(taskset, tmp_path):
    # Six steps on fewer attempts than in the demo: far above the base model on questions never seen.
    small = {"steps": 6, "groups_per_step": 12, "group_size": 8, "evaluate_n": 40, "evaluate_every": 0}
    small |= {"model": GOLDEN_BASE, "trainer.learning_rate": 3e-4}
    config = config_of(taskset, run=str(tmp_path / "run"), **small)
    taskset = replace(taskset, baselines={}, evaluation=("style-a", "style-b"))
    table = train(config, taskset, SilentProgress()).table.cells
    for style in ("style-a", "style-b"):
        assert table["trained"][style].em > table["base-tool-call"][style].em + 0.3


def test_collections_skip_older_objects_only_while_a_run_trains():
    gc.unfreeze()  # conftest.py has frozen objects
    try:
        with _frozen_objects():
            assert gc.get_freeze_count() > 10_000
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
    with _frozen_objects():  # of the caller: they stay frozen
        pass
    assert gc.get_freeze_count() > 10_000
