"""P11: the learner gives every sampled token the probability that it was sampled with, so that first ratios are 1."""

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
from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.inference import Prompt, SamplingParams
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Group, Status, Trajectory, Turn
from agent_r1.data.assemble import assemble
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.data.training_sample import TrainingSample, select_trainable
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.trainer.forward_backward import Models, Prepared, learn

LARGEST_GAP = 1e-5
Heard = Sequence[Sequence[tuple[int, ...]]]
"""For each episode, what the policy hears before each of its turns."""
Trainer = Callable[[PreTrainedModel, float], Models]
"""(the sampler's model, its temperature) -> the models that learn."""

HEARD = st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=4)
TEMPERATURES = st.sampled_from([0.6, 1.0, 1.5])


@pytest.fixture(scope="module")
def policy() -> PreTrainedModel:
    """A Qwen2 in fp32 with opinions."""
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
    engine: TorchEngine, heard: Sequence[tuple[int, ...]], member: int, temperature: float
) -> Trajectory:
    turns: list[Turn] = []
    state: tuple[int, ...] = ()
    for index, new in enumerate(heard):
        state += new
        sampling = SamplingParams(temperature, max_tokens=3 + member, stop_token_ids=(3,), seed=10 * member + index)
        done = await engine.generate(Prompt(state), sampling, session_id=f"episode {member}")
        state += done.token_ids
        said = Action(Message.assistant(""), "")
        parent = index - 1 if index else None
        turns.append(
            Turn(index, parent, new, done.token_ids, done.logprobs, done.version_spans, done.finish_reason, said)
        )
    score = {"score": float(member % 2)}
    return Trajectory(AttemptId("run", "task", 0, member), "task", tuple(turns), Status.COMPLETED, rewards=score)


def lived(policy: PreTrainedModel, heard: Heard, temperature: float) -> tuple[TrainingSample, ...]:
    """The episodes side by side, each in a session that keeps its keys and values between turns."""

    async def together() -> list[Trajectory]:
        engine = TorchEngine(copy.deepcopy(policy), 64, EngineConfig(max_sequences=2, kv_cache_gib=0.01))
        try:
            return await asyncio.gather(*(_episode(engine, one, i, temperature) for i, one in enumerate(heard)))
        finally:
            await engine.close()

    return select_trainable([Group(0, Task("task", ()), tuple(asyncio.run(together())))], {}).samples


def the_learner_agrees_with_the_sampler(
    trainer: Trainer, policy: PreTrainedModel, heard: Heard, temperature: float
) -> None:
    batch = assemble(lived(policy, heard, temperature), pack_prefix_tree)
    models = trainer(policy, temperature)
    before = models.logprobs(batch)
    assert (before - batch.sampler_logprobs).abs().max() <= LARGEST_GAP
    credit = ALGORITHMS["reinforce++"].credit(batch, ModelOutputs(reference=before))
    for old, tolerance in ((None, 0.0), (before, LARGEST_GAP), (batch.sampler_logprobs, 2 * LARGEST_GAP)):
        seen = learn(models, ALGORITHMS["ppo"], Prepared(batch, credit, ModelOutputs(), old), batch.sequences, 1.0)
        assert (seen.ratios - 1).abs().max() <= tolerance


def ours(policy: PreTrainedModel, temperature: float) -> Models:
    return Models(copy.deepcopy(policy), temperature, 40)


def without_temperature(policy: PreTrainedModel, temperature: float) -> Models:
    """Wrong: the learner's logits are not divided by the sampler's temperature."""
    return Models(copy.deepcopy(policy), 1.0, 40)


def ahead(policy: PreTrainedModel, temperature: float) -> Models:
    """Wrong: the sampler was left behind by an update."""
    models = ours(policy, temperature)
    with torch.no_grad():
        for parameter in models.policy.parameters():
            parameter.mul_(1.001)
    return models


def test_the_learner_agrees_with_the_sampler(policy: PreTrainedModel) -> None:
    holds(the_learner_agrees_with_the_sampler, ours, st.just(policy), HEARD, TEMPERATURES, count=12)


@pytest.mark.parametrize("wrong", [without_temperature, ahead])
def test_disagreement_is_seen(wrong: Trainer, policy: PreTrainedModel) -> None:
    rejected(the_learner_agrees_with_the_sampler, wrong, st.just(policy), HEARD, TEMPERATURES)
