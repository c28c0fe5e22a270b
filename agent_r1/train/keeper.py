"""What is kept of a run: checkpoints as it goes, the best by validation, the final model."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from agent_r1.core.world import World
from agent_r1.learn.learner import Learner
from agent_r1.rollout.agent import Agent
from agent_r1.train.checkpoint import save_checkpoint, save_model
from agent_r1.train.config import TrainConfig
from agent_r1.train.evaluate import Method, answers_of
from agent_r1.train.prepare import Policy, limits_of


class Keeper:
    """Validates and saves after optimizer steps; at the end the best weights become the model.

    The best is chosen on the world's validation split alone. Where nothing is validated, the last is kept.
    """

    def __init__(
        self, policy: Policy, world: World, learner: Learner, agent: Agent, config: TrainConfig, folder: Path
    ) -> None:
        self._policy, self._world, self._learner = policy, world, learner
        self._agent, self._config, self._folder = agent, config, folder
        self._best: tuple[float, dict[str, torch.Tensor]] | None = None

    async def after(self, step: int) -> dict[str, float]:
        """What is due after a step; the validation's measures, where it was."""
        measured: dict[str, float] = {}
        if self._due(step, self._config.evaluate_every) and self._world.validation is not None:
            measured = await self._validate(self._world.validation)
        if self._due(step, self._config.checkpoint_every):
            save_checkpoint(self._folder, step, self._policy.model, self._policy.tokenizer, self._learner.state())
        return measured

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self._config.steps)

    async def _validate(self, split: str) -> dict[str, float]:
        method = Method("validation", self._agent, self._world.env)
        count = self._config.evaluate_n
        answers = await answers_of(method, self._world, split, count, limits_of(self._config))
        em = statistics.fmean(answer.em for answer in answers)
        if self._best is None or em >= self._best[0]:
            state = self._policy.model.state_dict()
            self._best = (em, {name: tensor.detach().clone() for name, tensor in state.items()})
        return {"validation_em": em, "validation_f1": statistics.fmean(answer.f1 for answer in answers)}

    async def choose(self) -> None:
        """Give the model its best weights, and save it."""
        if self._best is not None:
            self._learner.adopt(self._best[1])
        save_model(self._folder, self._policy.model, self._policy.tokenizer)
