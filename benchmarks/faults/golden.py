"""What the engine samples against a plain forward pass, where it stops, what divided batches teach (T14 to T16)."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from case import Case, Outcome
from hostile import case, control, policy_of, ran, small_taskset

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.inference import Completion, Prompt, SamplingParams
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Group
from agent_r1.inference import torch_engine
from agent_r1.trainer import forward_backward as passes
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.learner import Learner

CLOSE = 1e-4
"""Largest difference of a log-probability in float32 from one in float64."""


def sampled(model: Any, asked: Sequence[tuple[Prompt, SamplingParams]]) -> list[Completion]:
    """What the engine makes of all of these, at the same time."""

    async def ask() -> list[Completion]:
        engine = torch_engine.TorchEngine(copy.deepcopy(model), 256)
        try:
            return await asyncio.gather(*(engine.generate(*one) for one in asked))
        finally:
            await engine.close()

    return asyncio.run(ask())


def prompts(seed: int, vocabulary: int, count: int) -> list[Prompt]:
    draw = random.Random(seed)
    return [Prompt(tuple(draw.randrange(vocabulary) for _ in range(draw.randint(1, 90)))) for _ in range(count)]


def golden(seed: int, shift: int = 0) -> Outcome:
    """Log-probabilities of sampled tokens; ``shift`` takes them from so many places on."""
    model = policy_of(small_taskset()).model
    exact = copy.deepcopy(model).double()
    temperatures = (0.6, 1.0)
    asked = [
        (prompt, SamplingParams(temperatures[number % 2], max_tokens=12, seed=seed + number))
        for number, prompt in enumerate(prompts(seed, model.config.vocab_size, (1, 8)[seed % 2] * 2))
    ]
    broken, tokens = [], 0
    for (prompt, sampling), said in zip(asked, sampled(model, asked), strict=True):
        with torch.no_grad():
            logits = exact(torch.tensor([prompt.token_ids + said.token_ids])).logits[0] / sampling.temperature
        places = torch.arange(len(said.token_ids)) + len(prompt.token_ids) - 1 + shift
        true = torch.log_softmax(logits, -1)[places, torch.tensor(said.token_ids)]
        gap = float((true - torch.tensor(said.logprobs, dtype=torch.float64)).abs().max())
        tokens += len(said.token_ids)
        if gap > CLOSE:
            broken.append(f"a log-probability is off by {gap:.2g} at temperature {sampling.temperature}")
    return Outcome(tokens, tuple(broken))


def stops(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """The token that ends a generation stands first, somewhere, last, or nowhere; the length ends it at each place."""
    model, length = policy_of(small_taskset()).model, 10
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        opening = prompts(seed, model.config.vocab_size, 4)
        free = sampled(model, [(prompt, SamplingParams(max_tokens=length, seed=seed)) for prompt in opening])
        asked = [
            (prompt, SamplingParams(max_tokens=most, stop_token_ids=ids, seed=seed))
            for prompt, said in zip(opening, free, strict=True)
            for most in range(1, length + 1)
            for ids in ((), *((token,) for token in dict.fromkeys(said.token_ids)))
        ]
        given = sampled(model, asked)
    whole = {prompt: said.token_ids for prompt, said in zip(opening, free, strict=True)}
    broken = [
        f"{said.token_ids} ({said.finish_reason}) of {whole[prompt]}, stopping at {sampling.stop_token_ids} or {sampling.max_tokens} tokens"
        for (prompt, sampling), said in zip(asked, given, strict=True)
        if (said.token_ids, said.finish_reason, len(said.logprobs)) != expected(whole[prompt], sampling)
    ]
    return Outcome(len(asked), tuple(broken))


def expected(whole: tuple[int, ...], sampling: SamplingParams) -> tuple[tuple[int, ...], str, int]:
    """What a generation gives that, left alone, would go on as ``whole``."""
    for place, token in enumerate(whole[: sampling.max_tokens], start=1):
        if token in sampling.stop_token_ids:
            return whole[:place], "stop", place
    return whole[: sampling.max_tokens], "length", sampling.max_tokens


def forced(complete: Callable[..., Completion]) -> Callable[..., Completion]:
    """An engine that ends what was cut with a token it never sampled."""

    def completion(request: Any) -> Completion:
        said = complete(request)
        return replace(said, token_ids=(*said.token_ids[:-1], 0)) if said.finish_reason == "length" else said

    return completion


def divided(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """One batch, in passes of many sizes and with its groups in any order."""
    lived = ran(small_taskset(), seed, steps=1).trajectories.values()
    serials = sorted({trajectory.attempt.group_id for trajectory in lived})
    groups = [
        Group(serial, Task(those[0].task_id, ()), tuple(those))
        for serial in serials
        if (those := [trajectory for trajectory in lived if trajectory.attempt.group_id == serial])
    ]
    whole = learned(groups, 10**6)
    broken = []
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        for tokens in PASSES:
            apart = float((learned(groups[:: (-1) ** tokens], tokens) - whole).norm() / whole.norm())
            if not apart < CLOSE:
                broken.append(f"passes of {tokens} tokens lead to gradients that are {apart:.2g} apart")
    return Outcome(len(PASSES), tuple(broken))


def learned(groups: Sequence[Group], micro_tokens: int) -> torch.Tensor:
    """The gradient of one update, as Adam's first moments keep it: its step is as long where that is mere rounding."""
    settings = TrainerConfig(micro_tokens=micro_tokens, max_grad_norm=1e9)
    learner = Learner(
        policy_of(small_taskset()).model,
        build_algorithm("reinforce++", {}),
        settings,
        temperature=1.0,
        reward_weights={},
        seed=0,
    )
    learner.update(groups)
    moments = learner.state().tensors.items()
    return torch.cat([tensor.flatten() for name, tensor in moments if name.endswith("exp_avg")])


PASSES = (1, 64, 301, 1000, 4001)


def forgetting(blocks: Any, budget: int) -> Any:
    """Micro-batches of which one is forgotten where there are several."""
    micro = list(MICRO_BATCHES(blocks, budget))
    return micro[:1] if len(micro) == 1 else micro[1:]


MICRO_BATCHES = passes.micro_batches
FORGETTING = patch.object(passes, "micro_batches", forgetting)
FORCED = patch.object(torch_engine._Request, "completion", forced(torch_engine._Request.completion))

GOLDEN: tuple[Case, ...] = (
    case(
        "T16",
        "a batch in passes of many sizes, its groups in another order",
        f"the same gradient, within {CLOSE:g} of its length",
        divided,
        100,
        1,
        control("a pass is forgotten", "lead to gradients", divided, patches=(FORGETTING,)),
    ),
    case(
        "T14",
        "a stop token first, anywhere, last, never; a length of each size",
        "cut there and nowhere else, with that reason; no token that was not sampled",
        stops,
        5000,
        400,
        control("an end is put on what was cut", "(length) of", stops, patches=(FORCED,)),
    ),
    case(
        "T15c",
        "prompts of random tokens, temperatures 0.6 and 1, one or many at a time",
        f"log-probabilities as in float64, within {CLOSE:g}",
        golden,
        5000,
        200,
        control("off by one", "a log-probability is off", golden, shift=-1),
    ),
)
