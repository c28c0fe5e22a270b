"""The reward rises while an algorithm trains a tiny model on episodes that the model itself samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from updating import make_updater, update

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.core.trajectory import Group, Trajectory
from agent_r1.trainer.updater import PolicyUpdater

QUESTIONS = 4
MEMBERS = 16
UPDATES = 50


@torch.no_grad()
def draw(model: PreTrainedModel, prompts: torch.Tensor, random: torch.Generator) -> tuple[list[int], list[float]]:
    """Sample one token after each prompt (B, T) at temperature 1; return the tokens and their log-probabilities."""
    table = model(input_ids=prompts).logits[:, -1].log_softmax(-1)
    tokens = torch.multinomial(table.exp(), 1, generator=random)
    return tokens[:, 0].tolist(), table.gather(-1, tokens)[:, 0].tolist()


def sample_groups(make: Any, model: PreTrainedModel, random: torch.Generator) -> list[Group]:
    """Sample episodes of two turns: the right call for question q is token q + 4, the right answer q + 8."""
    questions = [question for question in range(QUESTIONS) for _ in range(MEMBERS)]
    calls, first = draw(model, torch.tensor([[question] for question in questions]), random)
    seen = torch.tensor([[question, call, 15, question] for question, call in zip(questions, calls, strict=True)])
    answers, second = draw(model, seen, random)

    def trajectory(place: int) -> Trajectory:
        question, call, answer = questions[place], calls[place], answers[place]
        turns = make.chain(([question], [call]), ([15, question], [answer]))
        recorded = [
            replace(turn, logprobs=(values[place],)) for turn, values in zip(turns, (first, second), strict=True)
        ]
        rewards = {"call": (float(call == question + 4), 0.0), "answer": float(answer == question + 8)}
        return make.trajectory(recorded, rewards, group=question, member=place % MEMBERS)

    return make.groups(*(trajectory(place) for place in range(len(questions))))


def rewards_during_training(name: str, make: Any, *, honest: bool) -> tuple[float, float]:
    """Return the mean reward of the first and of the last five updates."""
    model, random = make.model(spread=0.02), torch.Generator().manual_seed(0)
    updater = make_updater(model, ALGORITHMS[name], learning_rate=6e-3, critic_learning_rate=1e-2)
    earned: list[float] = []
    for _ in range(UPDATES):
        groups = sample_groups(make, model, random)
        earned.append(update(updater, groups).metrics["reward"] if honest else train_on_noise(updater, groups, random))
    return sum(earned[:5]) / 5, sum(earned[-5:]) / 5


def train_on_noise(updater: PolicyUpdater, groups: list[Group], random: torch.Generator) -> float:
    """Update on random rewards, and return the true mean reward."""
    attempts = [trajectory for group in groups for trajectory in group.trajectories]
    noisy = [
        replace(
            group,
            trajectories=tuple(
                replace(trajectory, rewards={"noise": float(torch.rand((), generator=random))})
                for trajectory in group.trajectories
            ),
        )
        for group in groups
    ]
    update(updater, noisy)
    return sum(trajectory.rewards["call"][0] + trajectory.rewards["answer"] for trajectory in attempts) / len(attempts)


def test_the_reward_rises(make: Any) -> None:
    before, after = rewards_during_training("grpo", make, honest=True)
    assert before < 0.6 and after > 1.4  # of 2


def test_the_reward_does_not_rise_with_random_rewards(make: Any) -> None:
    before, after = rewards_during_training("grpo", make, honest=False)
    assert after < before + 0.3
