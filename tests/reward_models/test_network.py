"""Scores of turns from the recorded tokens, and losses and gradients that do not depend on the micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from learning_fixtures import Make
from torch import Tensor
from torch.nn import functional

from agent_r1.core.trajectory import Trajectory
from agent_r1.data.sequences import PrefixSharing
from agent_r1.model.value_head import ValueModel, build_value_model
from agent_r1.reward_models.evaluation import pack_traces
from agent_r1.reward_models.network import (
    HeadNetwork,
    ImplicitNetwork,
    Network,
    RewardModel,
    backward,
    bradley_terry,
    find_sharing,
    score_turns,
    trace_loss,
)


@pytest.fixture
def trajectories(make: Make) -> list[Trajectory]:
    silent = make.chain(([1, 2], [3]), ([4], []), ([5, 6], [7, 8]))
    rewritten = [make.turn(0, [1, 2], [3]), make.turn(1, [4], [5], parent=0), make.turn(2, [9, 10, 11], [12, 13])]
    chains = [make.chain(([1, 2], [3, 4]), ([5], [6])), make.chain(([1, 2], [9])), silent, rewritten]
    return [make.trajectory(turns, member=member) for member, turns in enumerate(chains)]


@pytest.fixture
def head(make: Make) -> HeadNetwork:
    model = build_value_model(make.model())
    torch.nn.init.normal_(model.head.weight)
    return HeadNetwork(model)


def values_one_by_one(model: ValueModel, trajectory: Trajectory) -> list[float]:
    """Return the value after each action, from a pass over exactly the tokens that the policy read and sampled."""
    return [
        model(torch.tensor([trajectory.prompt_ids(turn) + turn.action_ids]))[0, -1].item()
        for turn in trajectory.turns
        if turn.action_ids
    ]


def test_a_head_scores_each_turn_at_the_last_token_of_its_action(
    head: HeadNetwork, trajectories: list[Trajectory]
) -> None:
    found = RewardModel(head, "trajectory", "outcome").score(trajectories, micro_tokens=16)
    for trajectory, (score, turns) in zip(trajectories, found, strict=True):
        assert turns == pytest.approx(values_one_by_one(head.model, trajectory), abs=1e-5)
        assert score == turns[-1]


def test_an_implicit_score_is_beta_times_the_log_ratio_of_the_action_tokens(
    make: Make, trajectories: list[Trajectory]
) -> None:
    policy, reference = make.model(1), make.model(2)
    found = RewardModel(ImplicitNetwork(policy, reference, 0.05), "implicit", "outcome").score(trajectories, 1000)

    def logprob(model: torch.nn.Module, trajectory: Trajectory, index: int) -> float:
        turn = trajectory.turns[index]
        prompt = trajectory.prompt_ids(turn)
        table = model(torch.tensor([prompt + turn.action_ids])).logits.detach().log_softmax(-1)[0]
        places = range(len(prompt) - 1, len(prompt) + len(turn.action_ids) - 1)
        return sum(float(table[place, token]) for place, token in zip(places, turn.action_ids, strict=True))

    for trajectory, (score, turns) in zip(trajectories, found, strict=True):
        acting = [turn.index for turn in trajectory.turns if turn.action_ids]
        ratios = [logprob(policy, trajectory, i) - logprob(reference, trajectory, i) for i in acting]
        assert turns == pytest.approx([0.05 * ratio for ratio in ratios], abs=1e-5)
        assert score == pytest.approx(sum(turns), abs=1e-6)


def gradients(network: Network, module: torch.nn.Module, trajectories: Sequence[Trajectory], tokens: int) -> Tensor:
    packed, targets = pack_traces(trajectories), torch.tensor([1.0, 0.0, 1.0, 0.0])
    loss = trace_loss(network, packed, targets, [0, 0, 1, 1], "trajectory", "pairs")
    module.zero_grad()
    backward(network, packed, loss, tokens)
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def test_the_gradient_of_pairs_in_different_micro_batches_is_that_of_one_pass(
    make: Make, head: HeadNetwork, trajectories: list[Trajectory]
) -> None:
    implicit = ImplicitNetwork(make.model(1), copy.deepcopy(make.model(1)), 0.5)
    for network, module in ((head, head.model), (implicit, implicit.model)):
        whole, parts = (gradients(network, module, trajectories, tokens) for tokens in (1000, 1))
        assert torch.allclose(whole, parts, atol=1e-6) and float(whole.abs().max()) > 1e-3


LONG = [7 + index % 5 for index in range(75)]
"""Tokens with which all attempts begin, such as the solved examples of a prompt."""


@pytest.mark.parametrize("micro_tokens", [4000, 200])
def test_attempts_that_begin_alike_have_the_same_scores_and_gradients_when_their_tokens_are_computed_once(
    make: Make, micro_tokens: int
) -> None:
    chains = [([*LONG, 1], [3, 4]), ([*LONG, 1], [3, 5]), ([*LONG, 1], [3, 5]), ([*LONG, 2], [3, 4])]
    attempts = [make.trajectory(make.chain(one, ([6], [number]))) for number, one in enumerate(chains)]
    value, policy = build_value_model(make.model()), make.model(1)
    torch.nn.init.normal_(value.head.weight)
    reference = make.model(2).requires_grad_(False)
    sharing = PrefixSharing(width=16, across_micro_batches=True)
    cases: list[tuple[torch.nn.Module, Network, Network]] = [
        (value, HeadNetwork(value), HeadNetwork(value, sharing)),
        (policy, ImplicitNetwork(policy, reference, 0.5), ImplicitNetwork(policy, reference, 0.5, sharing)),
    ]
    for module, alone, shared in cases:
        packed = pack_traces(attempts)
        assert torch.allclose(score_turns(alone, packed, 4000), score_turns(shared, packed, micro_tokens), atol=1e-5)
        expected = gradients(alone, module, attempts, 4000)
        assert torch.allclose(expected, gradients(shared, module, attempts, micro_tokens), atol=1e-5)
        assert float(expected.abs().max()) > 1e-3


def test_only_large_models_share_prefixes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_sharing(make.model()) is None
    monkeypatch.setattr("agent_r1.reward_models.network.LARGE_MODEL", 1)
    assert find_sharing(make.model()) == PrefixSharing(make.model().config.hidden_size, True)


def test_bradley_terry_compares_attempts_of_one_group_only() -> None:
    scores, targets = torch.tensor([2.0, 0.5, 1.0, -1.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    expected = -(functional.logsigmoid(torch.tensor(1.5)) + functional.logsigmoid(torch.tensor(-2.0))) / 2
    assert bradley_terry(scores, targets, ["a", "a", "b", "b"]) == pytest.approx(float(expected))
    assert bradley_terry(scores, torch.ones(4), ["a"] * 4) == 0


def test_a_loss_over_turns_gives_each_trace_the_same_weight(head: HeadNetwork, trajectories: list[Trajectory]) -> None:
    packed, targets = pack_traces(trajectories), torch.tensor([1.0, 0.0, 1.0, 0.0])
    scores = score_turns(head, packed, 1000)
    found = trace_loss(head, packed, targets, [0] * 4, "turns", "outcome")(scores)
    each = functional.binary_cross_entropy_with_logits(scores, targets[packed.trace_of_turn], reduction="none")
    means = [each[packed.trace_of_turn == trace].mean() for trace in range(4)]
    assert float(found) == pytest.approx(float(torch.stack(means).mean()))


def test_the_loss_at_the_end_reads_the_last_turn_only(head: HeadNetwork, trajectories: list[Trajectory]) -> None:
    packed = pack_traces(trajectories)
    scores = score_turns(head, packed, 1000).requires_grad_()
    trace_loss(head, packed, torch.ones(4), [0] * 4, "trajectory", "regression")(scores).backward()
    assert scores.grad is not None
    assert scores.grad.nonzero().flatten().tolist() == packed.last_turn.tolist() == [1, 2, 4, 7]
