"""Critics from runs and from recorded attempts, and their guidance of evaluations."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import config_of
from scenarios import micro_taskset
from transformers import Qwen2Config, Qwen2ForCausalLM

from agent_r1.config import Layer, resolve
from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.inference import (
    Completion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    ScoredTokens,
    ValueFunction,
)
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.inference.config import DecodeConfig
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_model
from agent_r1.rollout.beam import RecordedAction, RepeatingEngine
from agent_r1.store.manifest import list_checkpoints
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.training import run
from agent_r1.training.config import CriticConfig, EvalConfig
from agent_r1.training.environments import rollout_limits
from agent_r1.training.evaluate import TRAINED, VALUE_GUIDED, Method, attempts, evaluate, guided_method
from agent_r1.training.policy import load_critic, load_policy, open_critic
from agent_r1.training.progress import SilentProgress
from agent_r1.training.tables import Table
from agent_r1.training.train_critic import RecordedReturns, predict, recorded_returns, split_tasks, train_critic


@pytest.fixture(scope="module")
def taskset() -> TaskSet:
    return micro_taskset()


@pytest.fixture(scope="module")
def ppo(taskset: TaskSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("guidance") / "ppo"
    config = config_of(taskset, folder, {"algorithm": "ppo", "steps": 2, "group_size": 4})
    run.train(config, taskset, SilentProgress())
    yield folder


@pytest.fixture(scope="module")
def critic(ppo: Path) -> Path:
    settings = {"run": str(ppo), "held_out": 0.5, "epochs": 2, "batch_size": 4}
    train_critic(ppo, CriticConfig.model_validate(settings), SilentProgress())
    return ppo / "critic"


def evaluated(taskset: TaskSet, model: Path, **decode: Any) -> Table:
    settings = {
        "model": str(model),
        "methods": [TRAINED, VALUE_GUIDED],
        "evaluate_n": 2,
        "max_tokens": 20,
        "context": 512,
    }
    layers = [Layer("test", {**settings, **{f"decode.{name}": value for name, value in decode.items()}})]
    return evaluate(resolve(EvalConfig, layers), taskset, SilentProgress())


def test_targets_are_the_returns_from_each_turn_on(ppo: Path) -> None:
    with closing(RunReader(ppo)) as reader:
        attempt = max(reader.trajectories("train"), key=lambda one: len(one.turns))
    found = {"found": 1.0, "em": 1.0}
    (recorded,) = recorded_returns(attempt, found)
    earned = [math.fsum(call.get("found", 0.0) for call in turn.call_rewards) for turn in attempt.turns]
    outcome = attempt.rewards["em"]
    assert isinstance(outcome, float)
    expected = [
        outcome + attempt.rewards.get("f1", 0.0) + math.fsum(earned[turn.index :])  # type: ignore[operator]
        for turn in attempt.turns
        for _ in range(len(turn.action_ids) + 1)
    ]
    assert recorded.returns == pytest.approx(expected)
    ends = [state for state, is_end in zip(recorded.states, recorded.is_end, strict=True) if is_end]
    assert ends[-1] == len(recorded.token_ids) - 1
    assert len(ends) == len(attempt.turns)
    assert recorded.token_ids == attempt.prompt_ids(attempt.turns[-1]) + attempt.turns[-1].action_ids


def test_no_task_is_trained_on_and_held_out() -> None:
    recorded = [RecordedReturns(f"{index % 10}", (), (), (), (), ()) for index in range(40)]
    train, held_out = split_tasks(recorded, 0.3, seed=1)
    assert {one.task_id for one in train}.isdisjoint(one.task_id for one in held_out)
    assert (len(train), len(held_out)) == (28, 12)


def test_a_trained_critic_is_saved_with_its_fit(ppo: Path, critic: Path) -> None:
    report = json.loads((critic / "critic.json").read_text("utf-8"))
    assert report["attempts"] + report["held_out_attempts"] == 16
    assert report["all_states"]["error"] < report["all_states"]["mean_error"] * 1.5
    loaded = load_critic(str(critic))
    with closing(RunReader(ppo)) as reader:
        recorded = [one for attempt in reader.trajectories("train") for one in recorded_returns(attempt, {})]
    values, _, _ = predict(loaded, recorded[:2])
    assert values.std() > 0
    assert verify(ppo).violations == ()


def test_the_critic_of_a_run_has_its_trained_weights(ppo: Path) -> None:
    model = load_critic(str(ppo))
    assert model.logprob_input is not None
    assert bool(model.head.weight.any())


class Lengths:
    """A value function: the number of tokens after the context, or of the context if there are no branches."""

    def __init__(self) -> None:
        self.states: list[tuple[int, ...]] = []

    async def values(self, session_id: str, context: ScoredTokens, branches: Sequence[ScoredTokens]) -> list[float]:
        self.states += [(context + branch).token_ids for branch in branches]
        return [float(len((context + branch).token_ids)) for branch in branches]

    async def release(self, session_id: str) -> None: ...

    async def close(self) -> None: ...


def sample_attempts(
    taskset: TaskSet, decode: DecodeConfig | None, values: ValueFunction, temperature: float = 1.0, count: int = 3
) -> list[Trajectory]:
    """Return an attempt of tiny-base at each of the first tasks."""
    config = resolve(EvalConfig, [Layer("test", {"model": "tiny-base", "max_tokens": 20, "context": 512})])
    policy = load_policy(config, taskset)

    async def sample() -> list[Trajectory]:
        engine = TorchEngine(policy.model, policy.context_length, config.engine)
        agent = policy.agent(engine, config, temperature)
        plain = Method("plain", agent, taskset.env)
        method = plain if decode is None else guided_method(agent, taskset.env, values, decode)
        groups = await attempts(
            replace(method, name="plain"), taskset.scorers, taskset.tasks("style-a")[:count], 1, rollout_limits(config)
        )
        await engine.close()
        return [group.trajectories[0] for group in groups]

    return asyncio.run(sample())


def tokens(sampled: Sequence[Trajectory]) -> list[list[tuple[tuple[int, ...], ...]]]:
    return [[(turn.new_ids, turn.action_ids) for turn in attempt.turns] for attempt in sampled]


def logprobs(sampled: Sequence[Trajectory]) -> list[float]:
    return [logprob for attempt in sampled for turn in attempt.turns for logprob in turn.logprobs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_attempts_with_one_candidate_have_the_tokens_of_plain_decoding(taskset: TaskSet, temperature: float) -> None:
    plain = sample_attempts(taskset, None, Lengths(), temperature)
    for method in ("step", "beam"):
        decode = DecodeConfig.model_validate({"method": method, "critic": "a", "candidates": 1, "beams": 1})
        guided = sample_attempts(taskset, decode, Lengths(), temperature)
        assert tokens(guided) == tokens(plain), method
        # A beam search computes the context of each turn anew, which can change the last bits.
        assert logprobs(guided) == pytest.approx(logprobs(plain), abs=1e-4 if method == "beam" else 0), method


def test_a_beam_search_continues_the_conversations_of_largest_value(taskset: TaskSet) -> None:
    values = Lengths()
    decode = DecodeConfig(method="beam", critic="a", candidates=3, beams=1)
    (attempt,) = sample_attempts(taskset, decode, values, count=1)
    assert len(values.states) == 3 * len(attempt.turns)
    for number, turn in enumerate(attempt.turns):
        longest = max(values.states[3 * number : 3 * number + 3], key=len)
        state = attempt.prompt_ids(turn) + turn.action_ids
        assert longest[: len(state)] == state


def test_a_beam_search_refuses_an_environment_that_does_not_repeat_its_answers() -> None:
    async def repeat() -> None:
        completion = Completion((5,), (-1.0,), "stop", (PolicyVersionSpan(0, 0),))
        engine = RepeatingEngine(TorchEngine(load_model("tiny-base", torch.float32), 64), 0, 1.0)
        engine.actions.append(RecordedAction((1, 2), completion))
        await engine.generate(Prompt((1, 3)), SamplingParams(), session_id="a")

    with pytest.raises(EngineError, match="beam search needs one that repeats its answers"):
        asyncio.run(repeat())


@pytest.mark.parametrize("method", ["step", "beam"])
def test_an_evaluation_compares_plain_and_guided_decoding(taskset: TaskSet, ppo: Path, method: str) -> None:
    table = evaluated(taskset, ppo, method=method, critic=str(ppo), candidates=2)
    assert set(table.cells) == {TRAINED, VALUE_GUIDED}


def test_a_wrong_critic_is_one_clear_error(ppo: Path, critic: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="name a folder with a value model"):
        load_critic(str(tmp_path))
    larger = Qwen2ForCausalLM(Qwen2Config(vocab_size=5000, hidden_size=32, num_attention_heads=2, num_hidden_layers=1))
    with pytest.raises(InvalidInput, match=r"knows \d+ tokens of the policy's 5000"):
        open_critic(DecodeConfig(method="step", critic=str(critic)), larger)
    damaged = Path(shutil.copytree(ppo, tmp_path / "damaged"))
    (list_checkpoints(damaged)[0] / "trainer.safetensors").write_bytes(b"nothing")
    with pytest.raises(InvalidInput, match="whose critic fails with: SafetensorError"):
        load_critic(str(damaged))
    shutil.rmtree(damaged / "checkpoints")
    with pytest.raises(InvalidInput, match="no checkpoint with a critic"):
        load_critic(str(damaged))


def test_settings_that_contradict_each_other_are_refused() -> None:
    def resolved(**decode: Any) -> None:
        resolve(EvalConfig, [Layer("test", {f"decode.{name}": value for name, value in decode.items()})])

    with pytest.raises(InvalidInput, match=r"give decode\.critic"):
        resolved(method="step")
    with pytest.raises(InvalidInput, match="have an effect only with"):
        resolved(candidates=8)
    resolved(**DecodeConfig().model_dump())  # as a run records its settings
    with pytest.raises(InvalidInput, match=r"give a multiple of decode\.beams"):
        resolved(method="beam", critic="a", candidates=5)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
