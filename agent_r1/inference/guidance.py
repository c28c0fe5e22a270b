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
from dataclasses import dataclass, field, replace

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
    StopCondition,
    ValueFunction,
    WeightUpdate,
)
from agent_r1.core.threads import WorkerThread
from agent_r1.inference.config import DecodeConfig
from agent_r1.inference.particles import normalize, sequential_monte_carlo
from agent_r1.inference.pool import finish_reason, join, seed_at
from agent_r1.inference.token_guidance import GuidedTokens, choose_tokens, top_branches
from agent_r1.model.forward import CachedPrefix, supports_tree_mask
from agent_r1.model.value_head import ValueModel

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
        if session_id not in self._sampled:
            if self._open is not None:
                await self._open.acquire()
            self._sampled[session_id] = ScoredTokens((), ())
        return self._sampled[session_id].continued(prompt.token_ids)

    async def _best_action(
        self, prompt: Prompt, params: SamplingParams, context: ScoredTokens, session_id: str
    ) -> Completion:
        sessions = self._sessions(session_id)
        asked = (self._candidate(params, index) for index in range(len(sessions)))
        sampled = (self._engine.generate(prompt, one, session_id=s) for one, s in zip(asked, sessions, strict=True))
        actions = await asyncio.gather(*sampled)
        q = await self._values.values(session_id, context, [scored(action) for action in actions])
        return actions[choose(q, self._config.beta, random.Random(seed_at(params.seed, CHOICE)))]

    async def _resampled_action(
        self, prompt: Prompt, params: SamplingParams, context: ScoredTokens, session_id: str
    ) -> Completion:
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
    """Return GuidedTokens for a completion that was sampled without guidance."""
    return GuidedTokens(completion, scored(completion))


def after(sampled: tuple[int, ...], condition: StopCondition | None) -> StopCondition | None:
    """Convert the stop condition of a whole action to a stop condition for the rest of the action."""
    if condition is None or not sampled:
        return condition
    return StopCondition(condition.strings, lambda token_ids: condition.is_met((*sampled, *token_ids)))


@dataclass(slots=True)
class TokenTree:
    """The continuations of a context as a tree of tokens. A prefix that several continuations share occurs once.

    Node 0, the root, is the last token of the context. ``token_ids``, ``logprobs`` and ``parents`` have one element per
    node. The descendants of a node come directly after the node. ``parents`` holds the index of each node's parent, and
    -1 for the root. ``ends`` holds the index of the last node of each continuation.

    Example:
        the continuations (7, 8) and (7, 9): token_ids [.., 7, 8, 9], parents [-1, 0, 1, 1], ends [2, 3]
    """

    token_ids: list[int]
    logprobs: list[float]
    parents: list[int]
    ends: list[int] = field(default_factory=list)

    def add(self, branch: ScoredTokens, children: dict[tuple[int, int], int]) -> None:
        """Add the continuation ``branch`` to the tree.

        ``children`` maps (index of a node, token) to the index of the node's child with this token. Make one empty
        dictionary for a tree, and pass this dictionary in each call. The method adds the new nodes to the dictionary.
        """
        node = 0
        for token, logprob in zip(branch.token_ids, branch.logprobs, strict=True):
            child = children.setdefault((node, token), len(self.token_ids))
            if child == len(self.token_ids):
                self.token_ids.append(token)
                self.logprobs.append(logprob)
                self.parents.append(node)
            node = child
        self.ends.append(node)

    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def subtree_ends(self) -> list[int]:
        """Return, for each node, the index after the last node of the node's subtree."""
        ends = [node + 1 for node in range(len(self.parents))]
        for node in range(len(ends) - 1, 0, -1):
            ends[self.parents[node]] = max(ends[self.parents[node]], ends[node])
        return ends


def make_tree(last: ScoredTokens, branches: Sequence[ScoredTokens]) -> TokenTree:
    """Return a tree of tokens that contains all ``branches``, the continuations of a context.

    ``last`` holds one token: the last token of the context. This token becomes the root of the tree.
    """
    tree, children = TokenTree([*last.token_ids], [*last.logprobs], [-1]), dict[tuple[int, int], int]()
    # In the order of their tokens, so that the descendants of a node follow it without a gap.
    order = sorted(range(len(branches)), key=lambda index: branches[index].token_ids)
    for index in order:
        tree.add(branches[index], children)
    tree.ends = [end for _, end in sorted(zip(order, tree.ends, strict=True))]
    return tree


class Critic:
    """A ``ValueFunction`` that predicts values with ``model``. Forward passes run in a worker thread.

    Raises:
        InvalidInput: the model's attention is not plain causal attention, for example because of a sliding window.
    """

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
        prefix.keep(context.token_ids[:-1])
        kept, count = prefix.num_tokens, len(context.token_ids) - prefix.num_tokens  # S, C
        tree = make_tree(ScoredTokens(context.token_ids[-1:], context.logprobs[-1:]), branches)
        ids = [*context.token_ids[kept:-1], *tree.token_ids]  # C - 1 + n
        logprobs = [*context.logprobs[kept:-1], *tree.logprobs]
        positions = [*range(kept, kept + count - 1), *(kept + count - 1 + depth for depth in tree.depths())]
        # All tokens after a token of the context attend to it.
        subtree_end = [len(ids)] * (count - 1) + [count - 1 + end for end in tree.subtree_ends()]
        device = self._model.head.weight.device
        values = self._model(
            torch.tensor([ids], device=device),
            torch.tensor([positions], device=device),
            torch.tensor([subtree_end], device=device),
            torch.tensor([logprobs], device=device),
            prefix,
        )[0]  # (C - 1 + n,)
        prefix.append(context.token_ids[kept:])  # the nodes after the root are dropped by the next keep()
        return [float(values[count - 1 + end]) for end in tree.ends]
