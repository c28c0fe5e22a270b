"""P7: order, labels, micro-batches, data parallelism and padding change neither loss nor gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from learning import SOME, UpdateResult, UpdateSetup, backward, close, discounted
from ragged import EPISODES, SEVERAL_GROUPS, Episodes, samples
from searching import holds, rejected
from torch import Tensor
from torch.nn.functional import pad

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.ops import center
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import Advantage, ModelOutputs
from agent_r1.data.batch import TrainingBatch, TrainingSample
from agent_r1.data.sequences import MicroBatch, TokenSequence, by_sequence, make_micro_batches
from agent_r1.trainer.forward_backward import score_tokens
from agent_r1.trainer.protocol import PreparedBatch

SEEDS = st.integers(0, 99)
UpdateFn = Callable[[Sequence[TrainingSample]], UpdateResult]
DividedUpdateFn = Callable[[UpdateSetup, Sequence[TrainingSample], int], UpdateResult]
"""(setup, samples, a number that says where to divide them) -> the result of an update in parts."""


def same(found: UpdateResult, expected: UpdateResult) -> bool:
    return close(found.loss, expected.loss) and close(found.gradient, expected.gradient)


# order and labels


def shuffle(given: Sequence[TrainingSample], seed: int) -> list[TrainingSample]:
    """Return the samples in another order, groups mixed, with other group numbers, some of them unused."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randperm(2 * len(given), generator=random).tolist()
    order = torch.randperm(len(given), generator=random).tolist()
    return [replace(given[index], group=labels[given[index].group]) for index in order]


def is_invariant_to_order_and_labels(update: UpdateFn, episodes: Episodes, seed: int) -> None:
    given = samples(episodes)
    assert same(update(shuffle(given, seed)), update(given))


class NeighborRelative(Advantage):
    """Wrong: the group of a trajectory is inferred from its position: ``rewards.view(-1, 2)``."""

    @property
    def formula(self) -> str:
        return "R - mean R of the neighbors"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        return center(batch.returns, torch.arange(len(batch.returns)) // 2)[batch.token_trajectory]


def test_order_and_labels_of_groups_do_not_matter() -> None:
    def for_every_algorithm(setup: type[UpdateSetup], episodes: Episodes, seed: int) -> None:
        for algorithm in SOME:
            is_invariant_to_order_and_labels(setup(algorithm), episodes, seed)

    holds(for_every_algorithm, UpdateSetup, SEVERAL_GROUPS, SEEDS, count=2)


def test_groups_inferred_from_positions_are_detected() -> None:
    wrong = Algorithm(name="neighbor-relative", advantage=NeighborRelative())
    rejected(is_invariant_to_order_and_labels, UpdateSetup(wrong), EPISODES, SEEDS)


# micro-batches and data parallelism


def is_invariant_to_division(update: DividedUpdateFn, algorithm: Algorithm, episodes: Episodes, where: int) -> None:
    given, setup = samples(episodes), UpdateSetup(algorithm, layers=1)
    assert same(update(setup, given, where), setup(given))


def in_micro_batches(setup: UpdateSetup, given: Sequence[TrainingSample], where: int) -> UpdateResult:
    return replace(setup, micro_tokens=1 + 4 * where)(given)


def on_two_ranks(setup: UpdateSetup, given: Sequence[TrainingSample], where: int) -> UpdateResult:
    """Token weights of the whole batch; each rank trains on its own trajectories; gradients are summed."""
    prepared = setup.prepare(given)
    split = where % (len(given) + 1)
    sequences = prepared.batch.sequences
    ranks = [[one for one in sequences if (one.trajectory < split) is is_first] for is_first in (True, False)]
    return in_parts(setup, prepared, [rank for rank in ranks if rank])


def in_parts(setup: UpdateSetup, prepared: PreparedBatch, parts: Sequence[Sequence[TokenSequence]]) -> UpdateResult:
    def loss() -> Tensor:
        return torch.stack([backward(setup.models, setup.algorithm, prepared, part).loss for part in parts]).sum()

    return setup.result(prepared, loss)


def with_local_statistics(setup: UpdateSetup, given: Sequence[TrainingSample], where: int) -> UpdateResult:
    """Wrong: each part has its own statistics and denominators, and gradients are averaged."""
    split = where % (len(given) + 1)
    parts = [setup.prepare(part) for part in (given[:split], given[split:]) if part]

    def loss() -> Tensor:
        scale = 1 / len(parts)
        losses = [backward(setup.models, setup.algorithm, part, part.batch.sequences, scale).loss for part in parts]
        return torch.stack(losses).sum()

    return setup.result(parts[0], loss)


def sequence_by_sequence(setup: UpdateSetup, given: Sequence[TrainingSample], where: int) -> UpdateResult:
    """Wrong for a trajectory-level ratio: each sequence of a trajectory has its own mean ratio."""
    prepared = setup.prepare(given)
    return in_parts(setup, prepared, [[sequence] for sequence in prepared.batch.sequences])


@pytest.mark.parametrize("update", [in_micro_batches, on_two_ranks])
def test_division_of_a_batch_does_not_matter(update: DividedUpdateFn) -> None:
    def for_every_algorithm(divided: DividedUpdateFn, episodes: Episodes, where: int) -> None:
        for algorithm in SOME:
            is_invariant_to_division(divided, algorithm, episodes, where)

    holds(for_every_algorithm, update, SEVERAL_GROUPS, st.integers(1, 12), count=2)


@pytest.mark.parametrize("name", ["ppo", "dr-grpo"])
def test_statistics_and_denominators_of_parts_are_detected(name: str) -> None:
    algorithm = st.just(discounted(ALGORITHMS[name]))
    rejected(is_invariant_to_division, with_local_statistics, algorithm, EPISODES, st.integers(0, 12))


def test_a_mean_ratio_over_part_of_a_trajectory_is_detected() -> None:
    algorithm = st.just(ALGORITHMS["gspo"])
    rejected(is_invariant_to_division, sequence_by_sequence, algorithm, EPISODES, st.integers(0, 12))


# padding

PadFn = Callable[[MicroBatch, int], MicroBatch]


def is_invariant_to_padding(pad_micro_batch: PadFn, episodes: Episodes, more: int) -> None:
    setup = UpdateSetup(ALGORITHMS["grpo"], layers=1)
    batch, models = setup.prepare(samples(episodes)).batch, setup.models
    for micro in make_micro_batches(by_sequence(batch.sequences), 1):
        found, entropy = score_tokens(models.policy, batch, pad_micro_batch(micro, more), 0.7)
        expected, expected_entropy = score_tokens(models.policy, batch, micro, 0.7)
        assert close(found, expected) and close(entropy, expected_entropy)


def on_the_right(micro: MicroBatch, more: int) -> MicroBatch:
    """A single sequence with padding behind it. No token of the sequence sees it."""
    subtree_end = micro.subtree_end
    if subtree_end is not None:
        subtree_end = pad(subtree_end, (0, more), value=micro.ids.shape[1] + more)
    position_ids = None if micro.position_ids is None else pad(micro.position_ids, (0, more))
    return replace(micro, ids=pad(micro.ids, (0, more)), position_ids=position_ids, subtree_end=subtree_end)


def on_the_left(micro: MicroBatch, more: int) -> MicroBatch:
    """Wrong: padding before the tokens is visible to them and shifts their positions."""
    plain = replace(micro, position_ids=None, subtree_end=None)
    moved = {"logit_positions": micro.logit_positions + more, "token_positions": micro.token_positions + more}
    return replace(plain, ids=pad(micro.ids, (more, 0)), **moved)


def test_padding_does_not_matter() -> None:
    holds(is_invariant_to_padding, on_the_right, EPISODES, st.integers(1, 9), count=20)
    rejected(is_invariant_to_padding, on_the_left, EPISODES, st.integers(1, 9))
