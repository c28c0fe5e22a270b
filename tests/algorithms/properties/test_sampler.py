"""P11: the trainer computes the log-probabilities that the sampler recorded, so that first ratios are 1."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import strategies as st
from ragged import TOKENS
from searching import holds, rejected
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.core.inference import Prompt, SamplingParams
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Group, Status, Trajectory, Turn
from agent_r1.data.batch import TrainingSample, assemble_batch, select_trainable
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.trainer.forward_backward import ModelSet, forward_backward
from agent_r1.trainer.protocol import PreparedBatch

MAX_GAP = 1e-5
Observations = Sequence[Sequence[tuple[int, ...]]]
"""For each episode the observation before each of its turns."""
ModelSetFn = Callable[[PreTrainedModel, float], ModelSet]
"""(the sampler's model, its temperature) -> the trainer's models."""

OBSERVATIONS = st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=4)
TEMPERATURES = st.sampled_from([0.6, 1.0, 1.5])


@pytest.fixture(scope="module")
def policy() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM(config).eval()


async def _episode(
    engine: TorchEngine, observations: Sequence[tuple[int, ...]], member: int, temperature: float
) -> Trajectory:
    turns: list[Turn] = []
    state: tuple[int, ...] = ()
    for index, new in enumerate(observations):
        state += new
        sampling = SamplingParams(temperature, max_tokens=3 + member, stop_token_ids=(3,), seed=10 * member + index)
        completion = await engine.generate(Prompt(state), sampling, session_id=f"episode {member}")
        state += completion.token_ids
        action = Action(Message.assistant(""), "")
        parent = index - 1 if index else None
        turns.append(
            Turn(
                index,
                parent,
                new,
                completion.token_ids,
                completion.logprobs,
                completion.version_spans,
                completion.finish_reason,
                action,
            )
        )
    score = {"score": float(member % 2)}
    return Trajectory(AttemptId("run", "task", 0, member), "task", tuple(turns), Status.COMPLETED, rewards=score)


def sampled_episodes(
    policy: PreTrainedModel, observations: Observations, temperature: float
) -> tuple[TrainingSample, ...]:
    """Sample the episodes concurrently, each in a session that keeps its KV cache between turns."""

    async def run() -> list[Trajectory]:
        engine = TorchEngine(copy.deepcopy(policy), 64, EngineConfig(max_sequences=2, kv_cache_gib=0.01))
        try:
            episodes = (_episode(engine, one, index, temperature) for index, one in enumerate(observations))
            return await asyncio.gather(*episodes)
        finally:
            await engine.close()

    return select_trainable([Group(0, Task("task", ()), tuple(asyncio.run(run())))], {}).samples


def agrees_with_the_sampler(
    make_models: ModelSetFn, policy: PreTrainedModel, observations: Observations, temperature: float
) -> None:
    batch = assemble_batch(sampled_episodes(policy, observations, temperature), pack_prefix_tree)
    models = make_models(policy, temperature)
    old = models.logprobs(batch)
    assert (old - batch.sampler_logprobs).abs().max() <= MAX_GAP
    weights = ALGORITHMS["reinforce++"].compute_token_weights(batch, ModelOutputs(reference_logprobs=old))
    for denominator, tolerance in ((None, 0.0), (old, MAX_GAP), (batch.sampler_logprobs, 2 * MAX_GAP)):
        prepared = PreparedBatch(batch, weights, ModelOutputs(), denominator)
        stats = forward_backward(models, ALGORITHMS["ppo"], prepared)
        assert (stats.ratios - 1).abs().max() <= tolerance


def ours(policy: PreTrainedModel, temperature: float) -> ModelSet:
    return ModelSet(copy.deepcopy(policy), temperature, 40)


def without_temperature(policy: PreTrainedModel, temperature: float) -> ModelSet:
    """Wrong: the trainer's logits are not divided by the sampler's temperature."""
    return ModelSet(copy.deepcopy(policy), 1.0, 40)


def one_update_ahead(policy: PreTrainedModel, temperature: float) -> ModelSet:
    """Wrong: the trainer's weights are newer than the sampler's."""
    models = ours(policy, temperature)
    with torch.no_grad():
        for parameter in models.policy.parameters():
            parameter.mul_(1.001)
    return models


def test_the_trainer_agrees_with_the_sampler(policy: PreTrainedModel) -> None:
    holds(agrees_with_the_sampler, ours, st.just(policy), OBSERVATIONS, TEMPERATURES, count=12)


@pytest.mark.parametrize("wrong", [without_temperature, one_update_ahead])
def test_disagreement_is_detected(wrong: ModelSetFn, policy: PreTrainedModel) -> None:
    rejected(agrees_with_the_sampler, wrong, st.just(policy), OBSERVATIONS, TEMPERATURES)
