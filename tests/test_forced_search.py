"""The baseline of forced searches: the first completions of an attempt begin with a search, the next with an answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from benchmark_scripts import load_benchmark

from agent_r1.core.inference import (
    Capabilities,
    Completion,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    StopCondition,
    WeightUpdate,
)

BENCHMARK = load_benchmark("forced_search")


@dataclass
class CountingEngine:
    """Completes each prompt with 1 2 3 .., until the stop condition is met or there are no tokens left."""

    capabilities: Capabilities = field(default_factory=lambda: Capabilities(frozenset()))
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        self.prompts.append(prompt.token_ids)
        sampled: list[int] = []
        stop = params.stop_condition
        while len(sampled) < params.max_tokens and not (stop is not None and stop.is_met(sampled)):
            sampled.append(len(sampled) + 1)
        spans = (PolicyVersionSpan(0, 4),)
        return Completion(tuple(sampled), tuple(-0.5 for _ in sampled), "stop", spans)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return update.version

    async def release(self, session_id: str) -> None: ...

    async def close(self) -> None: ...


def test_each_attempt_searches_as_often_as_wanted_and_then_answers() -> None:
    inner = CountingEngine()
    engine = BENCHMARK.ForcedEngine(inner, 2, search=(70, 71), answer=(80,))

    async def attempt(name: str) -> list[tuple[int, ...]]:
        params = SamplingParams(max_tokens=4)
        completions = [await engine.generate(Prompt((9,)), params, session_id=name) for _ in range(3)]
        await engine.release(name)
        return [completion.token_ids for completion in completions]

    expected = [(70, 71, 1, 2), (70, 71, 1, 2), (80, 1, 2, 3)]
    assert asyncio.run(attempt("a")) == expected
    assert asyncio.run(attempt("b")) == expected
    assert asyncio.run(attempt("a")) == expected  # a released attempt is forgotten
    assert inner.prompts[:3] == [(9, 70, 71), (9, 70, 71), (9, 80)]


def test_the_stop_condition_sees_the_forced_tokens() -> None:
    engine = BENCHMARK.ForcedEngine(CountingEngine(), 1, search=(70, 71), answer=(80,))
    stop = StopCondition(("</search>",), lambda ids: list(ids) == [70, 71, 1, 2, 3])
    completion = asyncio.run(engine.generate(Prompt((9,)), SamplingParams(stop_condition=stop), session_id="a"))
    assert completion.token_ids == (70, 71, 1, 2, 3)
    assert completion.logprobs == (0.0, 0.0, -0.5, -0.5, -0.5)
