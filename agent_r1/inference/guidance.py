"""Actions that a critic chooses: several candidates are sampled from the policy, and one of them is taken.

A beam search over turns, which needs the environment, is in ``rollout.beam``.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.inference import (
    Capabilities,
    Completion,
    InferenceEngine,
    PolicyVersion,
    Prompt,
    SamplingParams,
    ScoredTokens,
    ValueFunction,
    WeightUpdate,
)
from agent_r1.core.threads import WorkerThread
from agent_r1.inference.config import DecodeConfig
from agent_r1.inference.pool import seed_at
from agent_r1.model.forward import CachedPrefix, supports_tree_mask
from agent_r1.model.value_head import ValueModel

CHOICE = -1  # a "position" for seed_at that no token has


class ValueGuidedEngine:
    """An ``InferenceEngine`` that samples N actions from ``engine`` for each request of a session, and returns one.

    Let s be the prompt, and Q(s, a) the predicted sum of the rewards after the action a. The action is chosen with a
    probability proportional to exp(Q(s, a) / beta); beta 0 chooses the largest Q. Log-probabilities are the policy's.
    Guided attempts cannot be trained on, because the probability of the chosen action is not known.
    """

    def __init__(self, engine: InferenceEngine, values: ValueFunction, config: DecodeConfig) -> None:
        self._engine, self._values, self._config = engine, values, config
        limit = engine.capabilities.max_sessions
        if limit is not None and limit <= config.candidates:
            got = f"{config.candidates}, and a KV cache for {limit} sequences"
            raise InvalidInput("decode.candidates", got=got, do="give fewer, or raise engine.kv_cache_gib")
        # A session holds the slots of all its candidates between its turns. If sessions took slots without a limit,
        # each could wait for a slot that another one holds. One slot is left for requests without a session.
        self._open = None if limit is None else asyncio.Semaphore((limit - 1) // config.candidates)
        self._contexts: dict[str, ScoredTokens] = {}  # the last prompt of each session, with its action

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._engine.capabilities, media=False)

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        if session_id is None or self._config.candidates == 1:
            return await self._engine.generate(prompt, params, session_id=session_id)
        if prompt.media:
            raise EngineError("a critic that guides decoding reads no images; leave out --decode.method")
        if session_id not in self._contexts:
            if self._open is not None:
                await self._open.acquire()
            self._contexts[session_id] = ScoredTokens((), ())
        # sampled tokens of earlier turns keep their log-probabilities, which the critic can read
        context = self._contexts[session_id].continued(prompt.token_ids)
        candidates = (
            self._engine.generate(prompt, self._candidate(params, number), session_id=name)
            for number, name in enumerate(self._sessions(session_id))
        )
        actions = await asyncio.gather(*candidates)
        scored = [ScoredTokens(action.token_ids, action.logprobs) for action in actions]
        values = await self._values.values(session_id, context, scored)
        chosen = choose(values, self._config.beta, random.Random(seed_at(params.seed, CHOICE)))
        self._contexts[session_id] = context + scored[chosen]
        if params.on_tokens is not None:
            params.on_tokens(actions[chosen].token_ids)
        return actions[chosen]

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return await self._engine.update_weights(update)

    async def release(self, session_id: str) -> None:
        if self._contexts.pop(session_id, None) is not None and self._open is not None:
            self._open.release()
        for name in self._sessions(session_id):
            await self._engine.release(name)
        await self._values.release(session_id)

    async def close(self) -> None:
        await self._engine.close()
        await self._values.close()

    def _sessions(self, session_id: str) -> list[str]:
        return [session_id, *(f"{session_id} candidate {number}" for number in range(1, self._config.candidates))]

    def _candidate(self, params: SamplingParams, number: int) -> SamplingParams:
        if number == 0:
            return replace(params, on_tokens=None)
        # greedy candidates would all be equal
        temperature = params.temperature or self._config.temperature
        return replace(params, temperature=temperature, seed=seed_at(params.seed, CHOICE - number), on_tokens=None)


def choose(values: Sequence[float], beta: float, rng: random.Random) -> int:
    """Sample an index of ``values`` with the weights exp(value / beta). Beta 0: the index of the largest value."""
    if any(math.isnan(value) for value in values):
        raise EngineError("the critic gave a value that is not a number: its weights are not finite")
    best = max(values)
    if beta == 0:
        return values.index(best)
    return rng.choices(range(len(values)), [math.exp((value - best) / beta) for value in values])[0]


class Critic:
    """A ``ValueFunction`` that predicts values with ``model``. Forward passes run in a worker thread."""

    def __init__(self, model: ValueModel) -> None:
        if not supports_tree_mask(model.backbone):
            do = "use a critic with plain causal attention: continuations of a context are one row of its pass"
            raise InvalidInput("critic", got=type(model.backbone).__name__, do=do)
        self._model = model.eval()
        self._prefixes: dict[str, CachedPrefix] = {}
        self._worker = WorkerThread("critic", lambda: EngineError("the critic's thread has ended"))

    async def values(self, session_id: str, context: ScoredTokens, branches: Sequence[ScoredTokens]) -> list[float]:
        return await self._worker.run(self._values, session_id, context, branches)

    async def release(self, session_id: str) -> None:
        self._prefixes.pop(session_id, None)

    async def close(self) -> None:
        await self._worker.close_and_wait()

    @torch.inference_mode()
    def _values(self, session_id: str, context: ScoredTokens, branches: Sequence[ScoredTokens]) -> list[float]:
        prefix = self._prefixes.setdefault(session_id, CachedPrefix())
        prefix.keep(context.token_ids[:-1])  # not the last token: an empty branch needs its hidden state
        kept = prefix.num_tokens
        new = len(context.token_ids) - kept  # C
        # One row holds the new tokens of the context, and then all branches: T tokens. A branch is a chain of its own,
        # so its tokens attend to the context and to the branch, but not to other branches.
        ids, logprobs = [*context.token_ids[kept:]], [*context.logprobs[kept:]]
        positions, chain_ends, last = [*range(kept, kept + new)], list[int](), list[int]()
        for branch in branches:
            ids += branch.token_ids
            logprobs += branch.logprobs
            positions += range(kept + new, kept + new + len(branch.token_ids))
            chain_ends += [len(ids)] * len(branch.token_ids)
            last.append(len(ids) - 1 if branch.token_ids else new - 1)
        device = self._model.head.weight.device
        values = self._model(
            torch.tensor([ids], device=device),
            torch.tensor([positions], device=device),
            torch.tensor([[len(ids)] * new + chain_ends], device=device),  # all later tokens attend to the context
            torch.tensor([logprobs], device=device),
            prefix,
        )[0]  # (T,)
        prefix.append(context.token_ids[kept:])  # the next keep() drops the branches
        return [float(values[index]) for index in last]
