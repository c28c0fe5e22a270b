"""The client of a vLLM server: answers that contradict themselves, and the weights that are written for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inference.fake_vllm import FakeVllm
from inference.server_backends import PROMPT, serve

from agent_r1.core.inference import Completion, SamplingParams, WeightUpdate
from agent_r1.inference.canary import PROMPT_LENGTH, compute_canary
from agent_r1.inference.server_process import ReplicaError
from agent_r1.inference.vllm import VllmEngine
from agent_r1.model.load import load_model


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"logprobs": {"content": [{"token_id": 5, "logprob": -0.5}]}}, "do not belong together"),
        ({"logprobs": {"content": [{"token_id": 4, "logprob": 0.5}]}}, "positive or not finite"),
        ({"token_ids": [], "logprobs": None}, "ended with 'length' and without tokens"),
        ({"weight_versions": []}, "does not state which weights sampled each token"),
        (
            {"weight_versions": [{"version": "default", "start": 0, "end": 1}]},
            "serves the weights 'default', which this run did not send",
        ),
        ({"finish_reason": None}, "its answer is not vLLM's"),
    ],
)
def test_an_answer_that_contradicts_itself_is_a_failure_of_the_server(
    versions: list[WeightUpdate], choice: dict[str, Any], reason: str
) -> None:
    async def use(engine: VllmEngine, server: FakeVllm) -> Completion:
        right = {
            "token_ids": [4],
            "finish_reason": "length",
            "logprobs": {"content": [{"token_id": 4, "logprob": -0.5}]},
            "weight_versions": [{"version": "0", "start": 0, "end": 1}],
        }
        server.generate = lambda body: (200, {"choices": [right | choice]})  # type: ignore[method-assign]
        return await engine.generate(PROMPT, SamplingParams(max_tokens=1))

    with pytest.raises(ReplicaError, match=reason):
        serve(versions, use)


def test_an_update_fails_if_the_server_does_not_say_whether_it_reset_its_cache(versions: list[WeightUpdate]) -> None:
    async def use(engine: VllmEngine, server: FakeVllm) -> None:
        answer = server.answer
        server.answer = lambda path, *rest: (  # type: ignore[method-assign]
            (200, b"<html>") if path == "/reset_prefix_cache" else answer(path, *rest)
        )
        await engine.update_weights(versions[1])

    with pytest.raises(ReplicaError, match="its answer is not vLLM's"):
        serve(versions, use)


def test_a_head_tied_to_the_embeddings_is_written_as_a_tensor_of_its_own(versions: list[WeightUpdate]) -> None:
    model = load_model(str(versions[0].handle), torch.float32)
    assert not model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert compute_canary(model) == versions[0].canary and len(versions[0].canary[0].token_ids) == PROMPT_LENGTH
