"""An update that shares prefixes gives the same metrics and weights, and reads fewer tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learning_fixtures import SYSTEM
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel
from updating import make_updater, update

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.errors import InvalidInput
from agent_r1.model.adapter import add_adapter
from agent_r1.model.config import LoraConfig
from agent_r1.trainer import single_process
from agent_r1.trainer.updater import PolicyUpdater, UpdateReport

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name of the case: algorithm, its settings, settings of the trainer
    "one pass": ("grpo", {}, {}),
    "several steps and small micro-batches": (
        "dr-grpo",
        {"kl.coefficient": 0.1, "entropy_coef": 0.01, "epochs": 2},
        {"minibatches": 2, "micro_tokens": 200},
    ),
    "whole trajectories": ("gspo", {"epochs": 2}, {}),
    "a critic": ("ppo", {"epochs": 2}, {"critic_epochs": 2, "critic_minibatches": 2}),
    "bfloat16": ("ppo", {}, {"dtype": "bfloat16", "activation_checkpointing": True}),
    "an adapter": ("ppo", {"kl.coefficient": 0.1}, {"lora": LoraConfig(rank=4)}),
}


def updater_of(make: Any, name: str, settings: dict[str, Any], config: dict[str, Any], share: str) -> PolicyUpdater:
    model = make.model()
    if "lora" in config:
        model = add_adapter(model, config["lora"], seed=0, base="base")
    rates = {"learning_rate": 1e-3, "critic_learning_rate": 1e-3}
    return make_updater(model, build_algorithm(name, settings), share_prefixes=share, **rates, **config)


def two_updates(make: Any, case: str, share: str) -> tuple[list[UpdateReport], dict[str, Tensor]]:
    """Return the reports of two updates, and Adam's first moments, which are means of the gradients."""
    updater = updater_of(make, *CASES[case], share)
    reports = [update(updater, make.prompted_groups(4)) for _ in range(2)]
    return reports, {name: moment for name, moment in updater.state().tensors.items() if name.endswith("exp_avg")}


@pytest.mark.parametrize("case", CASES)
def test_metrics_and_moments_are_those_of_an_update_without_sharing(case: str, make: Any) -> None:
    tolerance = 0.1 if case == "bfloat16" else 1e-3
    (plain, moments), (shared, shared_moments) = (two_updates(make, case, share) for share in ("off", "on"))
    for one, other in zip(plain, shared, strict=True):
        assert other.metrics["model_tokens"] < 0.8 * one.metrics["model_tokens"]
        assert [outcome.attempt for outcome in one.outcomes] == [outcome.attempt for outcome in other.outcomes]
        assert one.metrics.keys() == other.metrics.keys()
        for name in one.metrics.keys() - {"model_tokens", "padding"}:
            expected = pytest.approx(one.metrics[name], rel=tolerance, abs=tolerance, nan_ok=True)
            assert other.metrics[name] == expected, name
    scale = max(float(tensor.abs().max()) for tensor in moments.values())
    for name, tensor in moments.items():
        assert torch.allclose(shared_moments[name], tensor, rtol=0, atol=tolerance * scale), name


def test_small_models_share_nothing_unless_told_and_large_models_do(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(share: str) -> float:
        return update(updater_of(make, *CASES["one pass"], share), make.prompted_groups(4)).metrics["model_tokens"]

    assert tokens("auto") == tokens("off") > tokens("on")
    monkeypatch.setattr(single_process, "LARGE_MODEL", 0)
    assert tokens("auto") == tokens("on")


def sliding() -> PreTrainedModel:
    config = MistralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    return MistralForCausalLM(config)


def dynamic() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_models_that_cannot_share_are_refused_or_share_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"share_prefixes: got on; leave it out: MistralForCausalLM has windows"):
        make_updater(sliding(), share_prefixes="on")
    with pytest.raises(InvalidInput, match="LlamaForCausalLM has position embeddings that depend on the length"):
        make_updater(dynamic(), share_prefixes="on")
    with pytest.raises(InvalidInput, match="the critic reads log-probabilities"):
        make_updater(make.model(), "ppo", share_prefixes="on", critic_reads_logprobs=True)
    monkeypatch.setattr(single_process, "LARGE_MODEL", 0)
    groups = make.prompted_groups(4)
    for model in (sliding, dynamic):
        alone = update(make_updater(model(), share_prefixes="off"), groups).metrics["model_tokens"]
        assert update(make_updater(model()), groups).metrics["model_tokens"] == alone


def test_memory_that_runs_out_leads_to_smaller_trees(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = list[int]()
    forward = single_process.forward_backward

    def limited(models: Any, *arguments: Any) -> Any:
        largest.append(models.micro_tokens)
        if models.micro_tokens > 200:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(models, *arguments)

    whole = update(updater_of(make, *CASES["one pass"], "on"), make.prompted_groups(4))
    monkeypatch.setattr(single_process, "forward_backward", limited)
    halved = update(updater_of(make, *CASES["one pass"], "on"), make.prompted_groups(4))
    assert len(largest) > 1 and len(SYSTEM) < halved.micro_tokens <= 200
    assert halved.metrics["policy_gradient_norm"] == pytest.approx(whole.metrics["policy_gradient_norm"], rel=1e-3)
