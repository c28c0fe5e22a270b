"""An engine that samples candidates from an inner engine, and chooses among them by the values of a critic.

A state s is the context and the tokens sampled so far. The letter ``a`` stands for one or more tokens that follow s.
pi(a | s) is the policy's probability of these tokens. V(s) is the predicted sum of the rewards after the state s.
Q(s, a) is V of the next state: s followed by ``a``. beta is the temperature of the values. The methods are:

- ``token``: single tokens are sampled from changed probabilities (module ``token_guidance``). The probabilities of the
  k most likely tokens become proportional to pi(a | s) exp(Q(s, a) / beta). All other tokens keep the probability
  pi(a | s).
- ``step``: N whole actions are sampled from pi. Then an action is chosen with a probability proportional to
  exp(Q(s, a) / beta). If beta is 0, the action with the largest Q is chosen.
- ``smc``: N particles (beginnings of actions) are extended by a few tokens, which are sampled from pi. Each particle is
  then weighted by exp((Q(s, a) - V(s)) / beta), and the particles are resampled (module ``particles``).

The fourth method, ``beam``, needs the environment, and is in the module ``rollout.turn_beam``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.inference import (
    Capabilities,
    Completion,
    InferenceEngine,
    Prompt,
    SamplingParams,
    ScoredTokens,
    StopCondition,
    ValueFunction,
)
from agent_r1.core.weights import PolicyVersion, WeightUpdate
from agent_r1.inference.config import DecodeConfig
from agent_r1.inference.continuation import finish_reason, join, seed_at
from agent_r1.inference.particles import normalize, sequential_monte_carlo
from agent_r1.inference.token_guidance import GuidedTokens, choose_tokens, top_branches

CHOICE = -1
"""The ``position`` argument of :func:`seed_at` for the random choice among candidates. The number is negative, because
positions of tokens are 0 or larger."""


@dataclass(frozen=True, slots=True)
class Particle:
    """The first tokens of an action, and the predicted reward V after these tokens (``value``).

    ``completion`` is None if the particle has no token yet.
    """

    completion: Completion | None = None
    value: float = 0.0


class ValueGuidedEngine:
    """An ``InferenceEngine`` that samples from ``engine``, guided by a value function.

    A request without a session is not guided. If ``config.candidates`` is 1, no request is guided.

    With the method ``token``, the log-probabilities of a completion are log q. q is the distribution from which the
    tokens were sampled. With the methods ``step`` and ``smc``, the log-probabilities are log pi, where pi is the policy
    in ``engine``. The methods ``step`` and ``smc`` cannot sample for training, because the probability of the chosen
    candidate cannot be computed.

    Raises:
        InvalidInput: the KV cache of ``engine`` has no room for all candidates; or the method is ``token``, and
            ``engine`` cannot return the most likely tokens at each position.
    """

    def __init__(self, engine: InferenceEngine, values: ValueFunction, config: DecodeConfig) -> None:
        self._engine, self._values, self._config = engine, values, config
        capabilities = engine.capabilities
        if config.method == "token" and not capabilities.top_logprobs:
            do = "use another method: this engine returns no log-probabilities of the most likely tokens"
            raise InvalidInput("decode.method", got="token", do=do)
        self._slots = 1 if config.method == "token" else config.candidates
        if capabilities.max_sessions is not None and capabilities.max_sessions <= self._slots:
            got = f"{config.candidates}, and a KV cache for {capabilities.max_sessions} sequences"
            raise InvalidInput("decode.candidates", got=got, do="give fewer, or raise engine.kv_cache_gib")
        # A session holds the slots of all its candidates between its turns. If sessions took slots without a limit,
        # each could wait for a slot that another one holds. One slot is left for requests without a session.
        limit = capabilities.max_sessions
        self._open = None if limit is None else asyncio.Semaphore((limit - 1) // self._slots)
        self._sampled: dict[str, ScoredTokens] = {}  # the last context of each session, with its sampled tokens

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._engine.capabilities, media=False)

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        if session_id is None or self._config.candidates == 1:
            return await self._engine.generate(prompt, params, session_id=session_id)
        if prompt.media:
            raise EngineError("a critic that guides decoding reads no images; leave out --decode.method")
        context = await self._context(prompt, session_id)
        quiet = replace(params, on_tokens=None)
        if self._config.method == "token":
            guided = await self._guide_tokens(prompt, quiet, context, session_id)
        elif self._config.method == "step":
            guided = as_sampled(await self._best_action(prompt, quiet, context, session_id))
        else:
            guided = as_sampled(await self._resampled_action(prompt, quiet, context, session_id))
        self._sampled[session_id] = context + guided.scored
        if params.on_tokens is not None:
            params.on_tokens(guided.completion.token_ids)
        return guided.completion

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return await self._engine.update_weights(update)

    async def release(self, session_id: str) -> None:
        if self._sampled.pop(session_id, None) is not None and self._open is not None:
            self._open.release()
        for name in self._sessions(session_id):
            await self._engine.release(name)
        await self._values.release(session_id)

    async def close(self) -> None:
        await self._engine.close()
        await self._values.close()

    def _sessions(self, session_id: str) -> list[str]:
        return [session_id, *(f"{session_id} candidate {index}" for index in range(1, self._slots))]

    async def _context(self, prompt: Prompt, session_id: str) -> ScoredTokens:
        """Return the prompt's tokens with log-probabilities.

        A token that was sampled in this session has the log-probability of its sampling. Every other token has the
        log-probability 0.
        """
        if session_id not in self._sampled:
            if self._open is not None:
                await self._open.acquire()
            self._sampled[session_id] = ScoredTokens((), ())
        return self._sampled[session_id].continued(prompt.token_ids)

    async def _best_action(
        self, prompt: Prompt, params: SamplingParams, context: ScoredTokens, session_id: str
    ) -> Completion:
        """Sample several actions, predict the reward Q_i of each action i, and return one action.

        beta is the setting ``decode.beta``. The probability that action i is returned is

            exp(Q_i / beta) / sum_j exp(Q_j / beta)

        If beta is 0, the action with the largest Q_i is returned.
        """
        sessions = self._sessions(session_id)
        asked = (self._candidate(params, index) for index in range(len(sessions)))
        sampled = (self._engine.generate(prompt, one, session_id=s) for one, s in zip(asked, sessions, strict=True))
        actions = await asyncio.gather(*sampled)
        q = await self._values.values(session_id, context, [scored(action) for action in actions])
        return actions[choose(q, self._config.beta, random.Random(seed_at(params.seed, CHOICE)))]

    async def _resampled_action(
        self, prompt: Prompt, params: SamplingParams, context: ScoredTokens, session_id: str
    ) -> Completion:
        """Return an action that sequential Monte Carlo has sampled.

        Each extension multiplies the weight of a particle (an unfinished action) by exp((new value - old value) /
        beta). beta is the setting ``decode.beta``.
        """
        rng, sessions = random.Random(seed_at(params.seed, CHOICE)), self._sessions(session_id)

        async def grow(particle: Particle, index: int) -> Completion:
            if particle.completion is not None and is_complete(particle):
                return particle.completion
            asked = replace(self._candidate(params, index), max_tokens=params.max_tokens)
            return await self._continue(prompt, asked, particle.completion, sessions[index])

        def is_complete(particle: Particle) -> bool:
            done = particle.completion
            return done is not None and (done.finish_reason != "length" or len(done.token_ids) >= params.max_tokens)

        async def extend(particles: list[Particle]) -> tuple[list[Particle], list[float]]:
            grown = await asyncio.gather(*(grow(particle, index) for index, particle in enumerate(particles)))
            values = await self._values.values(session_id, context, [scored(completion) for completion in grown])
            gains = [(new - old.value) / self._config.beta for new, old in zip(values, particles, strict=True)]
            return [Particle(*pair) for pair in zip(grown, values, strict=True)], gains

        start = [Particle() for _ in sessions]
        particles, log_weights = await sequential_monte_carlo(start, extend, is_complete, rng)
        chosen = rng.choices(particles, normalize(log_weights))[0].completion
        assert chosen is not None
        return chosen

    async def _guide_tokens(
        self, prompt: Prompt, params: SamplingParams, context: ScoredTokens, session_id: str
    ) -> GuidedTokens:
        """Return an action in which each token is sampled from the guided distribution q (see ``token_guidance``).

        The engine samples a draft of a few tokens from the policy. Then each token of the draft is chosen again, from
        q. After the first token that differs from the draft, a new draft begins.
        """
        guided = GuidedTokens(Completion((), (), "length", ()), ScoredTokens((), ()))
        while True:
            sampled = guided.completion
            draft = await self._continue(
                prompt, replace(params, top_logprobs=self._config.candidates), sampled, session_id
            )
            if draft.finish_reason == "cancelled":
                return as_sampled(draft)
            new = len(sampled.token_ids)  # the first token of the draft
            branches = top_branches(draft, guided.scored, new)
            values = await self._values.values(session_id, context, branches)
            rng = random.Random(seed_at(params.seed, CHOICE - new))
            guided = choose_tokens(draft, guided, values, self._config.beta, params.temperature, rng)
            if reason := finish_reason(guided.completion.token_ids, params):
                return replace(guided, completion=replace(guided.completion, finish_reason=reason))

    async def _continue(
        self, prompt: Prompt, params: SamplingParams, sampled: Completion | None, session_id: str
    ) -> Completion:
        before = () if sampled is None else sampled.token_ids
        room = params.max_tokens - len(before)
        asked = replace(
            params,
            max_tokens=min(self._config.segment_tokens, room),
            seed=seed_at(params.seed, len(before)),
            stop_condition=after(before, params.stop_condition),
        )
        more = await self._engine.generate(
            replace(prompt, token_ids=prompt.token_ids + before), asked, session_id=session_id
        )
        return more if sampled is None else join(sampled, more)

    def _candidate(self, params: SamplingParams, index: int) -> SamplingParams:
        """Return the sampling parameters of candidate ``index``.

        Candidate 0 is sampled with ``params``. Each later candidate has its own seed and a temperature above 0.
        """
        if index == 0:
            return params
        return replace(
            params,
            temperature=params.temperature or self._config.temperature,
            seed=seed_at(params.seed, CHOICE - index),
        )


def choose(values: Sequence[float], beta: float, rng: random.Random) -> int:
    """Sample an index of ``values`` with the weights exp(value / beta). Beta 0: return the index of the largest value.

    Raise EngineError if a value is not a number.
    """
    if any(value != value for value in values):
        raise EngineError("the critic gave a value that is not a number: its weights are not finite")
    if beta == 0:
        return max(range(len(values)), key=values.__getitem__)
    return rng.choices(range(len(values)), normalize([value / beta for value in values]))[0]


def scored(completion: Completion) -> ScoredTokens:
    return ScoredTokens(completion.token_ids, completion.logprobs)


def as_sampled(completion: Completion) -> GuidedTokens:
    """Return GuidedTokens for a completion that was sampled without guidance.

    Without guidance, the log-probabilities log q of the guided distribution equal the log-probabilities log pi of the
    policy.
    """
    return GuidedTokens(completion, scored(completion))


def after(sampled: tuple[int, ...], condition: StopCondition | None) -> StopCondition | None:
    """Convert the stop condition of a whole action to a stop condition for the rest of the action.

    ``sampled`` holds the tokens of the action that are already sampled. The rest is the tokens after ``sampled``.
    """
    if condition is None or not sampled:
        return condition
    return StopCondition(condition.strings, lambda token_ids: condition.is_met((*sampled, *token_ids)))
