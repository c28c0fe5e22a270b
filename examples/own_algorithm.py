"""An algorithm of your own: the median of the group as the baseline, and a larger upper clip bound.

agent-r1 train --algorithm examples/own_algorithm.py:MEDIAN
"""

from typing import Literal

import torch

from agent_r1 import Advantage, Algorithm, Clip


class MedianRelative(Advantage):
    """The return of a trajectory minus the median return of its group."""

    name: Literal["median_relative"] = "median_relative"
    needs = frozenset({"group"})
    formula = "R - median R of the group"

    def compute(self, batch, outputs):
        returns, group = batch.returns, batch.trajectory_group  # (M,), (M,)
        medians = torch.stack([returns[group == number].median() for number in group.unique()])  # (G,)
        return (returns - medians[group])[batch.token_trajectory]  # (N,), the same for all tokens of a trajectory


MEDIAN = Algorithm(name="median", advantage=MedianRelative(), loss=Clip(clip_high=0.28))
