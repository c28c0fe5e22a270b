"""For large models on a CPU, PyTorch computes only new chunks, with the same bits as alone."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from agent_r1.core.inference import Completion, Prompt, SamplingParams
from agent_r1.inference import model_runner
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.model_runner import ModelRunner
from agent_r1.inference.torch_engine import TorchEngine

Turns = list[tuple[tuple[int, ...], Completion]]
OBSERVATION = (8, 9, 10, 11)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "LARGE_MODEL", 0)


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts, prefill = list[int](), ModelRunner.prefill

    def count_tokens(runner: ModelRunner, chunks: Any) -> None:
        counts.extend(len(chunk.token_ids) for chunk in chunks if chunk.token_ids)
        prefill(runner, chunks)

    monkeypatch.setattr(ModelRunner, "prefill", count_tokens)
    return counts


def converse(model: PreTrainedModel, sessions: Sequence[tuple[tuple[int, ...], int]], turns: int = 3) -> list[Turns]:
    """Run conversations at the same time. Each has a prompt and a seed; the same tokens follow each action."""

    async def one(engine: TorchEngine, name: int, state: tuple[int, ...], seed: int) -> Turns:
        out: Turns = []
        for turn in range(turns):
            params = SamplingParams(0.7, max_tokens=3 + (seed + turn) % 8, seed=100 * seed + turn)
            done = await engine.generate(Prompt(state), params, session_id=str(name))
            out.append((state, done))
            state = (*state, *done.token_ids, *OBSERVATION)
        return out

    async def run() -> list[Turns]:
        engine = TorchEngine(copy.deepcopy(model), 512, EngineConfig(max_sequences=64, decode_step="torch"))
        done = await asyncio.gather(*(one(engine, name, *session) for name, session in enumerate(sessions)))
        await engine.close()
        return list(done)

    return asyncio.run(run())


def prompt(length: int) -> tuple[int, ...]:
    return tuple((7 * place + length) % 50 for place in range(length))


def test_a_conversation_alone_has_the_bits_of_one_among_others(tiny_model: PreTrainedModel) -> None:
    sessions = [(prompt(1 + 11 * number % 400), number) for number in range(40)]
    together = converse(tiny_model, sessions)
    assert [converse(tiny_model, sessions[alone : alone + 1])[0] for alone in (13, 39)] == [together[13], together[39]]


@torch.no_grad()
def test_log_probabilities_are_those_of_a_plain_forward_pass(tiny_model: PreTrainedModel) -> None:
    for turns in converse(tiny_model, [(prompt(5 + 90 * number), number) for number in range(4)]):
        for state, done in turns:
            logits = tiny_model(torch.tensor([state + done.token_ids])).logits[0, len(state) - 1 : -1] / 0.7
            expected = logits.log_softmax(-1)[torch.arange(len(done.token_ids)), torch.tensor(done.token_ids)]
            assert torch.allclose(torch.tensor(done.logprobs), expected, atol=1e-5)


def test_a_continuation_that_another_session_has_too_is_computed_once(
    tiny_model: PreTrainedModel, prefilled: list[int]
) -> None:
    sessions = [(prompt(100), seed) for seed in (0, 0, 0, 1)]
    together = converse(tiny_model, sessions)
    _probe, *counts = prefilled
    # the prompt once; then, for the equal sessions and for the other one, two observations. The last token of an action
    # is prefilled with the observation after it, whose own last token is not.
    assert counts[0] == 99 and counts[1:] == [4] * 4
    prefilled.clear()
    assert together == [converse(tiny_model, [session])[0] for session in sessions]
    assert together[0] == together[1] != together[3]
