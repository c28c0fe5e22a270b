"""Filters: rules that exclude attempts from training, with a reason for each attempt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.component import Component
from agent_r1.algorithms.ops import group_std, has_variance, reaches
from agent_r1.core.trajectory import Turn
from agent_r1.data.segments import segment_first
from agent_r1.data.training_sample import Excluded, Selection, TrainingSample

CONSTANT = "all returns of its group are equal"


class Filters(Component):
    """Rules that exclude attempts from training. A filter is off if its value is None or false.

    ``overlong`` and ``empty_turn`` exclude an attempt from the loss only: the attempt still counts in the baseline of
    its group. Each other filter removes attempts from the batch, so that they count nowhere. These filters are applied
    one after another, in the order of the fields.
    """

    staleness: int | None = Field(default=None, ge=0)
    """Remove attempts with a token that was sampled more than this number of updates ago. none: off."""

    greedy: bool = False
    """Remove attempts whose group has no greedy attempt with a return."""

    overlong: bool = False
    """Exclude attempts that reached the limit of turns or tokens from the loss (overlong filtering of DAPO, 2503.14476,
    section 3.4)."""

    empty_turn: bool = False
    """Exclude attempts with an empty turn from the loss (SimpleTIR, 2509.02479). A turn is empty if all its calls are
    unreadable, or if it has no calls and its text is empty or cut off."""

    success: float | None = None
    """Remove attempts whose return is below this number. none: off."""

    top_variance: float | None = Field(default=None, gt=0, le=1)
    """Keep only this share of the groups: the groups with the largest variance of returns (StarPO-S, 2504.20073).
    none: off."""

    def apply(self, selection: Selection, version: int) -> Selection:
        """Return the selection without the samples that a filter removes.

        Each filter gets only the samples that the previous filters kept. ``version`` is the number of the current
        weights.
        """
        if self.staleness is not None:
            selection = _without(selection, stale(selection.samples, version, self.staleness))
        if self.greedy:
            selection = _without(selection, without_greedy(selection.samples))
        if self.success is not None:
            selection = _without(selection, unsuccessful(selection.samples, self.success))
        if self.top_variance is not None:
            selection = _without(selection, top_variance(selection.samples, self.top_variance))
        return selection

    def loss_excluded(self, samples: Sequence[TrainingSample]) -> list[str | None]:
        """Return one entry per sample: the reason why the filters exclude it from the loss, or None if they do not."""
        active = [fn for fn, is_on in ((overlong, self.overlong), (empty_turn, self.empty_turn)) if is_on]
        by_filter = [filter_fn(samples) for filter_fn in active]
        return [next(filter(None, reasons), None) for reasons in zip(*by_filter, [None] * len(samples), strict=True)]

    @property
    def formula(self) -> str:
        """The active filters in words; "" if all filters are off."""
        words = {
            "staleness": f"older than {self.staleness} updates",
            "greedy": "without greedy attempt",
            "overlong": "out of turns or tokens (still in the baseline)",
            "empty_turn": "with an empty turn (still in the baseline)",
            "success": f"return below {self.success}",
            "top_variance": f"group not among the {self.top_variance} of most variance",
        }
        return "; ".join(words[name] for name, value in self if value is not None and value is not False)


def drop_constant_groups(selection: Selection) -> Selection:
    """Return the selection without the groups whose returns are all equal, such as groups of one sample."""
    returns, groups = _returns(selection.samples)
    return _without(selection, [None if varies else CONSTANT for varies in has_variance(returns, groups).tolist()])


def _without(selection: Selection, reasons: Sequence[str | None]) -> Selection:
    """Return the selection without the samples that ``reasons`` excludes. The result lists them as excluded.

    ``reasons`` holds one entry per sample: the reason to exclude the sample, or None to keep the sample.
    """
    judged = list(zip(selection.samples, reasons, strict=True))
    removed = [Excluded(sample.trajectory.attempt, reason) for sample, reason in judged if reason is not None]
    kept = tuple(sample for sample, reason in judged if reason is None)
    return Selection(kept, (*selection.excluded, *removed))


def stale(samples: Sequence[TrainingSample], version: int, bound: int) -> list[str | None]:
    """Return one entry per sample: a reason to exclude the sample if it is stale, else None.

    A sample is stale if one of its tokens was sampled more than ``bound`` updates ago. ``version`` is the number of the
    current weights.
    """
    ages = [version - sample.version for sample in samples]
    return [f"stale: sampled {age} updates ago" if age > bound else None for age in ages]


def without_greedy(samples: Sequence[TrainingSample]) -> list[str | None]:
    """Return one entry per sample: a reason to exclude the sample if its group has no greedy return, else None.

    The greedy return is the return of the group's greedy attempt.
    """
    return [
        None
        if sample.greedy_return is not None
        else f"the greedy attempt could not be scored: {sample.greedy_failure or 'there is none'}"
        for sample in samples
    ]


def overlong(samples: Sequence[TrainingSample]) -> list[str | None]:
    """Return one entry per sample: a reason to exclude the sample if its trajectory was truncated, else None."""
    return ["overlong" if sample.trajectory.truncated else None for sample in samples]


def empty_turn(samples: Sequence[TrainingSample]) -> list[str | None]:
    """Return one entry per sample: a reason to exclude the sample if it has an empty turn, else None.

    A turn with calls is empty if all its calls are unreadable. A turn without calls is empty if its text is empty or
    cut off.
    """
    return ["empty turn" if any(map(_is_empty, sample.trajectory.turns)) else None for sample in samples]


def _is_empty(turn: Turn) -> bool:
    message = turn.action.message
    if message.calls:
        return all(call.error is not None for call in message.calls)
    return turn.finish_reason == "length" or not message.text.strip()


def unsuccessful(samples: Sequence[TrainingSample], threshold: float) -> list[str | None]:
    """Return one entry per sample: a reason to exclude the sample if its return is below ``threshold``, else None."""
    returns, _ = _returns(samples)
    return [None if is_success else "unsuccessful" for is_success in reaches(returns, threshold).tolist()]


def top_variance(samples: Sequence[TrainingSample], share: float) -> list[str | None]:
    """Return one entry per sample: a reason to exclude the sample if the returns of its group vary little, else None.

    The groups with the largest variance of returns are kept: the fraction ``share`` of all groups, but at least one.
    Among groups of equal variance, the earlier groups are kept.
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
    """Return (the return of each sample, the number of the group of each sample), both as tensors."""
    returns = torch.tensor([sample.total for sample in samples], dtype=torch.float64)
    return returns, torch.tensor([sample.group for sample in samples], dtype=torch.int64)
