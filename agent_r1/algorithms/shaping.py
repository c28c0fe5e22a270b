"""Filters, which exclude attempts, and reward shaping. Both are applied before advantages are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.ops import discounted_sums, group_std, has_variance, reaches
from agent_r1.algorithms.types import Component
from agent_r1.core.trajectory import Turn
from agent_r1.data.batch import TrainingBatch, segment_count, segment_first, segment_max, segment_mean
from agent_r1.data.training_sample import Excluded, Selection, TrainingSample

CONSTANT = "all returns of its group are equal"


class Filters(Component):
    """Rules that exclude attempts from training. A filter is off if its value is None or false.

    ``overlong`` and ``empty_turn`` exclude an attempt from the loss only, not from its group's baseline. All others
    remove attempts from the batch, one after another in the order of the fields.
    """

    staleness: int | None = Field(default=None, ge=0)
    """Remove attempts with a token that was sampled more than this number of updates ago. none: off."""

    greedy: bool = False
    """Remove a whole group if it has no greedy attempt, or if its greedy attempt could not be scored."""

    overlong: bool = False
    """Exclude an attempt from the loss if it reached the limit of turns or tokens (overlong filtering of DAPO,
    arXiv:2503.14476, section 3.4)."""

    empty_turn: bool = False
    """Exclude an attempt from the loss if it has an empty turn (SimpleTIR, arXiv:2509.02479). A turn is empty if all
    its calls are unreadable, or if it has no calls and its text is empty or cut off."""

    success: float | None = None
    """Remove attempts whose return is below this number. none: off."""

    top_variance: float | None = Field(default=None, gt=0, le=1)
    """Keep only this share of the groups: the groups with the largest variance of returns (StarPO-S, arXiv:2504.20073).
    none: off."""

    def apply(self, selection: Selection, version: int) -> Selection:
        """Return the selection without the samples that a filter removes. The current weights have ``version``."""
        if self.staleness is not None:
            ages = [version - sample.version for sample in selection.samples]
            stale = [f"stale: sampled {age} updates ago" if age > self.staleness else None for age in ages]
            selection = _without(selection, stale)
        if self.greedy:
            failures = [
                None if sample.greedy_return is not None else sample.greedy_failure or "there is none"
                for sample in selection.samples
            ]
            reasons = [failure and f"the greedy attempt could not be scored: {failure}" for failure in failures]
            selection = _without(selection, reasons)
        if self.success is not None:
            successes = reaches(_returns(selection.samples)[0], self.success).tolist()
            selection = _without(selection, [None if success else "unsuccessful" for success in successes])
        if self.top_variance is not None:
            selection = _without(selection, top_variance(selection.samples, self.top_variance))
        return selection

    def loss_excluded(self, samples: Sequence[TrainingSample]) -> list[str | None]:

        def reason(sample: TrainingSample) -> str | None:
            if self.overlong and sample.trajectory.truncated:
                return "overlong"
            return "empty turn" if self.empty_turn and any(map(_is_empty, sample.trajectory.turns)) else None

        return list(map(reason, samples))

    @property
    def formula(self) -> str:
        words = {
            "staleness": f"older than {self.staleness} updates",
            "greedy": "without greedy attempt",
            "overlong": "out of turns or tokens (still in the baseline)",
            "empty_turn": "with an empty turn (still in the baseline)",
            "success": f"return below {self.success}",
            "top_variance": f"group not among the {self.top_variance} of most variance",
        }
        return "; ".join(words[name] for name, value in self if value is not None and value is not False)


class SoftOverlong(Component):
    """A penalty for long trajectories: the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13).

    |y| is the number of action tokens of a trajectory, L_max is ``max_tokens``, and L_cache is ``cache_tokens``:

        R_length = 0                                  if |y| <= L_max - L_cache
                   ((L_max - L_cache) - |y|) / L_cache  if L_max - L_cache < |y| <= L_max
                   -1                                 if |y| > L_max

    R_length * ``penalty`` is added to the outcome reward. The defaults are from the paper.
    """

    max_tokens: int = Field(default=20480, ge=1)
    """A trajectory with this number of action tokens or more gets the full penalty."""

    cache_tokens: int = Field(default=4096, ge=1)
    """Number of action tokens over which the penalty grows linearly from 0 to the full penalty. The growth ends at
    ``max_tokens`` action tokens."""

    penalty: float = Field(default=1.0, gt=0)
    """The full penalty, a positive number that is subtracted from the outcome reward."""

    @property
    def formula(self) -> str:
        start = self.max_tokens - self.cache_tokens
        return f"R less {self.penalty:g} clip((|y| - {start}) / {self.cache_tokens}, 0, 1) for its |y| action tokens"

    def penalties(self, lengths: Tensor) -> Tensor:
        """Return the penalty (0 or negative) of each trajectory: (M,). ``lengths`` (M,) are in action tokens."""
        over = lengths - (self.max_tokens - self.cache_tokens)
        return -self.penalty * (over / self.cache_tokens).clamp(0, 1)


class RewardShaping(Component):
    """Changes of rewards before the advantages are computed."""

    length: float = Field(default=0.0, ge=0)
    """Weight w of the penalty for long trajectories, which is subtracted from the outcome reward. The penalty is w *
    max(0, mean return of the group) * (number of action tokens of the trajectory / largest number of action tokens of
    any trajectory in the group)."""

    turns: float = Field(default=0.0, ge=0)
    """Weight w of the penalty for turns, which is subtracted from the outcome reward. The penalty is w * max(0, mean
    return of the group) * (number of turns of the trajectory / largest number of turns of any trajectory in the
    group)."""

    process_scale: Literal["none", "largest"] = "none"
    """How process rewards are scaled. none: no scaling. largest: division by the largest absolute return to go in the
    batch (arXiv:2511.14460). The return to go of a token is the sum of the process rewards from this token to the end
    of the trajectory."""

    overlong: SoftOverlong | None = None

    @property
    def formula(self) -> str:
        """A description of how the rewards are changed."""
        penalties = [f"{share:g} {unit}" for share, unit in ((self.length, "length"), (self.turns, "turns")) if share]
        penalty = (
            f"R less mean R of the group (if above 0) times ({' + '.join(penalties)}, each over the group's largest)"
        )
        scaled = "process rewards over their largest sum from a turn on"
        overlong = [] if self.overlong is None else [self.overlong.formula]
        parts = [*([scaled] if self.process_scale == "largest" else []), *([penalty] if penalties else []), *overlong]
        return "; ".join(parts)

    def apply(self, batch: TrainingBatch) -> TrainingBatch:
        if self.process_scale == "largest":
            # process rewards are the token rewards without the outcome rewards: (N,)
            outcome = torch.zeros_like(batch.token_rewards).index_add(0, batch.last_tokens, batch.outcome_rewards)
            process = batch.token_rewards - outcome  # (N,)
            largest = discounted_sums(process, batch.token_trajectory, 1.0).abs().max()
            batch = replace(batch, token_rewards=outcome + process / (largest + 1e-6))
        if not self.length and not self.turns and self.overlong is None:
            return batch
        lengths = segment_count(batch.actions().token_trajectory).double()  # (M,)
        penalty = torch.zeros_like(lengths) if self.overlong is None else self.overlong.penalties(lengths)  # (M,)
        if self.length or self.turns:
            penalty = penalty + self._relative_penalties(batch, lengths)
        # the penalty is a part of the outcome reward
        rewards = batch.token_rewards.index_add(0, batch.last_tokens, penalty)  # (N,)
        return replace(batch, token_rewards=rewards, outcome_rewards=batch.outcome_rewards + penalty)

    def _relative_penalties(self, batch: TrainingBatch, lengths: Tensor) -> Tensor:
        # (M,) the penalties of ``length`` and ``turns``, 0 or negative; ``lengths`` (M,) are in action tokens
        group = batch.trajectory_group
        turns = segment_count(batch.turn_trajectory).double()  # (M,)
        # the penalty as a share of the mean return of the group: (M,)
        share = self.length * lengths / segment_max(lengths, group)[group]
        share = share + self.turns * turns / segment_max(turns, group)[group]
        return -segment_mean(batch.returns, group).clamp(min=0)[group] * share  # no penalty if the mean is negative


def drop_constant_groups(selection: Selection) -> Selection:
    """Return the selection without groups of one sample, and without groups whose returns are all equal."""
    returns, groups = _returns(selection.samples)
    return _without(selection, [None if varies else CONSTANT for varies in has_variance(returns, groups).tolist()])


def _without(selection: Selection, reasons: Sequence[str | None]) -> Selection:
    # ``reasons`` holds for each sample the reason to exclude it, or None
    judged = list(zip(selection.samples, reasons, strict=True))
    removed = [Excluded(sample.trajectory.attempt, reason) for sample, reason in judged if reason is not None]
    kept = tuple(sample for sample, reason in judged if reason is None)
    return Selection(kept, (*selection.excluded, *removed))


def _is_empty(turn: Turn) -> bool:
    message = turn.action.message
    if message.calls:
        return all(call.error is not None for call in message.calls)
    return turn.finish_reason == "length" or not message.text.strip()


def top_variance(samples: Sequence[TrainingSample], share: float) -> list[str | None]:
    """Return for each sample a reason to exclude it if its group is not in the ``share`` of most variance, or None.

    At least one group is kept. Ties go to the earlier group.
    """
    if not samples:
        return []
    returns, groups = _returns(samples)
    present, place = torch.unique(groups, return_inverse=True)  # (groups,), (samples,)
    first = segment_first(place)  # (groups,) the first sample of each group; samples are ordered by group
    ranked = group_std(returns, groups)[first].argsort(descending=True, stable=True)
    kept = set(present[ranked[: max(1, round(share * len(present)))]].tolist())
    return [None if sample.group in kept else "little variance" for sample in samples]


def _returns(samples: Sequence[TrainingSample]) -> tuple[Tensor, Tensor]:
    returns = torch.tensor([sample.total for sample in samples], dtype=torch.float64)
    return returns, torch.tensor([sample.group for sample in samples], dtype=torch.int64)
