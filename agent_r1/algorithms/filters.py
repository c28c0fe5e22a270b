"""What an algorithm sets aside before it learns, each time with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.component import Component
from agent_r1.algorithms.ops.group_stats import deviation, varies
from agent_r1.core.trajectory import Turn
from agent_r1.data.segments import segment_first
from agent_r1.data.training_sample import Selection, Excluded, TrainingSample

Filter = Callable[[Sequence[TrainingSample]], Sequence[str | None]]
"""For each sample None, or the reason why an algorithm does not learn from it."""


class Filters(Component):
    """What is not learned from. None or false: not looked at. They are asked in this order.

    ``overlong`` and ``void_turn`` mute an attempt: the others are compared with it still, only its own tokens do not
    count. The others leave it out before anything is compared.
    """

    staleness: int | None = Field(default=None, ge=0)
    """Attempts with a token that is older than so many updates."""

    greedy: bool = False
    """Attempts whose group has no greedy attempt to compare with."""

    overlong: bool = False
    """Attempts that ran out of turns or tokens (DAPO's overlong filtering, 2503.14476, section 3.4)."""

    void_turn: bool = False
    """Attempts with a turn that neither calls a tool nor answers (SimpleTIR, 2509.02479)."""

    success: float | None = None
    """Attempts that earned less."""

    zero_variance: float | None = Field(default=None, ge=0)
    """Groups whose rewards have a standard deviation not above this."""

    top_variance: float | None = Field(default=None, gt=0, le=1)
    """All but this share of the groups, those of most variance (StarPO-S, 2504.20073)."""

    def chosen(self, version: int) -> Iterator[Filter]:
        """Those that are asked for, for weights of ``version``."""
        if self.staleness is not None:
            yield partial(stale, version=version, bound=self.staleness)
        if self.greedy:
            yield without_greedy
        if self.success is not None:
            yield partial(unsuccessful, threshold=self.success)
        if self.zero_variance is not None:
            yield partial(zero_variance, tolerance=self.zero_variance)
        if self.top_variance is not None:
            yield partial(top_variance, share=self.top_variance)

    def muted(self, samples: Sequence[TrainingSample]) -> list[str | None]:
        """For each sample why it is compared with and not learned from; None: it is learned from."""
        asked = [judge for judge, wanted in ((overlong, self.overlong), (void_turn, self.void_turn)) if wanted]
        verdicts = [judge(samples) for judge in asked]
        return [next(filter(None, reasons), None) for reasons in zip(*verdicts, [None] * len(samples), strict=True)]

    @property
    def formula(self) -> str:
        """What is set aside, in words."""
        said = {
            "staleness": f"older than {self.staleness} updates",
            "greedy": "without greedy attempt",
            "overlong": "out of turns or tokens (compared with still)",
            "void_turn": "with a void turn (compared with still)",
            "success": f"earned less than {self.success}",
            "zero_variance": f"group without variance ({self.zero_variance})",
            "top_variance": f"group not among the {self.top_variance} of most variance",
        }
        return "; ".join(said[name] for name, value in self if value is not None and value is not False)


def apply_filters(admission: Selection, filters: Filters, version: int) -> Selection:
    """What remains after each filter has seen what the one before it left."""
    for judge in filters.chosen(version):
        reasons = judge(admission.samples)
        judged = list(zip(admission.samples, reasons, strict=True))
        dropped = [Excluded(sample.trajectory.attempt, reason) for sample, reason in judged if reason is not None]
        kept = tuple(sample for sample, reason in judged if reason is None)
        admission = Selection(kept, (*admission.left_out, *dropped))
    return admission


def stale(samples: Sequence[TrainingSample], version: int, bound: int) -> list[str | None]:
    """Drop what holds a token sampled more than ``bound`` updates ago."""
    ages = [version - sample.version for sample in samples]
    return [f"stale: sampled {age} updates ago" if age > bound else None for age in ages]


def without_greedy(samples: Sequence[TrainingSample]) -> list[str | None]:
    """Drop what has no greedy attempt to be compared with."""
    said = (f"the greedy attempt could not be scored: {sample.no_greedy or 'there is none'}" for sample in samples)
    return [None if sample.greedy is not None else why for sample, why in zip(samples, said, strict=True)]


def overlong(samples: Sequence[TrainingSample]) -> list[str | None]:
    """Mute what did not end by itself."""
    return ["overlong" if sample.trajectory.truncated else None for sample in samples]


def void_turn(samples: Sequence[TrainingSample]) -> list[str | None]:
    """Mute what holds a turn that neither calls a tool nor says anything: cut, empty, or calls nobody can read."""
    return ["void turn" if any(map(_is_void, sample.trajectory.turns)) else None for sample in samples]


def _is_void(turn: Turn) -> bool:
    message = turn.action.message
    if message.calls:
        return all(call.error is not None for call in message.calls)
    return turn.finish_reason == "length" or not message.text.strip()


def unsuccessful(samples: Sequence[TrainingSample], threshold: float) -> list[str | None]:
    """Drop what earned less than ``threshold``."""
    return [None if sample.total >= threshold else "unsuccessful" for sample in samples]


def zero_variance(samples: Sequence[TrainingSample], tolerance: float) -> list[str | None]:
    """Drop the groups whose attempts all earned the same (a group of one included): their advantages are 0."""
    totals, groups = _totals(samples)
    return [None if useful else "zero variance" for useful in varies(totals, groups, tolerance).tolist()]


def top_variance(samples: Sequence[TrainingSample], share: float) -> list[str | None]:
    """Keep the ``share`` of groups (at least one) whose rewards vary most; of equals the earlier ones."""
    if not samples:
        return []
    totals, groups = _totals(samples)
    present, place = torch.unique(groups, return_inverse=True)
    first = segment_first(place)
    ranked = deviation(totals, groups)[first].argsort(descending=True, stable=True)
    kept = set(present[ranked[: max(1, round(share * len(present)))]].tolist())
    return [None if sample.group in kept else "little variance" for sample in samples]


def _totals(samples: Sequence[TrainingSample]) -> tuple[Tensor, Tensor]:
    totals = torch.tensor([sample.total for sample in samples], dtype=torch.float64)
    return totals, torch.tensor([sample.group for sample in samples], dtype=torch.int64)
