"""The scorer that computes rewards with a reward model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from agent_r1.core.task import Task
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import RewardValue, Scores, Trajectory, Unscored
from agent_r1.reward_models.network import RewardModel

MICRO_TOKENS = 16384
"""The maximum number of tokens in one forward pass."""


@dataclass(frozen=True, slots=True, eq=False)
class RewardModelScorer:
    """A scorer with one reward, called ``name``, from a reward model.

    The prediction of the model is a reward if the model was trained with the loss "regression", otherwise a probability
    of success. The kind of the model determines what the scorer returns:

    - trajectory: the prediction for the whole trajectory.
    - turns: for each turn, the prediction after the turn minus the prediction before the turn. The prediction before
      the first turn counts as 0.
    - implicit: for each turn, the number that ``ImplicitReward`` describes.

    Example:
        RewardModelScorer(name="quality", model=load_reward_model(Path("rm"), tokenizer))
    """

    name: str
    model: RewardModel

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        refusals = [_refusal(trajectory) for trajectory in group]
        readable = [trajectory for trajectory, refusal in zip(group, refusals, strict=True) if refusal is None]
        values = iter(await run_in_thread(self._values, readable) if readable else [])
        return tuple({self.name: next(values) if refusal is None else refusal} for refusal in refusals)

    def _values(self, trajectories: Sequence[Trajectory]) -> list[RewardValue]:
        scores = self.model.score(trajectories, MICRO_TOKENS)
        if self.model.kind == "trajectory":
            return [self.model.prediction(score) for score, _ in scores]
        return [self._of_turns(one, turns) for one, (_, turns) in zip(trajectories, scores, strict=True)]

    def _of_turns(self, trajectory: Trajectory, scores: tuple[float, ...]) -> tuple[float, ...]:
        values = scores
        if self.model.kind == "turns":
            values = _rises(map(self.model.prediction, scores))
        elif self.model.implicit_reward == "probability":
            values = _rises(map(self.model.prediction, accumulate(scores)))  # V_k = sigma(S_k)
        remaining = iter(values)
        return tuple(next(remaining) if turn.action_ids else 0.0 for turn in trajectory.turns)


def _rises(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(after - before for before, after in pairwise((0.0, *values)))


def _refusal(trajectory: Trajectory) -> Unscored | None:
    if trajectory.has_images:
        return Unscored("the policy saw images, and reward models read only text")
    if not any(turn.action_ids for turn in trajectory.turns):
        return Unscored("there is no sampled token to read")
    return None
