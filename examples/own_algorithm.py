"""An algorithm of your own: the group's median for a baseline, clipped higher above than below.

agent-r1 train --algorithm examples/own_algorithm.py:MEDIAN
"""

import torch

from agent_r1.algorithms.advantages.advantage import Advantage, on_tokens
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.policy_losses import Clip


class MedianRelative(Advantage):
    """What a trajectory earned minus the median of its group."""

    needs = frozenset({"group"})
    formula = "R - median R of the group"

    def estimate(self, batch, signals):
        returns, group = batch.returns, batch.trajectory_group
        medians = torch.stack([returns[group == number].median() for number in group.unique()])
        return on_tokens(returns - medians[group], batch)


MEDIAN = Algorithm(name="median", advantage=MedianRelative(), loss=Clip(clip_high=0.28))
