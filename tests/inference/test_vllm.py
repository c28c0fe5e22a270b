"""The client of a vLLM server: answers that contradict themselves, and the weights that are written for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from inference.fake_vllm import FakeVllm, Fault
from inference.server_backends import PROMPT, serve
from safetensors.torch import save_file

from agent_r1.core.inference import Completion, SamplingParams, WeightUpdate
from agent_r1.inference.canary import PROMPT_LENGTH, compute_canary
from agent_r1.inference.server_process import ReplicaError
from agent_r1.inference.vllm import VllmEngine
from agent_r1.inference.vllm_worker.agent_r1_weights import CHECKSUM, ReadWeights, folder_checksum
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


@pytest.mark.parametrize("fault", [Fault.OLD_WEIGHTS, Fault.HALF_OF_WEIGHTS])
def test_a_server_that_loads_other_weights_is_found_by_its_checksum_where_log_probabilities_are_rounded(
    versions: list[WeightUpdate], fault: Fault
) -> None:
    async def update(engine: VllmEngine, server: FakeVllm) -> None:
        await engine.update_weights(versions[1])

    serve(versions, update, fault, dtype="bfloat16")  # the change is smaller than the rounding
    serve(versions, update, dtype="bfloat16", reports_checksums=True)
    with pytest.raises(ReplicaError, match=r"it loaded other weights than those in .*version-1"):
        serve(versions, update, fault, dtype="bfloat16", reports_checksums=True)


def test_a_folder_has_the_checksum_of_its_tensors(versions: list[WeightUpdate], tmp_path: Path) -> None:
    folders = [Path(str(update.handle)) for update in versions]
    checksums = [(folder / CHECKSUM).read_text("ascii") for folder in folders]
    assert checksums == [folder_checksum(folder) for folder in folders] and len(set(checksums)) == 2
    tensors = dict(ReadWeights(folders[0]))
    save_file(dict(list(tensors.items())[::2]), tmp_path / "one.safetensors")
    save_file(dict(list(tensors.items())[1::2]), tmp_path / "two.safetensors")
    assert folder_checksum(tmp_path) == checksums[0]
    for change in (
        {"other": tensors["lm_head.weight"].clone()},
        {"lm_head.weight": tensors["lm_head.weight"].bfloat16()},
    ):
        save_file(tensors | change, tmp_path / "one.safetensors")
        assert folder_checksum(tmp_path) != checksums[0]


def test_a_head_tied_to_the_embeddings_is_written_as_a_tensor_of_its_own(versions: list[WeightUpdate]) -> None:
    model = load_model(str(versions[0].handle), torch.float32)
    assert not model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert compute_canary(model) == versions[0].canary and len(versions[0].canary[0].token_ids) == PROMPT_LENGTH
