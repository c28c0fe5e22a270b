"""Value-guided decoding: equal to plain decoding with one candidate, and exact with exact values."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedModel

from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import (
    Capabilities,
    Completion,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    ScoredTokens,
    StopCondition,
    WeightUpdate,
)
from agent_r1.inference.config import DecodeConfig, EngineConfig
from agent_r1.inference.guidance import Critic, ValueGuidedEngine
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.value_head import build_value_model

Tokens = tuple[int, ...]
VOCABULARY, LENGTH, BETA, SAMPLES = 3, 3, 0.5, 800
LEAVES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
UNLIKELY = 54.1  # chi-squared with 26 degrees of freedom exceeds it with probability 0.001
REWARDS = {leaf: random.Random(f"reward {leaf}").random() for leaf in LEAVES}
WRONG = {leaf: random.Random(f"wrong {leaf}").random() for leaf in LEAVES}


def policy(state: Tokens) -> list[float]:
    """Return pi(a | state) of each token: a fixed table."""
    weights = [0.2 + random.Random(f"{(*state, token)}").random() for token in range(VOCABULARY)]
    return [weight / sum(weights) for weight in weights]


POLICY = {state: policy(state) for n in range(LENGTH) for state in itertools.product(range(VOCABULARY), repeat=n)}


def chi_squared(samples: Sequence[Tokens]) -> float:
    """Return sum (observed - expected)^2 / expected over the leaves, with the probabilities pi exp(R / beta) / Z."""
    weights = {
        leaf: math.prod(POLICY[leaf[:i]][leaf[i]] for i in range(LENGTH)) * math.exp(REWARDS[leaf] / BETA)
        for leaf in LEAVES
    }
    scale, counts = len(samples) / sum(weights.values()), Counter(samples)
    return sum((counts[leaf] - scale * weight) ** 2 / (scale * weight) for leaf, weight in weights.items())


@dataclass
class TableValues:
    """A value function that a Python function computes from the tokens after the prompt of one token."""

    function: Callable[[Tokens], float]
    seen: list[ScoredTokens] = field(default_factory=list)

    async def values(self, session_id: str, context: ScoredTokens, branches: Sequence[ScoredTokens]) -> list[float]:
        self.seen.append(context)
        return [self.function((context + branch).token_ids[1:]) for branch in branches]

    async def release(self, session_id: str) -> None: ...

    async def close(self) -> None: ...


class TableEngine:
    """Samples from the table ``POLICY``; the state is what follows the first token of the prompt."""

    capabilities = Capabilities(frozenset())

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        state, rng, logprobs = prompt.token_ids[1:], random.Random(params.seed), []
        for _ in range(params.max_tokens):
            token = rng.choices(range(VOCABULARY), POLICY[state])[0]
            logprobs.append(math.log(POLICY[state][token]))
            state = (*state, token)
        done = state[len(prompt.token_ids) - 1 :]
        return Completion(done, tuple(logprobs), "length", (PolicyVersionSpan(0, 0),))

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return update.version

    async def release(self, session_id: str) -> None: ...

    async def close(self) -> None: ...


def sample_leaves(config: DecodeConfig, value: Callable[[Tokens], float], count: int = SAMPLES) -> list[Tokens]:
    async def run() -> list[Tokens]:
        engine, done = ValueGuidedEngine(TableEngine(), TableValues(value), config), []
        for seed in range(count):
            params = SamplingParams(max_tokens=LENGTH, seed=seed)
            done.append((await engine.generate(Prompt((9,)), params, session_id=f"{seed}")).token_ids)
            await engine.release(f"{seed}")
        return done

    return asyncio.run(run())


def guide(**settings: object) -> DecodeConfig:
    return DecodeConfig.model_validate({"method": "step", "critic": "a", "beta": BETA, **settings})


def test_with_exact_values_sequences_are_sampled_by_their_rewards() -> None:
    assert chi_squared(sample_leaves(guide(candidates=12), REWARDS.__getitem__)) < UNLIKELY
    assert chi_squared(sample_leaves(guide(candidates=12), WRONG.__getitem__)) > 2 * UNLIKELY


def test_values_see_the_log_probabilities_of_earlier_turns() -> None:
    async def run() -> None:
        values = TableValues(lambda _: 0.0)
        engine = ValueGuidedEngine(TableEngine(), values, guide(candidates=2))
        first = await engine.generate(Prompt((9,)), SamplingParams(max_tokens=1, seed=1), session_id="a")
        await engine.generate(Prompt((9, *first.token_ids, 2)), SamplingParams(max_tokens=1), session_id="a")
        assert values.seen[1] == ScoredTokens((9, *first.token_ids, 2), (0.0, *first.logprobs, 0.0))

    asyncio.run(run())


END = 3


async def converse(engine: ValueGuidedEngine | TorchEngine, temperature: float) -> list[Completion]:
    """Run a conversation of three turns, with observations between them."""
    state, done = (5, 6, 7), []
    stop = StopCondition((), lambda token_ids: len(token_ids) > 3 and token_ids[-1] % 5 == 0)
    for turn in range(3):
        params = SamplingParams(temperature, max_tokens=12, stop_token_ids=(END,), seed=turn, stop_condition=stop)
        done.append(await engine.generate(Prompt(state), params, session_id="conversation"))
        state = (*state, *done[-1].token_ids, 11, 12 + turn)
    await engine.release("conversation")
    return done


def converse_guided(model: PreTrainedModel, config: DecodeConfig | None, temperature: float) -> list[Completion]:
    async def run() -> list[Completion]:
        inner = TorchEngine(copy.deepcopy(model), 256, EngineConfig(max_sequences=8, kv_cache_gib=0.02))
        flat = TableValues(lambda _: 0.0)
        engine = inner if config is None else ValueGuidedEngine(inner, flat, config)
        done = await converse(engine, temperature)
        await engine.close()
        return done

    return asyncio.run(run())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_candidate_is_plain_decoding(tiny_model: PreTrainedModel, temperature: float) -> None:
    plain = converse_guided(tiny_model, None, temperature)
    assert converse_guided(tiny_model, guide(candidates=1), temperature) == plain


def make_critic(model: PreTrainedModel) -> Critic:
    torch.manual_seed(0)
    value_model = build_value_model(model, reads_logprobs=True)
    torch.nn.init.normal_(value_model.head.weight)
    return Critic(value_model)


def test_branches_in_one_pass_have_the_values_of_separate_passes(tiny_model: PreTrainedModel) -> None:
    critic = make_critic(tiny_model)
    context = ScoredTokens(tuple(range(10)), (0.0,) * 6 + (-0.5, -1.0, -2.0, -0.1))
    branches = [
        ScoredTokens((), ()),
        ScoredTokens((4, 5), (-0.3, -0.2)),
        ScoredTokens((4, 6, 7), (-0.3, -1.2, -0.7)),
        ScoredTokens((8,), (-3.0,)),
        ScoredTokens((4, 9), (-0.3, -0.4)),
    ]

    async def run() -> None:
        for said in (context, context + branches[2] + ScoredTokens((9,), (0.0,)), context + branches[1], context):
            found = await critic.values("a", said, branches)
            assert found == pytest.approx([separate_value(critic, said + branch) for branch in branches], abs=1e-4)
        await critic.close()

    asyncio.run(run())


@torch.no_grad()
def separate_value(critic: Critic, sequence: ScoredTokens) -> float:
    values = critic._model(torch.tensor([sequence.token_ids]), logprobs=torch.tensor([sequence.logprobs]))
    return float(values[0, -1])


def test_the_context_is_computed_once(tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    critic, sizes = make_critic(tiny_model), []
    forward = type(critic._model).forward
    monkeypatch.setattr(
        type(critic._model), "forward", lambda self, ids, *rest: sizes.append(ids.shape) or forward(self, ids, *rest)
    )
    context = ScoredTokens(tuple(range(40)), (0.0,) * 40)
    branch = ScoredTokens((7, 8, 9), (-1.0,) * 3)

    async def run() -> None:
        await critic.values("a", context, [branch, branch + ScoredTokens((1,), (-1.0,))])
        await critic.values("a", context + branch, [branch])
        await critic.close()

    asyncio.run(run())
    assert sizes == [(1, 40 + 3 + 4), (1, 3 + 3)]


def test_many_conversations_share_few_slots(tiny_model: PreTrainedModel) -> None:
    # Each waits until all slots of its candidates are free: otherwise each would hold what another one waits for.
    async def run() -> None:
        config = EngineConfig(max_sequences=7, kv_cache_gib=0.0003)
        inner = TorchEngine(copy.deepcopy(tiny_model), 64, config)
        slots = inner.capabilities.max_sessions or 0
        engine = ValueGuidedEngine(inner, TableValues(lambda _: 0.0), guide(candidates=3))
        assert 3 < slots < 12 * 3

        async def attempt(name: str) -> None:
            for turn in range(2):
                prompt = Prompt((1,) * (turn + 2))
                await engine.generate(prompt, SamplingParams(max_tokens=3, seed=turn), session_id=name)
            await engine.release(name)

        async with asyncio.timeout(120):
            await asyncio.gather(*(attempt(f"{index}") for index in range(12)))
        await engine.close()

    asyncio.run(run())


def test_an_engine_without_room_for_the_candidates_is_refused() -> None:
    class Plain(TableEngine):
        capabilities = Capabilities(frozenset(), max_sessions=4)

    with pytest.raises(InvalidInput, match=r"decode\.candidates: got 4, and a KV cache for 4 sequences"):
        ValueGuidedEngine(Plain(), TableValues(REWARDS.__getitem__), guide(candidates=4))
