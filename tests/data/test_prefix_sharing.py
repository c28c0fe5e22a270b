"""Prefixes that several attempts share are computed once, with equal loss and gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from learning import backward, model_outputs
from learning_fixtures import SYSTEM, Make
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.loss_terms import Kl
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.core.trajectory import Group
from agent_r1.data.batch import TrainingBatch, assemble_batch, select_trainable
from agent_r1.data.sequences import (
    Packing,
    PrefixSharing,
    TokenSequence,
    by_sequence,
    common_prefix,
    merge_sequences,
    pack_per_turn,
    pack_prefix_tree,
    plan_passes,
)
from agent_r1.model.forward import PrefixStates, use_tree_attention
from agent_r1.model.value_head import build_value_model
from agent_r1.trainer.forward_backward import ModelSet, forward_backward
from agent_r1.trainer.protocol import MODULES, Module, PassStats, PreparedBatch

SHARING = {
    "in micro-batches": PrefixSharing(width=1000, across_micro_batches=False),
    "across micro-batches": PrefixSharing(width=1000, across_micro_batches=True),
    "by parts": PrefixSharing(width=1000, across_micro_batches=True, by_parts=True),
}
REGULARIZED = Algorithm(
    name="regularized", advantage=ALGORITHMS["grpo"].advantage, kl=Kl(coefficient=0.1), entropy_coef=0.01
)


def tiny_llama(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def one_pass(
    algorithm: Algorithm,
    groups: Sequence[Group],
    models: ModelSet,
    modules: frozenset[Module] = MODULES,
    packing: Packing = pack_prefix_tree,
) -> tuple[PassStats, ModelOutputs, dict[str, Tensor]]:
    """Return the statistics and the gradient of one update, and what the models computed before it."""
    if models.sharing is not None and models.sharing.by_parts:
        critic = None if models.critic is None else models.critic.backbone
        used = [model for model in (models.policy, models.reference, models.teacher, critic) if model is not None]
        assert all(use_tree_attention(model) for model in used)
    batch = assemble_batch(select_trainable(groups, {}).samples, packing, algorithm.token_scope)
    noise = torch.randn(len(batch.ids), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    old = models.logprobs(batch) + 0.3 * noise
    outputs = model_outputs(models, batch, old)
    weights = algorithm.compute_token_weights(batch, outputs, kl_coef=0.5)
    trained = {"policy": models.policy, **({} if models.critic is None else {"critic": models.critic})}
    for module in trained.values():
        module.zero_grad()
    stats = forward_backward(models, algorithm, PreparedBatch(batch, weights, outputs, old), modules=modules)
    gradients = {f"{key}.{name}": p.grad for key, module in trained.items() for name, p in module.named_parameters()}
    return stats, outputs, {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}


def exact_models(make: Make, algorithm: Algorithm, micro_tokens: int = 10_000) -> ModelSet:
    critic = build_value_model(make.exact_model()) if "critic" in algorithm.needs else None
    if critic is not None:
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    policy, reference, teacher = map(make.exact_model, range(3))
    return ModelSet(policy, 0.7, micro_tokens, critic, reference, teacher)


def by_token(stats: PassStats, values: Tensor) -> Tensor:
    return values[stats.tokens.argsort()]


def assert_equal(one: Any, other: Any, tolerance: float) -> None:
    """Check that two results of :func:`one_pass` are equal up to rounding."""
    (stats, outputs, gradients), (found, found_outputs, found_gradients) = one, other
    assert torch.allclose(stats.loss, found.loss, rtol=tolerance, atol=tolerance)
    assert torch.equal(stats.tokens.sort().values, found.tokens.sort().values)  # no token is lost
    for column in ("logprobs", "ratios", "entropy"):
        expected, values = by_token(stats, getattr(stats, column)), by_token(found, getattr(found, column))
        assert torch.allclose(values, expected, rtol=tolerance, atol=tolerance), column
    assert stats.metrics.keys() == found.metrics.keys()
    for name, value in stats.metrics.items():
        assert torch.allclose(found.metrics[name], value, rtol=tolerance, atol=tolerance), name
    for name in ("reference_logprobs", "teacher_logprobs", "entropy"):
        if (values := getattr(outputs, name)) is not None:
            assert torch.allclose(getattr(found_outputs, name), values, atol=tolerance), name
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert gradients.keys() == found_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(found_gradients[name], gradient, rtol=0, atol=tolerance * scale), name


@pytest.mark.parametrize(
    ("sharing", "micro_tokens"),
    [("in micro-batches", 10_000), ("across micro-batches", 250), ("by parts", 10_000), ("by parts", 250)],
)
@pytest.mark.parametrize(
    "algorithm",
    [REGULARIZED, *(ALGORITHMS[name] for name in ("ppo", "gspo", "top-k-distillation"))],
    ids=lambda algorithm: algorithm.name,
)
def test_shared_prefixes_change_neither_loss_nor_gradient_nor_metrics(
    algorithm: Algorithm, micro_tokens: int, sharing: str, make: Make
) -> None:
    models, groups = exact_models(make, algorithm, micro_tokens), make.prompted_groups(4)
    plain = one_pass(algorithm, groups, models)
    shared = one_pass(algorithm, groups, replace(models, sharing=SHARING[sharing]))
    assert_equal(plain, shared, 1e-9)
    assert shared[0].num_tokens < 0.7 * plain[0].num_tokens


@pytest.mark.parametrize("sharing", ["across micro-batches", "by parts"])
@pytest.mark.parametrize("size", [4, 32])
def test_groups_of_any_size_have_the_gradient_of_separate_sequences(size: int, sharing: str, make: Make) -> None:
    models = ModelSet(tiny_llama(0), 0.7, 10_000)
    groups = make.prompted_groups(size)
    plain = one_pass(ALGORITHMS["grpo"], groups, models)
    shared = one_pass(ALGORITHMS["grpo"], groups, replace(models, sharing=SHARING[sharing]))
    assert_equal(plain, shared, 1e-6)  # RMS norms compute in float32


def test_a_prefix_without_its_backward_pass_is_detected(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModelSet(make.exact_model(), 0.7, 10_000)
    groups = make.prompted_groups(4)
    plain = one_pass(ALGORITHMS["grpo"], groups, models)
    monkeypatch.setattr(PrefixStates, "backward", lambda _: None)
    shared = one_pass(ALGORITHMS["grpo"], groups, replace(models, sharing=SHARING["across micro-batches"]))
    with pytest.raises(AssertionError):
        assert_equal(plain, shared, 1e-4)


def attempts_after_a_prompt(make: Make, size: int, groups: int, action: int = 32) -> TrainingBatch:
    """Return ``groups`` groups of ``size`` attempts: a prompt of 512 tokens, then ``action`` tokens that differ."""
    prompts = [[(place + group) % 16 for place in range(512)] for group in range(groups)]
    trajectories = (
        make.trajectory(
            [make.turn(0, prompt, [member, *[5] * (action - 1)])], {"score": float(member)}, group=group, member=member
        )
        for group, prompt in enumerate(prompts)
        for member in range(size)
    )
    return assemble_batch(select_trainable(make.groups(*trajectories), {}).samples, pack_prefix_tree)


def tokens_read(batch: TrainingBatch, sharing: PrefixSharing | None, max_tokens: int = 16_384) -> int:
    prefix, micro_batches = plan_passes(by_sequence(batch.sequences), max_tokens, sharing)
    return len(prefix) + sum(micro.num_tokens for micro in micro_batches)


@pytest.mark.parametrize(("size", "separate", "shared"), [(4, 2176, 640), (64, 34816, 2560)])
def test_the_prompt_of_a_group_is_read_once(size: int, separate: int, shared: int, make: Make) -> None:
    batch = attempts_after_a_prompt(make, size, groups=2)
    assert tokens_read(batch, None) == 2 * separate
    for sharing in SHARING.values():
        assert tokens_read(batch, sharing) == 2 * shared


def test_a_merged_sequence_costs_less_than_its_parts(make: Make) -> None:
    long_answers = attempts_after_a_prompt(make, 4, groups=1, action=1700)
    wide, narrow = (PrefixSharing(width, across_micro_batches=False) for width in (100_000, 100))
    assert tokens_read(long_answers, narrow) == tokens_read(long_answers, None)  # attention would cost more
    assert tokens_read(long_answers, wide) == 2 * (512 + 2 * 1700)  # two trees: three attempts exceed MAX_TREE
    short = attempts_after_a_prompt(make, 4, groups=1)
    assert tokens_read(short, wide) == 640
    assert tokens_read(short, wide, max_tokens=600) == 2 * (512 + 2 * 32)
    assert tokens_read(short, wide, max_tokens=1) == tokens_read(short, None)
    by_parts = replace(narrow, by_parts=True)
    assert tokens_read(long_answers, by_parts) == 512 + 4 * 1700  # one tree: no score is computed in vain


def chain(*ids: int, predicts: int = 1) -> TokenSequence:
    """Return a causal sequence that predicts its last ``predicts`` tokens."""
    length = len(ids)
    predicted = torch.arange(length - predicts, length)
    return TokenSequence(
        0, torch.tensor(ids), torch.arange(length), torch.full((length,), length), predicted - 1, predicted,
        predicted, predicted[-1:], torch.tensor([0]), False,
    )  # fmt: skip


def test_equal_tokens_with_equal_paths_are_merged() -> None:
    merged = merge_sequences([chain(5, 6, 7, 8), chain(5, 6, 9), chain(5, 6, 7, 8)])
    assert merged.ids.tolist() == [5, 6, 7, 8, 9]
    assert merged.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert merged.subtree_end.tolist() == [5, 5, 4, 4, 5]
    assert merged.logit_positions.tolist() == [2, 1, 2] and merged.token_positions.tolist() == [3, 4, 3]
    assert merged.tokens.tolist() == [3, 2, 3] and merged.has_branches
    assert not merge_sequences([chain(5, 6), chain(5, 6, 7)]).has_branches


def path_to(sequence: TokenSequence, place: int) -> list[int]:
    """Return the tokens that the token at ``place`` attends to."""
    return [int(sequence.ids[j]) for j in range(place + 1) if place < sequence.subtree_end[j]]


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_every_token_keeps_its_path(rows: list[list[int]], parts: int) -> None:
    chains = [chain(*row) for row in rows]
    trees = [merge_sequences(chains[first::parts]) for first in range(min(parts, len(chains)))]
    merged = merge_sequences(trees)  # trees can be merged again
    expected = [path_to(one, int(place)) for one in trees for place in one.token_positions]
    assert [path_to(merged, int(place)) for place in merged.token_positions] == expected
    before = [path_to(one, int(place)) for one in trees for place in one.logit_positions]
    assert [path_to(merged, int(place)) for place in merged.logit_positions] == before
    assert len({tuple(path_to(merged, place)) for place in range(len(merged))}) == len(merged)  # each path once


def test_the_common_prefix_ends_before_the_first_predicted_token_and_the_first_branch() -> None:
    rows = [[*SYSTEM, 1, 2], [*SYSTEM, 1, 3]]
    assert common_prefix([chain(*row) for row in rows]).tolist() == SYSTEM  # the state of token 1 predicts 2 and 3
    assert common_prefix([chain(*row, predicts=7) for row in rows]).tolist() == SYSTEM[:69]
    branched = merge_sequences([chain(*SYSTEM, 1, 2), chain(*SYSTEM[:70], 3, 1)])
    assert common_prefix([branched, chain(*rows[0])]).tolist() == SYSTEM[:70]
    assert len(common_prefix([chain(*rows[0])])) == 0  # a single sequence shares nothing
    assert len(common_prefix([chain(*row[-60:]) for row in rows])) == 0  # not worth a pass


def test_a_sequence_without_its_first_tokens_keeps_its_relations() -> None:
    whole = merge_sequences([chain(5, 6, 7, 8), chain(5, 6, 9)])
    rest = whole.without_first(2)
    assert rest.ids.tolist() == [7, 8, 9] and rest.position_ids.tolist() == [2, 3, 2]
    assert rest.subtree_end.tolist() == [2, 2, 3]
    assert [path_to(rest, place) for place in range(3)] == [path_to(whole, place)[2:] for place in range(2, 5)]
    assert merge_sequences([chain(5, 6, 7, 8).without_first(2), chain(5, 6, 7).without_first(2)]).ids.tolist() == [7, 8]


# Branches of a trajectory in one sequence


@pytest.fixture
def trees(make: Make) -> list[Group]:
    branching = [
        make.turn(0, [1, 2, 3], [4, 5]),
        make.turn(1, [6, 7], [8], parent=0),
        make.turn(2, [6], [9, 10], parent=0),
        make.turn(3, [], [11, 12], parent=1),
        make.turn(4, [13], [14], parent=1),
        make.turn(5, [3, 2], [1], parent=2),
    ]
    rewriting = [make.turn(0, [1, 2], [3]), make.turn(1, [4, 5, 6], [7, 8]), make.turn(2, [9], [10], parent=1)]
    appending = make.chain(*(([turn, 2], [3, turn]) for turn in range(6)))
    return make.groups(
        *(
            make.trajectory(turns, {"score": score}, member=member)
            for member, (turns, score) in enumerate([(branching, 1.0), (rewriting, 0.0), (appending, 0.5)])
        ),
        greedy={0: make.trajectory(appending, {"score": 0.3}, member=3)},
    )


@pytest.mark.parametrize(
    "name",
    [
        *("ppo", "steppo", "vapo", "gspo", "echo", "reinforce++", "hgpo", "remax", "top-k-distillation"),
    ],
)
def test_merged_and_unmerged_batches_give_equal_loss_and_gradient(name: str, trees: list[Group], make: Make) -> None:
    algorithm = ALGORITHMS[name]
    models = exact_models(make, algorithm)
    merged = one_pass(algorithm, trees, models)
    unmerged = one_pass(algorithm, trees, replace(models, micro_tokens=20), packing=pack_per_turn)
    assert_equal(merged, unmerged, 1e-9)


@pytest.mark.parametrize("broken", ["subtree_end", "position_ids"])
def test_a_wrong_mask_and_wrong_positions_are_detected(broken: str, trees: list[Group], make: Make) -> None:
    def wrong(*arguments: Any) -> Any:
        return [
            replace(one, subtree_end=torch.full_like(one.subtree_end, len(one)))
            if broken == "subtree_end"
            else replace(one, position_ids=torch.arange(len(one)))
            for one in pack_prefix_tree(*arguments)
        ]

    models = exact_models(make, ALGORITHMS["ppo"])
    with pytest.raises(AssertionError):
        assert_equal(
            one_pass(ALGORITHMS["ppo"], trees, models), one_pass(ALGORITHMS["ppo"], trees, models, packing=wrong), 1e-4
        )


def test_an_appending_episode_of_ten_turns_is_computed_once(make: Make) -> None:
    episode = make.trajectory(make.chain(*(([1, turn], [2, 3, turn]) for turn in range(10))), {"score": 1.0})
    lengths: list[int] = []

    def tokens_read(packing: Packing) -> int:
        batch = assemble_batch(select_trainable(make.groups(episode), {}).samples, packing)
        model = make.model()
        model.base_model.embed_tokens.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].numel()))
        algorithm = ALGORITHMS["reinforce"]
        weights = algorithm.compute_token_weights(batch, ModelOutputs())
        prepared = PreparedBatch(batch, weights, ModelOutputs(), None)
        forward_backward(ModelSet(model, 1.0, 10_000), algorithm, prepared)
        total, _ = sum(lengths), lengths.clear()
        return total

    assert tokens_read(pack_prefix_tree) == 50
    assert tokens_read(pack_per_turn) >= 275  # control: the cost if every prefix is computed again


def test_minibatches_have_the_gradient_of_the_batch_on_average(make: Make) -> None:
    model, algorithm = make.exact_model(), ALGORITHMS["reinforce"]
    batch = assemble_batch(select_trainable(make.random_groups(0), {}).samples, pack_prefix_tree)
    weights = algorithm.compute_token_weights(batch, ModelOutputs())
    prepared = PreparedBatch(batch, weights, ModelOutputs(), None)

    def gradient(trajectories: set[int]) -> Tensor:
        model.zero_grad()
        sequences = [sequence for sequence in batch.sequences if sequence.trajectory in trajectories]
        scale = len(batch.attempts) / len(trajectories)
        backward(ModelSet(model, 1.0, 100), algorithm, prepared, sequences, scale)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole = gradient(set(range(12)))
    parts = [gradient(set(range(first, 12, 3))) for first in range(3)]
    assert torch.allclose(sum(parts) / 3, whole, atol=1e-12)
    assert not torch.allclose(parts[0], whole, atol=1e-3)
