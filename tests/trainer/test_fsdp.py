"""A trainer of two ranks computes what one process computes, whatever the lengths of the sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import ForkedRank
from pydantic import ValidationError
from trainer.own_components import Halved
from trainer.rank_requests import RunOutOfMemory
from transformers import PreTrainedModel
from updating import update

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.errors import InvalidInput
from agent_r1.core.trajectory import Group
from agent_r1.data.sequences import TokenSequence, by_sequence
from agent_r1.model.adapter import add_adapter
from agent_r1.model.config import LoraConfig
from agent_r1.trainer import ranks
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.forward_backward import OutOfMemory
from agent_r1.trainer.fsdp import FsdpTrainer, RankTrainer, share_blocks
from agent_r1.trainer.protocol import TrainerBackend, TrainerState
from agent_r1.trainer.ranks import RankFailed, RankGroup
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater, UpdateReport

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name of the case: algorithm, its settings, settings of the trainer
    "grpo": ("grpo", {}, {}),
    "ppo": ("ppo", {}, {"minibatches": 2}),
    "gspo": ("gspo", {"epochs": 2}, {}),
    "vapo": ("vapo", {"advantage.warmup": 1}, {"critic_epochs": 2, "critic_reads_logprobs": True}),
    "a teacher": ("grpo", {"distillation.top_k": 4}, {}),
    "a reference that follows": ("grpo", {"kl.coefficient": 0.1, "kl.sync_steps": 1, "kl.sync_alpha": 0.5}, {}),
    "an adapter": ("ppo", {"kl.coefficient": 0.1}, {"lora": LoraConfig(rank=4)}),
    "bfloat16": ("ppo", {"entropy_coef": 0.01}, {"dtype": "bfloat16", "activation_checkpointing": True}),
}
EXACT = ("grpo", "ppo", "gspo", "vapo")
"""Cases without a reference in float32, whose rounding errors Adam makes as large as other gradients."""


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup[RankTrainer]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "start_process", ForkedRank)
        with closing(RankGroup[RankTrainer](2, "cpu")) as started:
            yield started


def updater_of(make: Any, case: str, group: RankGroup[RankTrainer] | None) -> PolicyUpdater:
    """Return an updater whose trainer has the ranks of ``group``, or runs in this process."""
    name, settings, trainer = CASES[case]
    algorithm = build_algorithm(name, settings)
    config = TrainerConfig(learning_rate=1e-2, critic_learning_rate=1e-2, micro_tokens=60, **trainer)
    # float64 shows that differences are rounding errors; adapters and bfloat16 have other types
    model: PreTrainedModel = make.model() if {"lora", "dtype"} & trainer.keys() else make.exact_model()
    if "lora" in trainer:
        model = add_adapter(model, config.lora, seed=0, base="base")
    teacher = make.exact_model(seed=1) if "teacher" in algorithm.needs else None
    torch.manual_seed(5)  # of new weights of a critic
    made: TrainerBackend
    if group is None:
        made = SingleProcessTrainer(model, algorithm, config, temperature=0.7, teacher=teacher)
    else:
        made = FsdpTrainer(group, model, algorithm, config, temperature=0.7, teacher=teacher)
    return PolicyUpdater(made, algorithm, config, reward_weights={}, seed=0, steps=1000)


def weights_of(updater: PolicyUpdater) -> dict[str, torch.Tensor]:
    handle = updater.publish().handle
    assert isinstance(handle, PreTrainedModel)
    return {name: tensor.detach().clone() for name, tensor in handle.state_dict().items()}


def mean_gradient(state: TrainerState, module: str) -> torch.Tensor:
    """Return the optimizer's means of the gradients of the policy or of the critic, as one vector."""
    prefix = f"optimizer.{module}."
    names = sorted(name for name in state.tensors if name.startswith(prefix) and name.endswith("exp_avg"))
    return torch.cat([state.tensors[name].flatten() for name in names])


def assert_equal_metrics(
    found: UpdateReport, expected: UpdateReport, tolerance: float, of_norms: float | None = None
) -> None:
    assert found.metrics.keys() == expected.metrics.keys()
    for name in expected.metrics.keys() - {"padding"}:
        allowed = of_norms if of_norms is not None and name.endswith("gradient_norm") else tolerance
        near = pytest.approx(expected.metrics[name], rel=allowed, abs=allowed, nan_ok=True)
        assert found.metrics[name] == near, name
    assert [outcome.attempt for outcome in found.outcomes] == [outcome.attempt for outcome in expected.outcomes]


@pytest.mark.parametrize("case", [case for case in CASES if case != "grpo"])
def test_two_ranks_give_the_loss_the_gradient_and_the_weights_of_one_process(
    case: str, make: Any, group: RankGroup[RankTrainer]
) -> None:
    is_rounded = case == "bfloat16"  # numbers of 8 bits; gradients are sums with much cancellation
    tolerance, gradient_tolerance = (5e-3, 0.1) if is_rounded else (1e-6, 5e-6)
    alone, ranked = updater_of(make, case, None), updater_of(make, case, group)
    began = weights_of(alone)
    for seed in range(2):
        expected, found = (update(updater, make.random_groups(seed)) for updater in (alone, ranked))
        assert_equal_metrics(found, expected, tolerance, gradient_tolerance if is_rounded else None)
    assert expected.metrics["policy_gradient_norm"] > 1e-3
    state, ranked_state = alone.state(), ranked.state()
    assert ranked_state.tensors.keys() == state.tensors.keys()
    for module in {name.split(".")[1] for name in state.tensors if name.endswith("exp_avg")}:
        means, ranked_means = (mean_gradient(one, module) for one in (state, ranked_state))
        assert 0 < means.norm() < math.inf, module
        assert (ranked_means - means).norm() <= gradient_tolerance * means.norm(), module
    if case in EXACT:
        weights, ranked_weights = weights_of(alone), weights_of(ranked)
        assert all(torch.allclose(ranked_weights[name], weights[name], rtol=0, atol=1e-6) for name in weights)
        assert any(not torch.allclose(weights[name], began[name], atol=1e-3) for name in weights)  # control


def one_attempt(make: Any) -> list[Group]:
    """Return a group of which only one attempt has tokens."""
    attempts = [make.trajectory(make.chain(([1, 2], [3, 4, 5])), {"score": 1.0}, member=0)]
    return make.groups(*attempts)


CONTINUED = [("ppo", 1, 2), ("a reference that follows", 2, 1)]
"""Cases of trainers, with their number of ranks before and after the state is saved."""

SINGLE: dict[str, dict[str, Any]] = {
    # algorithms whose gradient is not 0 if the group has one attempt with tokens: the others compare attempts
    "gspo": {"advantage": "success", "epochs": 2},
    "ppo": {},
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_rank_without_sequences_takes_part(name: str, make: Any, group: RankGroup[RankTrainer]) -> None:
    algorithm, config = build_algorithm(name, SINGLE[name]), TrainerConfig(learning_rate=1e-2)
    reports = []
    for trainer in (
        SingleProcessTrainer(make.exact_model(), algorithm, config, temperature=0.7),
        FsdpTrainer(group, make.exact_model(), algorithm, config, temperature=0.7),
    ):
        updater = PolicyUpdater(trainer, algorithm, config, reward_weights={}, seed=0, steps=10)
        reports.append(update(updater, one_attempt(make)))
    assert max(value for key, value in reports[0].metrics.items() if key.endswith("gradient_norm")) > 1e-3
    assert_equal_metrics(reports[1], reports[0], 1e-6)


def test_ranks_find_components_of_a_users_own(make: Any, group: RankGroup[RankTrainer]) -> None:
    algorithm = build_algorithm("grpo", {}).model_copy(update={"name": "mine", "loss": Halved()})
    trainer = FsdpTrainer(group, make.exact_model(), algorithm, TrainerConfig(), temperature=0.7)
    updater = PolicyUpdater(trainer, algorithm, TrainerConfig(), reward_weights={}, seed=0, steps=10)
    halved, plain = (update(one, make.random_groups(0)) for one in (updater, updater_of(make, "grpo", None)))
    assert halved.metrics["policy_gradient_norm"] == pytest.approx(plain.metrics["policy_gradient_norm"] / 2)


@pytest.mark.parametrize(("case", "before", "after"), CONTINUED)
def test_a_state_continues_with_another_number_of_ranks(
    case: str, before: int, after: int, make: Any, group: RankGroup[RankTrainer], tmp_path: Path
) -> None:
    updater = updater_of(make, case, group if before == 2 else None)
    update(updater, make.random_groups(0))
    weights, state = weights_of(updater), updater.state(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"trainer-0000{rank}-of-00002.safetensors" for rank in range(1, before + 1) if before == 2]
    expected = update(updater, make.random_groups(1))
    continued = updater_of(make, case, group if after == 2 else None)
    continued.load_weights(weights)
    continued.load_state(state)
    loaded = continued.state().tensors
    assert loaded.keys() == state.tensors.keys() and all(loaded[name].equal(state.tensors[name]) for name in loaded)
    assert all(tensor.equal(weights[name]) for name, tensor in weights_of(continued).items())
    assert_equal_metrics(update(continued, make.random_groups(1)), expected, 1e-6)


@pytest.mark.parametrize("place", ["scoring", "backward"])
def test_a_rank_without_memory_ends_all_ranks_with_advice(
    place: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "start_process", ForkedRank)
    with closing(RankGroup[RankTrainer](2, "cpu")) as group:
        updater = updater_of(make, "gspo", group)  # two epochs: a pass without a gradient comes first
        group.call(RunOutOfMemory(place))
        message = (
            r"rank 1 of the trainer, in passes of 60 tokens: CUDA out.* smaller --trainer.micro_tokens, .*--resume"
        )
        with pytest.raises(OutOfMemory, match=message) as raised:
            update(updater, make.random_groups(0))
        assert "\n" not in str(raised.value)
        with pytest.raises(RankFailed, match="have ended"):
            group.call(len)


def test_a_state_of_other_weights_is_refused(make: Any, group: RankGroup[RankTrainer]) -> None:
    updater = updater_of(make, "grpo", group)
    state = updater.state()
    update(updater, make.random_groups(0))
    with pytest.raises(InvalidInput, match="a state saved with other weights"):
        updater.load_state(state)


def test_a_loss_that_is_not_finite_changes_nothing_on_any_rank(make: Any, group: RankGroup[RankTrainer]) -> None:
    updater = updater_of(make, "grpo", group)
    began = weights_of(updater)
    broken = make.random_groups(0)
    bad = dict(began)
    name = next(name for name in bad if name.endswith("ln_f.weight"))
    bad[name] = torch.full_like(bad[name], math.inf)
    updater.load_weights(bad)
    report = update(updater, broken)
    assert all(type(outcome).__name__ == "Excluded" for outcome in report.outcomes)
    updater.load_weights(began)
    assert update(updater, broken).metrics["policy_gradient_norm"] > 0


def sequence_of(length: int) -> TokenSequence:
    none = torch.zeros(0, dtype=torch.int64)
    return TokenSequence(0, torch.zeros(length), *[none] * 7, False)


def test_sequences_are_divided_by_their_tokens() -> None:
    def lengths(count: int, *given: int) -> list[list[int]]:
        shares = share_blocks(by_sequence([sequence_of(length) for length in given]), count)
        return [[len(sequence) for block in share for sequence in block] for share in shares]

    assert lengths(2, 3, 5, 4, 3) == [[5, 3], [3, 4]]
    assert lengths(3, 7) == [[7], [], []]
    assert sorted(chain(*lengths(4, *range(1, 30)))) == list(range(1, 30))
    assert max(map(sum, lengths(4, *range(1, 30)))) <= 110  # 435 tokens


@pytest.mark.parametrize("settings", [{"share_prefixes": "on"}, {"optimizer": "adamw-8bit"}])
def test_settings_that_several_ranks_cannot_use_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"trainer\.ranks 1"):
        TrainerConfig(ranks=2, **settings)
