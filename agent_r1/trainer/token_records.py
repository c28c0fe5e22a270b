"""The token records of an update: what the update computed for each action token of some of its attempts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agent_r1.core.token_record import TokenRecord
from agent_r1.data.training_sample import TrainingSample
from agent_r1.trainer.metrics import OptimizerStep, first_entropies, logprobs_before_update
from agent_r1.trainer.protocol import PreparedBatch


def make_token_records(
    samples: Sequence[TrainingSample], prepared: PreparedBatch, steps: Sequence[OptimizerStep], groups: int
) -> tuple[TokenRecord, ...]:
    """Return token records for the attempts of at most ``groups`` groups.

    Groups are taken in the order of the batch. A group is skipped if no optimizer step used any of its attempts. No
    model runs in this function, because the update has already computed all numbers of the records.

    Args:
        samples: the samples of the batch, in the order of the batch's trajectories.
        prepared: the batch, with only the sequences that the optimizer steps used.
        steps: the optimizer steps of the update.
        groups: the maximum number of groups.
    """
    if not groups:
        return ()
    batch = prepared.batch
    used = {sequence.trajectory for sequence in batch.sequences}
    chosen = sorted({samples[number].group for number in used})[:groups]
    columns = _columns(prepared, steps)
    records: list[TokenRecord] = []
    for number, sample in enumerate(samples):
        if sample.group not in chosen:
            continue
        own = (batch.token_trajectory == number) & batch.action_mask  # (N,)
        turns = [turn for turn in sample.trajectory.turns if turn.action_ids]
        parts = columns[:, own].split([len(turn.action_ids) for turn in turns], dim=1)
        for turn, part in zip(turns, parts, strict=True):
            records.append(TokenRecord(sample.trajectory.attempt, turn.index, *map(tuple, part.tolist())))
    return tuple(records)


def _columns(prepared: PreparedBatch, steps: Sequence[OptimizerStep]) -> Tensor:
    """Return a tensor with one column for each of the N tokens of the batch: (4, N), or (5, N) with a critic.

    The rows are log-probability, advantage, loss weight and entropy. With a critic, the fifth row is the critic's
    value.
    """
    weights, values = prepared.weights, prepared.outputs.values
    passes = [step.passed for step in steps if len(step.passed.tokens)]  # passes that ran the policy
    logprobs = torch.full_like(weights.advantage, math.nan)
    if passes:
        tokens, known = logprobs_before_update(prepared, passes[0])
        logprobs[tokens] = known
    columns = [logprobs, weights.advantage, weights.loss_weight * weights.importance_weight]
    columns.append(first_entropies(prepared, passes))
    return torch.stack(columns if values is None else [*columns, values.before_token])
