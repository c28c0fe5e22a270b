"""P7: order, labels, micro-batches, halves on two machines and padding change neither loss nor gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from learning import ALL, Learned, Learning, close, discounted
from ragged import EPISODES, SEVERAL, Episodes, samples
from searching import holds, rejected
from torch import Tensor
from torch.nn.functional import pad

from agent_r1.algorithms.advantages.advantage import Advantage, on_tokens
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.ops.group_stats import center
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.signals import Estimate, ModelOutputs
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.micro_batches import MicroBatch, by_sequence, micro_batches
from agent_r1.data.sequences import TokenSequence
from agent_r1.data.training_sample import TrainingSample
from agent_r1.trainer.forward_backward import Prepared, learn, scores

SEEDS = st.integers(0, 99)
Learn = Callable[[Sequence[TrainingSample]], Learned]
Divided = Callable[[Learning, Sequence[TrainingSample], int], Learned]
"""(how to learn, samples, a number that says where to divide them) -> what was learned in parts."""


def same(found: Learned, expected: Learned) -> bool:
    return close(found.loss, expected.loss) and close(found.gradient, expected.gradient)


# order and labels


def shuffled(given: Sequence[TrainingSample], seed: int) -> list[TrainingSample]:
    """In another order, groups mixed, and these under other numbers, some of which nobody has."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randperm(2 * len(given), generator=random).tolist()
    order = torch.randperm(len(given), generator=random).tolist()
    return [replace(given[place], group=labels[given[place].group]) for place in order]


def order_and_labels_do_not_matter(learning: Learn, episodes: Episodes, seed: int) -> None:
    given = samples(episodes)
    assert same(learning(shuffled(given, seed)), learning(given))


class ByPlace(Advantage):
    """Wrong: the group of a trajectory is read from its place: ``rewards.view(-1, 2)``."""

    @property
    def formula(self) -> str:
        return "R - mean R of the neighbours"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        return on_tokens(center(batch.returns, torch.arange(len(batch.returns)) // 2), batch)


def test_order_and_labels_of_groups_move_no_row() -> None:
    def every_row(learning: type[Learning], episodes: Episodes, seed: int) -> None:
        for row in ALL:
            order_and_labels_do_not_matter(learning(row), episodes, seed)

    holds(every_row, Learning, SEVERAL, SEEDS, count=4)


def test_groups_by_place_are_seen() -> None:
    rejected(order_and_labels_do_not_matter, Learning(Algorithm(name="by-place", advantage=ByPlace())), EPISODES, SEEDS)


# micro-batches, and halves on two machines


def division_does_not_matter(divided: Divided, row: Algorithm, episodes: Episodes, where: int) -> None:
    given, learning = samples(episodes), Learning(row, layers=1)
    assert same(divided(learning, given, where), learning(given))


def in_micro_batches(learning: Learning, given: Sequence[TrainingSample], where: int) -> Learned:
    return replace(learning, budget=1 + 4 * where)(given)


def on_two_machines(learning: Learning, given: Sequence[TrainingSample], where: int) -> Learned:
    """Credit of the whole batch; each machine learns its own trajectories; gradients are added up."""
    prepared = learning.prepared(given)
    here = where % (len(given) + 1)
    shares = [[one for one in prepared.batch.sequences if (one.trajectory < here) is first] for first in (True, False)]
    return in_turn(learning, prepared, [share for share in shares if share])


def in_turn(learning: Learning, prepared: Prepared, parts: Sequence[Sequence[TokenSequence]]) -> Learned:
    def loss() -> Tensor:
        return torch.stack([learn(learning.models, learning.row, prepared, part, 1.0).loss for part in parts]).sum()

    return learning.whole(prepared, loss)


def credited_apart(learning: Learning, given: Sequence[TrainingSample], where: int) -> Learned:
    """Wrong: each part has its own statistics and denominators, and gradients are averaged."""
    here = where % (len(given) + 1)
    parts = [learning.prepared(part) for part in (given[:here], given[here:]) if part]

    def loss() -> Tensor:
        weight = 1 / len(parts)
        losses = [learn(learning.models, learning.row, part, part.batch.sequences, weight).loss for part in parts]
        return torch.stack(losses).sum()

    return learning.whole(parts[0], loss)


def sequence_by_sequence(learning: Learning, given: Sequence[TrainingSample], where: int) -> Learned:
    """Wrong where a ratio is a trajectory's: its contexts are learned apart, each with a mean of its own."""
    prepared = learning.prepared(given)
    return in_turn(learning, prepared, [[sequence] for sequence in prepared.batch.sequences])


@pytest.mark.parametrize("divided", [in_micro_batches, on_two_machines])
def test_division_of_a_batch_moves_no_row(divided: Divided) -> None:
    def every_row(how: Divided, episodes: Episodes, where: int) -> None:
        for row in ALL:
            division_does_not_matter(how, row, episodes, where)

    holds(every_row, divided, SEVERAL, st.integers(1, 12), count=3)


@pytest.mark.parametrize("name", ["ppo", "reinforce", "gspo", "dr-grpo"])
def test_statistics_and_denominators_of_parts_are_seen(name: str) -> None:
    rejected(division_does_not_matter, credited_apart, st.just(discounted(ALGORITHMS[name])), EPISODES, st.integers(0, 12))


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_mean_over_a_part_of_a_trajectory_is_seen(name: str) -> None:
    row = st.just(ALGORITHMS[name])
    rejected(division_does_not_matter, sequence_by_sequence, row, EPISODES, st.integers(0, 12))


# padding

Widened = Callable[[MicroBatch, int], MicroBatch]


def padding_does_not_matter(widened: Widened, episodes: Episodes, more: int) -> None:
    learning = Learning(ALGORITHMS["grpo"], layers=1)
    batch, models = learning.prepared(samples(episodes)).batch, learning.models
    for micro in micro_batches(by_sequence(batch.sequences), 1):
        found, entropy = scores(models.policy, batch, widened(micro, more), 0.7)
        expected, expected_entropy = scores(models.policy, batch, micro, 0.7)
        assert close(found, expected) and close(entropy, expected_entropy)


def on_the_right(micro: MicroBatch, more: int) -> MicroBatch:
    """A single sequence, with padding behind it that sees itself, and that nobody else sees."""
    return replace(
        micro,
        ids=pad(micro.ids, (0, more)),
        positions=None if micro.positions is None else pad(micro.positions, (0, more)),
        mask=None
        if micro.mask is None
        else pad(micro.mask, (0, more, 0, more)) | torch.eye(_width(micro) + more).bool(),
    )


def on_the_left(micro: MicroBatch, more: int) -> MicroBatch:
    """Wrong: padding before the tokens, which see it and stand further back."""
    plain = replace(micro, positions=None, mask=None)
    return replace(plain, ids=pad(micro.ids, (more, 0)), predictors=micro.predictors + more)


def _width(micro: MicroBatch) -> int:
    return micro.ids.shape[1]


def test_padding_changes_nothing() -> None:
    holds(padding_does_not_matter, on_the_right, EPISODES, st.integers(1, 9), count=20)
    rejected(padding_does_not_matter, on_the_left, EPISODES, st.integers(1, 9))
