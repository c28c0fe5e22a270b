"""Tiny models, and trajectories and groups made by hand, for tests of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Continuation, Group, Rewards, Status, Trajectory, Turn
from agent_r1.rollout.replay import valued_turns

SYSTEM = [*range(1, 16)] * 5
"""75 tokens with which prompts begin."""


class Make:
    """Makes trajectories, groups and models by hand, with sensible defaults."""

    def turn(
        self,
        index: int,
        new: Sequence[int],
        act: Sequence[int],
        *,
        parent: int | None = None,
        logprobs: Sequence[float] | None = None,
        rewards: Mapping[str, float] | None = None,
        version: int = 0,
        **more: Any,
    ) -> Turn:
        """Return a turn that observed ``new`` after its parent and sampled ``act``; ``more`` are further fields."""
        return Turn(
            index=index,
            parent=parent,
            new_ids=tuple(new),
            action_ids=tuple(act),
            logprobs=tuple(logprobs) if logprobs is not None else (-1.0,) * len(act),
            version_spans=(PolicyVersionSpan(0, version),),
            rewards=rewards or {},
            **{"finish_reason": "stop", "action": Action(Message.assistant(""), ""), **more},
        )

    def chain(self, *pieces: tuple[Sequence[int], Sequence[int]]) -> tuple[Turn, ...]:
        """Return turns that append to the context, from pairs of observed and sampled tokens."""
        return tuple(
            self.turn(index, new, act, parent=index - 1 if index else None) for index, (new, act) in enumerate(pieces)
        )

    def trajectory(
        self,
        turns: Sequence[Turn],
        rewards: Rewards | None = None,
        *,
        group: int = 0,
        member: int = 0,
        status: Status = Status.COMPLETED,
        truncated: bool = False,
        reason: str | None = None,
        start: Sequence[Message] = (),
    ) -> Trajectory:
        attempt = AttemptId("run", f"task-{group}", group, member)
        rewards = rewards if rewards is not None else {}
        return Trajectory(attempt, attempt.task, tuple(turns), status, truncated, rewards, reason, tuple(start))

    def groups(self, *trajectories: Trajectory, greedy: Mapping[int, Trajectory] | None = None) -> list[Group]:
        """Return the trajectories grouped by their attempt ids, with the greedy attempts of some groups.

        From each turn after the first, attempt k is continued twice, with a mean return of 0.6 - 0.4 k.
        """
        group_ids = sorted({trajectory.attempt.group_id for trajectory in trajectories})
        return [
            Group(
                group_id,
                Task(f"task-{group_id}", ()),
                tuple(one for one in trajectories if one.attempt.group_id == group_id),
                (greedy or {}).get(group_id),
                continuations=tuple(
                    Continuation(one.attempt, turn, replace(one, rewards={"score": 0.6 - 0.4 * member + noise}))
                    for one in trajectories
                    if one.attempt.group_id == group_id
                    for member in [one.attempt.sample_index]
                    for turn in valued_turns(one)
                    for noise in (-0.2, 0.2)
                ),
            )
            for group_id in group_ids
        ]

    def random_groups(
        self, seed: int, *, groups: int = 3, members: int = 4, turns: int = 3, greedy: bool = False
    ) -> list[Group]:
        """Return episodes of random tokens below 16, of random lengths, with random rewards."""
        random = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=random))

        def tokens(low: int, high: int) -> list[int]:
            return torch.randint(0, 16, (draw(low, high),), generator=random).tolist()

        def attempt(group: int, member: int) -> Trajectory:
            chain = self.chain(*((tokens(1, 7), tokens(1, 5)) for _ in range(draw(1, turns + 1))))
            score = 3 * float(torch.rand((), generator=random))
            return self.trajectory(chain, {"score": score}, group=group, member=member)

        attempts = [attempt(group, member) for group in range(groups) for member in range(members)]
        compared = {group: attempt(group, members) for group in range(groups)} if greedy else None
        return self.groups(*attempts, greedy=compared)

    def prompted_groups(self, size: int) -> list[Group]:
        """Return two groups of ``size`` attempts with equal prompts and some equal actions, turns and branches.

        The prompts of both groups begin with ``SYSTEM``.
        """
        random = torch.Generator().manual_seed(0)

        def tokens(count: int) -> list[int]:
            return torch.randint(0, 16, (count,), generator=random).tolist()

        def turns(prompt: list[int], member: int) -> Sequence[Turn]:
            first = self.turn(0, prompt, [3, 4] if member % 2 else [3, 5, member % 16])
            if member % 4 == 3:  # two branches, and a context that was rewritten
                branches = [self.turn(1, [7], tokens(2), parent=0), self.turn(2, [8], tokens(1), parent=0)]
                return [first, *branches, self.turn(3, [*SYSTEM, 9], tokens(2))]
            return [first, self.turn(1, [7], tokens(2), parent=0), self.turn(2, tokens(2), tokens(2), parent=1)]

        prompts = [[*SYSTEM, *tokens(20)] for _ in range(2)]
        return self.groups(
            *(
                self.trajectory(turns(prompt, member), {"score": float(member % 3)}, group=group, member=member)
                for group, prompt in enumerate(prompts)
                for member in range(size)
            )
        )

    def model(self, seed: int = 0, *, spread: float = 0.2) -> PreTrainedModel:
        """Return a Qwen2 of two layers of width 32; the larger ``spread``, the more peaked its distribution."""
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=spread,
        )
        return Qwen2ForCausalLM(config).eval()

    def exact_model(self, seed: int = 0) -> PreTrainedModel:
        """Return a GPT-2 that computes in float64 throughout: Qwen2 normalizes in float32, whatever its weights are."""
        torch.manual_seed(seed)
        config = GPT2Config(vocab_size=16, n_positions=128, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2)
        return GPT2LMHeadModel(config).double().eval()


@pytest.fixture
def make() -> Make:
    return Make()
