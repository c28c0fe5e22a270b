"""Sampled log-probabilities against a plain forward pass, stop positions, and micro-batches (T14 to T16)."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from fault_case import Case, Outcome
from hostile_runs import case, control, policy_of, small_taskset, train

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.inference import Completion, Prompt, SamplingParams
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Group
from agent_r1.inference import torch_engine
from agent_r1.trainer import forward_backward
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater

CLOSE = 1e-4
"""Largest allowed difference between a log-probability in float32 and in float64."""


def sample_all(model: Any, requests: Sequence[tuple[Prompt, SamplingParams]]) -> list[Completion]:
    """Return the completions of all requests, generated at the same time."""

    async def ask() -> list[Completion]:
        engine = torch_engine.TorchEngine(copy.deepcopy(model), 256)
        try:
            return await asyncio.gather(*(engine.generate(*one) for one in requests))
        finally:
            await engine.close()

    return asyncio.run(ask())


def random_prompts(seed: int, vocabulary: int, count: int) -> list[Prompt]:
    draw = random.Random(seed)
    return [Prompt(tuple(draw.randrange(vocabulary) for _ in range(draw.randint(1, 90)))) for _ in range(count)]


def compare_logprobs(seed: int, shift: int = 0) -> Outcome:
    """Compare the log-probabilities of sampled tokens with float64; ``shift`` moves the positions."""
    model = policy_of(small_taskset()).model
    exact = copy.deepcopy(model).double()
    temperatures = (0.6, 1.0)
    requests = [
        (prompt, SamplingParams(temperatures[number % 2], max_tokens=12, seed=seed + number))
        for number, prompt in enumerate(random_prompts(seed, model.config.vocab_size, (1, 8)[seed % 2] * 2))
    ]
    violations, tokens = [], 0
    for (prompt, sampling), completion in zip(requests, sample_all(model, requests), strict=True):
        with torch.no_grad():
            logits = exact(torch.tensor([prompt.token_ids + completion.token_ids])).logits[0] / sampling.temperature
        places = torch.arange(len(completion.token_ids)) + len(prompt.token_ids) - 1 + shift
        true = torch.log_softmax(logits, -1)[places, torch.tensor(completion.token_ids)]
        gap = float((true - torch.tensor(completion.logprobs, dtype=torch.float64)).abs().max())
        tokens += len(completion.token_ids)
        if gap > CLOSE:
            violations.append(f"a log-probability is off by {gap:.2g} at temperature {sampling.temperature}")
    return Outcome(tokens, tuple(violations))


def compare_stops(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """Stop tokens at the first, some, the last or no position; length limits at every position."""
    model, length = policy_of(small_taskset()).model, 10
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        opening = random_prompts(seed, model.config.vocab_size, 4)
        free = sample_all(model, [(prompt, SamplingParams(max_tokens=length, seed=seed)) for prompt in opening])
        requests = [
            (prompt, SamplingParams(max_tokens=most, stop_token_ids=ids, seed=seed))
            for prompt, completion in zip(opening, free, strict=True)
            for most in range(1, length + 1)
            for ids in ((), *((token,) for token in dict.fromkeys(completion.token_ids)))
        ]
        completions = sample_all(model, requests)
    whole = {prompt: completion.token_ids for prompt, completion in zip(opening, free, strict=True)}
    violations = [
        f"{completion.token_ids} ({completion.finish_reason}) of {whole[prompt]}, "
        f"stopping at {sampling.stop_token_ids} or {sampling.max_tokens} tokens"
        for (prompt, sampling), completion in zip(requests, completions, strict=True)
        if (completion.token_ids, completion.finish_reason, len(completion.logprobs))
        != expected(whole[prompt], sampling)
    ]
    return Outcome(len(requests), tuple(violations))


def expected(whole: tuple[int, ...], sampling: SamplingParams) -> tuple[tuple[int, ...], str, int]:
    """Return the tokens, reason and length of a generation that would be ``whole`` without a limit."""
    for place, token in enumerate(whole[: sampling.max_tokens], start=1):
        if token in sampling.stop_token_ids:
            return whole[:place], "stop", place
    return whole[: sampling.max_tokens], "length", sampling.max_tokens


def force_end_token(request: Any) -> None:
    """Replace the last token of a truncated generation by one that was not sampled."""
    if request.finish_reason == "length":
        request.token_ids[-1] = 0
    RESOLVE(request)


RESOLVE = torch_engine._resolve


def compare_micro_batches(seed: int, patches: tuple[Any, ...] = ()) -> Outcome:
    """Train one batch in passes of several sizes and with its groups in two orders."""
    trajectories = train(small_taskset(), seed, steps=1).trajectories.values()
    serials = sorted({trajectory.attempt.group_id for trajectory in trajectories})
    groups = [
        Group(serial, Task(those[0].task_id, ()), tuple(those))
        for serial in serials
        if (those := [trajectory for trajectory in trajectories if trajectory.attempt.group_id == serial])
    ]
    whole = gradient_of(groups, 10**6)
    violations = []
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        for tokens in PASSES:
            apart = float((gradient_of(groups[:: (-1) ** tokens], tokens) - whole).norm() / whole.norm())
            if not apart < CLOSE:
                violations.append(f"passes of {tokens} tokens lead to gradients that are {apart:.2g} apart")
    return Outcome(len(PASSES), tuple(violations))


def gradient_of(groups: Sequence[Group], micro_tokens: int) -> torch.Tensor:
    """Return the gradient of one update, from Adam's first moments: its step would hide the size of the gradient."""
    settings = TrainerConfig(micro_tokens=micro_tokens, max_grad_norm=1e9)
    algorithm = build_algorithm("reinforce++", {})
    trainer = SingleProcessTrainer(policy_of(small_taskset()).model, algorithm, settings, temperature=1.0)
    updater = PolicyUpdater(trainer, algorithm, settings, reward_weights={}, seed=0, steps=1000)
    asyncio.run(updater.update([updater.select(group) for group in groups]))
    moments = updater.state().tensors.items()
    return torch.cat([tensor.flatten() for name, tensor in moments if name.endswith("exp_avg")])


PASSES = (1, 64, 301, 1000, 4001)


def drop_micro_batch(*arguments: Any) -> Any:
    """Return the plan of a pass without the first micro-batch, if there are several."""
    prefix, micro_batches = PLAN_PASSES(*arguments)
    micro = list(micro_batches)
    return prefix, iter(micro[:1] if len(micro) == 1 else micro[1:])


PLAN_PASSES = forward_backward.plan_passes
DROPPED_MICRO_BATCH = patch.object(forward_backward, "plan_passes", drop_micro_batch)
FORCED_END = patch.object(torch_engine, "_resolve", force_end_token)

NUMERIC_AGREEMENT: tuple[Case, ...] = (
    case(
        "T16",
        "a batch in passes of many sizes, its groups in another order",
        f"the same gradient, within {CLOSE:g} of its length",
        compare_micro_batches,
        100,
        1,
        control("a pass is dropped", "lead to gradients", compare_micro_batches, patches=(DROPPED_MICRO_BATCH,)),
    ),
    case(
        "T14",
        "a stop token first, anywhere, last, never; a length of each size",
        "ends there and nowhere else, with that reason; every token was sampled",
        compare_stops,
        5000,
        400,
        control("an end token is appended", "(length) of", compare_stops, patches=(FORCED_END,)),
    ),
    case(
        "T15c",
        "prompts of random tokens, temperatures 0.6 and 1, one or many at a time",
        f"log-probabilities as in float64, within {CLOSE:g}",
        compare_logprobs,
        5000,
        200,
        control("off by one", "a log-probability is off", compare_logprobs, shift=-1),
    ),
)
