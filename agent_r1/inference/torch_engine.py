"""The embedded engine: continuous batching in process, on any transformers causal LM.

Every episode holds a slot from its first turn to its release, so a turn costs only its new tokens. A
row's arithmetic and its random numbers depend on its own tokens and seed alone (fixed shapes, see
``model.slots``), so neither the timing of tools nor the company of other episodes changes a bit.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from dataclasses import dataclass, field, replace

import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedModel

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import Capabilities, Completion, FinishReason, PolicyVersionSpan, Prompt, SamplingParams
from agent_r1.core.threads import WorkerThread, settle
from agent_r1.core.weights import PolicyVersion, WeightUpdate
from agent_r1.inference.kv_cache import LENGTH_MULTIPLE, Slot, round_up
from agent_r1.inference.model_runner import Decoder, Piece, checked_bytes_per_token
from agent_r1.inference.sampling import Draw, draw_tokens
from agent_r1.model.checksum import digest

log = logging.getLogger(__name__)


class TorchEngineConfig(BaseModel):
    """How many sequences are kept, and in what portions they are computed."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rows: int = Field(default=64, ge=1)
    """Sequences per block, the fixed batch of one decode step; fewer where the cache has no room for so many."""

    cache_gib: float = Field(default=4.0, gt=0)
    """Keys and values kept in all, at full context; more sequences wait. There is always room for one."""


@dataclass(slots=True)
class _Held:
    """What a session's slot holds: keys and values of ``ids``, complete up to the slot's length."""

    slot: Slot
    ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Request:
    """One generation on its way through the engine."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    session: str
    future: asyncio.Future[Completion]
    random: random.Random
    slot: Slot | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[PolicyVersionSpan] = field(default_factory=list)
    stop: FinishReason | None = None
    error: str | None = None
    cancelled: bool = False
    ready: bool = False

    @property
    def last(self) -> int:
        return self.ids[-1] if self.ids else self.prompt[-1]

    def completion(self) -> Completion:
        return Completion(tuple(self.ids), tuple(self.logprobs), self.stop or "cancelled", tuple(self.version_spans))


class TorchEngine:
    """Implements core ``Engine``. The engine takes the model over; ``load`` copies new weights into it.

    ``context`` bounds the tokens of a sequence. Raises InvalidInput where the model does not compute the same
    in slots as in a plain forward pass.
    """

    def __init__(self, model: PreTrainedModel, context: int, config: TorchEngineConfig | None = None) -> None:
        config = config or TorchEngineConfig()
        per_slot = checked_bytes_per_token(model) * round_up(context + 1, LENGTH_MULTIPLE)
        slots = max(1, int(config.cache_gib * 2**30) // per_slot)
        self._context = context
        self._blocks = max(1, slots // config.rows)
        self._decoder = Decoder(model, min(config.rows, slots))
        self._version = 0
        self._free: deque[Slot] = deque()
        self._sessions: dict[str, _Held] = {}
        self._openings: dict[tuple[int, ...], Slot] = {}
        self._waiting: list[_Request] = []
        self._running: dict[Slot, _Request] = {}
        self._released: list[str] = []
        self._incoming: list[tuple[WeightUpdate, asyncio.Future[None]]] = []
        self._worker = WorkerThread("engine", lambda: EngineError("the engine's thread has ended"))
        self._driver: asyncio.Task[None] | None = None
        self._anonymous = 0
        self._closed = False
        self.tokens = 0

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        """Sample a completion; cancelling the awaiting task ends the generation at the next step."""
        self._refuse_impossible(prompt, params)
        name = session_id or self._name_anonymous()
        loop = asyncio.get_running_loop()
        request = _Request(prompt.token_ids, params, name, loop.create_future(), random.Random(params.seed))
        self._waiting.append(request)
        self._wake()
        try:
            return await request.future
        finally:
            request.cancelled = True
            if session_id is None:
                await self.release(name)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset({"shared_memory"}), self._context, deterministic=True)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        """Copy the weights of a module between two steps.

        Sequences under way go on from the tokens they have, with keys and values computed anew, in a new span.
        """
        if update.transport != "shared_memory" or not isinstance(update.handle, torch.nn.Module):
            raise EngineError(f"the embedded engine takes a module in shared memory, got {update.transport!r}")
        self._refuse_closed()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._incoming.append((update, done))
        self._wake()
        await done
        if update.version.checksum is None:
            return update.version
        return replace(update.version, checksum=await self._worker.run(digest, self._decoder.model))

    async def release(self, session: str) -> None:
        """Free the session's slot."""
        self._released.append(session)
        if not self._closed:
            self._wake()

    async def close(self) -> None:
        """End the worker thread after the step it is in; generations under way fail."""
        self._closed = True
        if self._driver is not None:
            self._driver.cancel()
        self._fail_all("the engine was closed")
        self._worker.close()

    def _fail_all(self, reason: str) -> None:
        for request in (*self._waiting, *self._running.values()):
            request.error = reason
            _deliver(request)
        for _, done in self._incoming:
            settle(done, None, EngineError(reason))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")

    def _refuse_impossible(self, prompt: Prompt, sampling: SamplingParams) -> None:
        self._refuse_closed()
        if not prompt.token_ids:
            raise EngineError("a prompt needs at least one token")
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, got {sampling.max_tokens}")
        if len(prompt.token_ids) + sampling.max_tokens > self._context:
            raise EngineError(
                f"{len(prompt.token_ids)} prompt tokens and {sampling.max_tokens} more exceed the context of {self._context}"
            )
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < self._decoder.vocabulary:
            raise EngineError(f"a token of the prompt is outside the vocabulary of {self._decoder.vocabulary}")

    def _name_anonymous(self) -> str:
        self._anonymous += 1
        return f"anonymous {self._anonymous}"

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        """Step until nothing is left to do.

        Consumes: waiting requests, released sessions, incoming weights. Produces: results of futures.
        Unblocked by: ``generate``, ``load`` and ``release``, which start it when it sleeps. Whatever goes
        wrong here is told to everyone who waits, who make it a failure of theirs.
        """
        try:
            while self._waiting or self._running or self._incoming or self._released:
                await self._take_incoming()
                self._forget_released()
                self._admit()
                if not self._running:
                    return
                for request in await self._worker.run(self._advance):
                    _deliver(request)
        except EngineError as error:
            self._fail_all(str(error))
        except Exception as error:
            log.warning("the engine stopped", exc_info=error)
            self._fail_all(f"the engine stopped: {type(error).__name__}: {error}")

    async def _take_incoming(self) -> None:
        incoming, self._incoming = self._incoming, []
        for weights, done in incoming:
            try:
                await self._worker.run(self._replace, weights)
            except EngineError as error:
                settle(done, None, error)
            except Exception as error:
                settle(done, None, EngineError(f"the weights do not fit the engine's model: {error}"))
            else:
                settle(done, None, None)

    def _replace(self, update: WeightUpdate) -> None:
        assert isinstance(update.handle, torch.nn.Module)
        with torch.no_grad():
            self._decoder.model.load_state_dict(update.handle.state_dict())
        self._version = update.version.number
        self._openings.clear()
        for held in self._sessions.values():
            held.ids = ()
        for request in self._running.values():
            request.ready = False
            request.version_spans.append(PolicyVersionSpan(len(request.ids), self._version))

    def _forget_released(self) -> None:
        released, self._released = self._released, []
        for session in released:
            held = self._sessions.get(session)
            if held is None:
                continue
            if held.slot in self._running:
                self._running.pop(held.slot).cancelled = True
            del self._sessions[session]
            self._free.append(held.slot)

    def _admit(self) -> None:
        """Give waiting requests their session's slot, or a free one; the rest goes on waiting."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if request.cancelled:
                continue
            held = self._sessions.get(request.session) or self._new_session(request.session)
            if held is None or held.slot in self._running:
                self._waiting.append(request)
                continue
            request.slot = held.slot
            request.version_spans.append(PolicyVersionSpan(0, self._version))
            self._running[held.slot] = request

    def _new_session(self, session: str) -> _Held | None:
        if not self._free and not self._grow():
            return None
        slot = self._free.popleft()
        self._openings = {ids: holder for ids, holder in self._openings.items() if holder != slot}
        self._sessions[session] = _Held(slot)
        return self._sessions[session]

    def _grow(self) -> bool:
        if len(self._decoder.blocks) >= self._blocks:
            return False
        index = self._decoder.add_block()
        self._free.extend(Slot(index, row) for row in range(self._decoder.rows))
        return True

    def _advance(self) -> list[_Request]:
        """One step of every running sequence; returns the requests that ended."""
        for slot in [slot for slot, request in self._running.items() if request.cancelled]:
            del self._running[slot]
        try:
            self._prefill()
            for block in range(len(self._decoder.blocks)):
                self._decode(block)
        except Exception as error:
            self._openings.clear()
            for request in self._running.values():
                request.error = f"{type(error).__name__}: {error}"
        ended = [request for request in self._running.values() if request.stop or request.error]
        for request in ended:
            self._retire(request)
        return ended

    def _retire(self, request: _Request) -> None:
        assert request.slot is not None
        del self._running[request.slot]
        held = self._sessions[request.session]
        held.ids = () if request.error else (*request.prompt, *request.ids)[:-1]

    def _prefill(self) -> None:
        """Make every running slot hold all but its sequence's last token, equal new prompts computed once."""
        fresh: list[Piece] = []
        for slot, request in self._running.items():
            if not request.ready:
                request.ready = True
                needed = (*request.prompt, *request.ids)[:-1]
                equal = self._keep_equal(self._sessions[request.session], needed)
                fresh.append(Piece(slot, equal, needed[equal:]))
        # All slots are cut back by now, so an opening that is still known is one that still stands.
        openings = dict(self._openings)
        for piece in fresh:
            if piece.held == 0 and piece.ids:
                openings.setdefault(piece.ids, piece.slot)
        copies = [piece for piece in fresh if piece.held == 0 and openings.get(piece.ids, piece.slot) != piece.slot]
        copied = {piece.slot for piece in copies}
        self._decoder.prefill([piece for piece in fresh if piece.ids and piece.slot not in copied])
        for piece in copies:
            self._decoder.copy(openings[piece.ids], piece.slot, len(piece.ids))
        self._openings = openings

    def _keep_equal(self, held: _Held, needed: tuple[int, ...]) -> int:
        """Keep of the slot what is equal to ``needed``; returns how many tokens that is."""
        equal = _equal_prefix(held.ids, needed)
        if equal < len(held.ids):
            self._openings = {ids: slot for ids, slot in self._openings.items() if slot != held.slot}
        held.ids = needed
        self._decoder.set_length(held.slot, equal)
        return equal

    def _decode(self, block: int) -> None:
        alive = [request for slot, request in self._running.items() if slot.block == block]
        if not alive:
            return
        feed = {request.slot.row: request.last for request in alive if request.slot is not None}
        draws = [_draw_of(request) for request in alive]
        tokens, logprobs = draw_tokens(self._decoder.decode(block, feed), draws)
        for request, token, logprob in zip(alive, tokens.tolist(), logprobs.tolist(), strict=True):
            _append(request, token, logprob)
        self.tokens += len(alive)


def _deliver(request: _Request) -> None:
    if request.future.done():
        return
    if request.error is not None:
        request.future.set_exception(EngineError(request.error))
    else:
        request.future.set_result(request.completion())


def _equal_prefix(held: tuple[int, ...], needed: tuple[int, ...]) -> int:
    """How many tokens at the start of ``needed`` are held already."""
    if needed[: len(held)] == held:
        return len(held)
    return next((i for i, (a, b) in enumerate(zip(held, needed, strict=False)) if a != b), len(needed))


def _draw_of(request: _Request) -> Draw:
    sampling = request.sampling
    return Draw(sampling.temperature, sampling.top_p, sampling.top_k, request.random.random())


def _append(request: _Request, token: int, logprob: float) -> None:
    """Add a sampled token and say whether that ended the generation."""
    if not math.isfinite(logprob):
        request.error = f"the model gave a log-probability of {logprob}; its weights or logits are not finite"
        return
    request.ids.append(token)
    request.logprobs.append(logprob)
    try:
        ended = _ends(request, token)
    except Exception as error:  # a format's code, asked for one request: the others have nothing to do with it
        request.error = f"where the generation ends could not be found out: {type(error).__name__}: {error}"
        return
    if ended:
        request.stop = "stop"
    elif len(request.ids) >= request.sampling.max_tokens:
        request.stop = "length"


def _ends(request: _Request, token: int) -> bool:
    sampling = request.sampling
    return token in sampling.stop_token_ids or (
        sampling.stop_condition is not None and sampling.stop_condition.is_met(request.ids)
    )
