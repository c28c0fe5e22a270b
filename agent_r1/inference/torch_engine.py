"""The embedded inference engine: continuous batching in the process of the run, for causal LMs of transformers.

In a loop, the scheduler assigns slots of the KV cache to requests, and the model runner prefills new tokens and decodes
one token of every running sequence.

A sequence gets exactly the same tokens and log-probabilities, whatever other sequences run in the batch. Its random
numbers depend only on its seed, and its arithmetic only on its tokens (see ``inference.kv_cache``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.core.errors import EngineError, UnsupportedChat
from agent_r1.core.inference import (
    Capabilities,
    Completion,
    FinishReason,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    WeightUpdate,
)
from agent_r1.core.profile import measure
from agent_r1.core.threads import WorkerThread, settle
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.kv_cache import CachePages, CacheSize, CacheSlot, cache_size, pages_for
from agent_r1.inference.model_runner import ImageCache, ModelRunner, PrefillChunk, PrefixCopy, probe_kv_bytes_per_token
from agent_r1.inference.native_decode import choose_native
from agent_r1.model.adapter import load_trained_weights, trained_weights
from agent_r1.model.vision import ImageProcessor
from agent_r1.model.weights import DTYPES, cast_parameters, use_plain_products, weights_checksum

PART_PROBABILITIES = 1 << 20  # on a CPU, the largest number of probabilities that are summed at once: 8 MiB


def sample_tokens(logits: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Sample one token for each row of fp32 logits (N, V). Return (tokens, log-probabilities), both (N,).

    Log-probabilities are log-softmax(logits / temperature) over the full vocabulary, including the tokens that top-p
    excludes. At temperature 0, the most probable token is chosen, with its log-probability at temperature 1.
    ``uniform`` holds a random number in [0, 1) for each row, which selects the token.
    """
    temperature = torch.tensor([row.temperature or 1.0 for row in params], device=logits.device)
    logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)  # (N, V)
    tokens = logits.argmax(dim=-1)  # (N,)
    sampled = [index for index, row in enumerate(params) if row.temperature > 0]
    # A few rows at a time on a CPU, where touching new memory for all rows takes longer than the sums.
    size = max(1, PART_PROBABILITIES // logits.shape[1] if logits.device.type == "cpu" else len(sampled))
    for rows in (sampled[first : first + size] for first in range(0, len(sampled), size)):  # R rows
        probabilities = logprobs[rows].exp().double()  # (R, V)
        for place, index in enumerate(rows):
            if params[index].top_p < 1:
                order = probabilities[place].argsort(descending=True, stable=True)  # (V,)
                ranked = probabilities[place, order]
                keep = ranked.cumsum(0) - ranked < params[index].top_p  # more probable tokens sum to less than top_p
                probabilities[place, order[~keep]] = 0
        # The first token whose cumulative probability exceeds uniform * total; total < 1 if tokens are excluded.
        cumulative = probabilities.cumsum_(dim=-1)  # (R, V)
        uniforms = torch.tensor([uniform[index] for index in rows], dtype=torch.float64, device=logits.device)
        drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]  # (R,)
        tokens[rows] = drawn.clamp(max=logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


@dataclass(slots=True, eq=False)
class Request:
    """One call of ``generate``: its prompt and parameters, and the tokens sampled so far."""

    prompt: tuple[int, ...]  # the tokens. A negative token stands for a feature of an image
    params: SamplingParams
    session_id: str
    future: asyncio.Future[Completion]
    random: random.Random
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[PolicyVersionSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_cancelled: bool = False
    is_prefilled: bool = False
    # the position of a sampled token in the model's position encoding, minus the index of the token in the sequence.
    # This difference is the same for all sampled tokens; without images, 0
    shift: int = 0
    start: float = field(default_factory=perf_counter)
    first_token_seconds: float | None = None
    # the number of tokens that were prefilled for this request. Tokens whose keys and values were copied from another
    # sequence in the KV cache are not counted. The prompt and the sampled tokens are prefilled and counted again if the
    # request's slot in the KV cache is emptied, or if the weights change
    prefilled_tokens: int = 0

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.prompt[-1]

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """The tokens whose keys and values the next decode step needs: the whole sequence except the last token."""
        return (*self.prompt, *self.token_ids)[:-1]


Prefills = tuple[tuple[int, int], ...]
"""Ranges (start, end) of a sequence that prefill passes computed. Decode steps computed the other tokens."""


@dataclass(slots=True)
class _Session:
    """The slot of a session, and the tokens whose keys and values are in the slot.

    ``prefills`` holds the ranges of these tokens that were computed by prefill passes. If two slots have equal
    ``token_ids`` and equal ``prefills``, their keys and values are bit-equal.
    """

    slot: CacheSlot
    token_ids: tuple[int, ...] = ()
    prefills: Prefills = ()


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The work of a prefill. The work is done in the order of the attributes."""

    # the slots whose keys and values are removed, because other slots need their memory
    emptied: list[CacheSlot] = field(default_factory=list)
    compute: list[PrefillChunk] = field(default_factory=list)  # the chunks that are computed before anything is copied
    # copies of the first part of a sequence, from a slot that holds the same first tokens
    prefix_copies: list[PrefixCopy] = field(default_factory=list)
    # for each copy in ``prefix_copies``, the chunk with the tokens after the copied tokens
    remainders: list[PrefillChunk] = field(default_factory=list)
    # copies that complete a sequence, from a slot that holds the whole sequence
    copies: list[PrefixCopy] = field(default_factory=list)


class Scheduler:
    """A scheduler with continuous batching: requests join and leave the running batch between any two decode steps.

    A session holds one sequence, and has a slot: a place for one sequence in the KV cache. A session keeps its slot
    until the session is released. So each turn of an episode usually computes only its new tokens. Equal prompts are
    computed once and copied, for example for several attempts at a task.

    All slots share the memory of ``size.pages`` pages. If a running request needs a page and no page is
    free, slots are emptied. An emptied slot loses its tokens and pages. A session keeps its emptied slot. Slots are
    emptied in this order:

    - slots without a session, which can still hold the tokens of a released session,
    - slots of sessions without a running request, the longest idle session first,
    - the slot of the running request that started last. This request then waits.

    The tokens of an emptied slot are prefilled again when a request needs them.
    """

    def __init__(self, size: CacheSize, add_block: Callable[[], int], prefix_multiple: int) -> None:
        self._size, self._add_block = size, add_block
        self._pages = CachePages(size.pages)
        self._emptied: list[CacheSlot] = []
        self._prefix_multiple = prefix_multiple
        self._num_blocks = 0
        self._version = 0
        self._free: deque[CacheSlot] = deque()
        self._sessions: dict[str, _Session] = {}
        self._prefix_cache: dict[tuple[Prefills, tuple[int, ...]], CacheSlot] = {}
        self._waiting: list[Request] = []
        self._running: dict[CacheSlot, Request] = {}
        self._released: list[str] = []

    @property
    def max_sessions(self) -> int:
        """The largest number of sessions that can be in the KV cache at the same time."""
        return self._size.rows * self._size.blocks

    @property
    def requests(self) -> tuple[Request, ...]:
        return (*self._waiting, *self._running.values())

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def release(self, session_id: str) -> None:
        """Free a session's slot before the next decode step. A running request of the session is cancelled."""
        self._released.append(session_id)

    def schedule(self) -> bool:
        """Free slots of released sessions, start waiting requests, and return whether any request is running."""
        released, self._released = self._released, []
        for session_id in released:
            session = self._sessions.pop(session_id, None)
            if session is None:
                continue
            if session.slot in self._running:
                self._running.pop(session.slot).is_cancelled = True
            self._free.append(session.slot)
        self._running = {slot: request for slot, request in self._running.items() if not request.is_cancelled}
        # Each running request gets pages for its next token. If too few are free, the newest of them wait.
        for slot, request in list(self._running.items()):
            while slot in self._running and not self._take_pages(slot, request, 0, may_empty_sessions=True):
                last, stopped = self._running.popitem()
                self._empty(last)
                stopped.is_prefilled = False
                self._waiting.insert(0, stopped)
        waiting, self._waiting = self._waiting, []
        is_full = False
        for request in waiting:
            if request.is_cancelled:
                continue
            session = self._sessions.get(request.session_id)
            is_next_turn = session is not None and session.slot in self._running
            if is_next_turn or (is_full and session is None):
                self._waiting.append(request)
            elif not self._start(request):
                self._waiting.append(request)
                is_full = True  # no new session starts before this request: it would take the pages that become free
        return bool(self._running)

    def _start(self, request: Request) -> bool:
        session = self._sessions.get(request.session_id)
        if session is None and not self._free:  # each slot belongs to a session
            if self._num_blocks >= self._size.blocks:
                return False
            self._num_blocks += 1
            block = self._add_block()
            self._free.extend(CacheSlot(block, row) for row in range(self._size.rows))
        slot = self._free[0] if session is None else session.slot  # the slot without a session for the longest time
        if session is None and self._pages.held[slot] - self._pages_of(request) > self._pages.free:
            self._empty(slot)  # an earlier sequence was longer; otherwise its pages stay, because new pages take time
        may_empty_sessions = session is not None or not self._running
        # A page for each running request stays free. Otherwise running requests would soon have to wait again.
        if not self._take_pages(slot, request, len(self._running), may_empty_sessions=may_empty_sessions):
            return False
        if session is None:
            self._free.popleft()
            self._forget_prefixes(slot)
        # the last place: the keys and values of this session are the last to go
        self._sessions[request.session_id] = self._sessions.pop(request.session_id, _Session(slot))
        if not request.version_spans or request.version_spans[-1].version != self._version:
            request.version_spans.append(PolicyVersionSpan(len(request.token_ids), self._version))
        self._running[slot] = request
        return True

    def _take_pages(self, slot: CacheSlot, request: Request, spare: int, *, may_empty_sessions: bool) -> bool:
        # ``spare`` is the number of pages that must still be free at the end.
        needed = self._pages_of(request) - self._pages.held[slot] + spare
        if needed > self._pages.free:
            idle = (session.slot for session in self._sessions.values() if session.slot not in self._running)
            others = itertools.chain(self._free, idle if may_empty_sessions else ())
            emptied, found = list[CacheSlot](), self._pages.free
            for other in others:
                if found < needed and other != slot and self._pages.held[other]:
                    emptied.append(other)
                    found += self._pages.held[other]
            if found < needed:
                return False
            for other in emptied:
                self._empty(other)
        return self._pages.take(slot, self._pages_of(request))

    def _pages_of(self, request: Request) -> int:
        return max(pages_for(len(request.prompt) + len(request.token_ids)), self._size.session_pages)

    def _empty(self, slot: CacheSlot) -> None:
        self._pages.drop(slot)
        self._forget_prefixes(slot)
        self._emptied.append(slot)
        for session in self._sessions.values():
            if session.slot == slot:
                session.token_ids = session.prefills = ()

    def plan_prefill(self) -> PrefillPlan:
        """Return what must be prefilled: all but the last token of each running sequence, equal prefixes once."""
        new: list[tuple[_Session, Request, PrefillChunk]] = []
        for slot, request in self._running.items():
            if not request.is_prefilled:
                request.is_prefilled = True
                session, needed = self._sessions[request.session_id], request.cached_tokens
                cached = _common_prefix(session.token_ids, needed)
                if cached < len(session.token_ids):
                    self._forget_prefixes(slot)  # tokens of the slot will be overwritten
                session.token_ids = needed
                session.prefills = tuple(span for span in session.prefills if span[0] < cached)
                if cached < len(needed):
                    session.prefills += ((cached, len(needed)),)
                new.append((session, request, PrefillChunk(slot, needed[:cached], needed[cached:])))
        # The prefix cache no longer contains slots that will be overwritten, so all of its entries are valid.
        plan = PrefillPlan(self._emptied)
        self._emptied = []
        for session, request, chunk in new:
            source = self._prefix_cache.setdefault((session.prefills, session.token_ids), chunk.slot)
            if source != chunk.slot:
                plan.copies.append(PrefixCopy(source, chunk.slot, len(session.token_ids), start=chunk.cached))
            elif chunk.cached == 0 and chunk.token_ids:
                request.prefilled_tokens += self._plan_new_sequence(chunk, plan)
            else:
                plan.compute.append(chunk)
                request.prefilled_tokens += len(chunk.token_ids)
        return plan

    def _plan_new_sequence(self, chunk: PrefillChunk, plan: PrefillPlan) -> int:
        tokens = chunk.token_ids
        lengths = range(self._prefix_multiple, len(tokens), self._prefix_multiple)
        # Prefixes are copied before remainders are computed: until then these slots hold a part of their sequence.
        incomplete = {chunk.slot, *(remainder.slot for remainder in plan.remainders)}
        for length in reversed(lengths):
            source = self._prefix_cache.get((((0, length),), tokens[:length]), chunk.slot)
            if source not in incomplete:
                plan.prefix_copies.append(PrefixCopy(source, chunk.slot, length))
                plan.remainders.append(PrefillChunk(chunk.slot, tokens[:length], tokens[length:]))
                return len(tokens) - length
        plan.compute.append(chunk)
        for length in lengths:
            self._prefix_cache[((0, length),), tokens[:length]] = chunk.slot
        return len(tokens)

    def decode_batches(self) -> Iterator[tuple[int, list[tuple[int, Request]]]]:
        """Yield (block index, [(row, request), ..]) for each block of the KV cache that has running requests."""
        for block in range(self._num_blocks):
            batch = [(slot.row, request) for slot, request in self._running.items() if slot.block == block]
            if batch:
                yield block, batch

    def fail_running(self, reason: str) -> None:
        """Set the error ``reason`` on all running requests, and empty the prefix cache."""
        self._prefix_cache.clear()
        for request in self._running.values():
            request.error = reason

    def take_finished(self) -> list[Request]:
        """Remove and return finished and failed requests. A failed one leaves its slot without tokens."""
        finished = [
            (slot, request) for slot, request in self._running.items() if request.finish_reason or request.error
        ]
        for slot, request in finished:
            del self._running[slot]
            self._sessions[request.session_id].token_ids = () if request.error else request.cached_tokens
        return [request for _, request in finished]

    def on_new_weights(self, version: int) -> None:
        """Mark all keys and values as invalid. Tokens sampled from now on get the version ``version``."""
        self._version = version
        self._prefix_cache.clear()
        for session in self._sessions.values():
            session.token_ids = ()
        for request in self._running.values():
            request.is_prefilled = False
            request.version_spans.append(PolicyVersionSpan(len(request.token_ids), version))

    def _forget_prefixes(self, slot: CacheSlot) -> None:
        self._prefix_cache = {prefix: holder for prefix, holder in self._prefix_cache.items() if holder != slot}


def _common_prefix(held: tuple[int, ...], needed: tuple[int, ...]) -> int:
    if needed[: len(held)] == held:
        return len(held)
    return next((i for i, (a, b) in enumerate(zip(held, needed, strict=False)) if a != b), len(needed))


log = logging.getLogger(__name__)


class TorchEngine:
    """An ``InferenceEngine`` in this process, which takes ownership of ``model`` and casts it to ``config.dtype``.

    Forward passes run in a worker thread. ``context`` is the maximum number of tokens of a prompt and its completion.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context: int,
        config: EngineConfig | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        config = config or EngineConfig()
        elements_per_token = probe_kv_bytes_per_token(model) // model.dtype.itemsize
        cast_parameters(model, config.dtype)  # after the probe, which needs precise weights
        use_plain_products(model)  # the trainer's products can be oneDNN's: an engine has those of a loaded model
        self._context, self._dtype = context, config.dtype
        self._images = None if images is None else ImageCache(model, images)
        native = choose_native(config.decode_step, model)
        self.decode_step = "torch" if native is None else str(native)
        cached = torch.float32 if native is not None else DTYPES[config.dtype]
        bytes_per_token = elements_per_token * cached.itemsize
        size = cache_size(config, context, bytes_per_token, model.device, is_native=native is not None)
        self._runner = ModelRunner(model, size.rows, self._images, native, size.capacity)
        self._scheduler = Scheduler(size, self._runner.add_block, self._runner.prefill_shape.chunk)
        self._updates: list[tuple[WeightUpdate, asyncio.Future[PolicyVersion]]] = []
        self._worker = WorkerThread("engine", lambda: EngineError("the engine's thread has ended"))
        self._driver: asyncio.Task[None] | None = None
        self._num_anonymous = 0
        self._is_closed = False
        self.num_generated_tokens = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            frozenset({"shared_memory"}),
            self._context,
            deterministic=True,
            max_sessions=self._scheduler.max_sessions,
            media=self._images is not None,
            dtype=self._dtype,
        )

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        """Return a completion, or raise EngineError. Keys and values stay in the cache for the session's prompts."""
        tokens = self._validated_tokens(prompt, params)
        self._num_anonymous += session_id is None
        session = session_id or f"anonymous {self._num_anonymous}"
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = Request(tokens, params, session, future, random.Random(params.seed))
        request.shift = 0 if self._images is None else self._images.shift(tokens)
        self._scheduler.add(request)
        self._wake()
        try:
            return await future
        finally:
            request.is_cancelled = True
            if self._images is not None:
                self._images.release(prompt)
            if session_id is None:
                await self.release(session)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        """Copy new weights into the model. Running sequences keep their tokens, and go on with the new version."""
        if update.transport != "shared_memory" or not isinstance(update.handle, torch.nn.Module):
            raise EngineError(f"the embedded engine takes a module in shared memory, got {update.transport!r}")
        if self._is_closed:
            raise EngineError("the engine was closed")
        future: asyncio.Future[PolicyVersion] = asyncio.get_running_loop().create_future()
        self._updates.append((update, future))
        self._wake()
        return await future

    async def release(self, session_id: str) -> None:
        """Free the session's slot of the KV cache. An unfinished generation of the session fails with EngineError."""
        for request in self._scheduler.requests:
            if request.session_id == session_id and not request.is_cancelled:
                request.is_cancelled, request.error = True, "the session was released"
                _resolve(request)
        self._scheduler.release(session_id)
        if not self._is_closed:
            self._wake()

    async def close(self) -> None:
        """Stop after the current decode step, and wait at most one minute. Unfinished calls fail with EngineError."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        self._fail_all("the engine was closed")
        await self._worker.close_and_wait()

    def _validated_tokens(self, prompt: Prompt, params: SamplingParams) -> tuple[int, ...]:
        if self._is_closed:
            raise EngineError("the engine was closed")
        if not prompt.token_ids:
            raise EngineError("a prompt needs at least one token")
        if params.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, got {params.max_tokens}")
        if len(prompt.token_ids) + params.max_tokens > self._context:
            raise EngineError(
                f"{len(prompt.token_ids)} prompt tokens and max_tokens={params.max_tokens} exceed "
                f"the context of {self._context} tokens"
            )
        if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < self._runner.vocab_size:
            raise EngineError(f"a token of the prompt is outside the vocabulary of {self._runner.vocab_size}")
        if not prompt.media:
            return prompt.token_ids
        if self._images is None:
            raise EngineError("the model has no vision, but the prompt has images")
        if prompt.media[-1].indices[-1] == len(prompt.token_ids) - 1:
            raise EngineError("the prompt ends with an image; a prompt has to end with text")
        try:
            return self._images.tokens(prompt)
        except UnsupportedChat as error:
            raise EngineError(str(error)) from error

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        try:
            while True:
                await self._apply_updates()
                if self._images is not None:
                    self._images.drop_unused()  # before cancelled requests leave: each request that runs has its images
                if not self._scheduler.schedule():
                    return
                for request in await self._worker.run(self._step):
                    _resolve(request)
        except EngineError as error:
            self._fail_all(str(error))
        except Exception as error:
            log.warning("the engine stopped", exc_info=error)
            self._fail_all(f"the engine stopped: {type(error).__name__}: {error}")

    def _step(self) -> list[Request]:
        try:
            with measure("prefill"):
                plan = self._scheduler.plan_prefill()
                self._runner.empty(plan.emptied)
                self._runner.prefill(plan.compute)
                self._runner.copy_prefixes(plan.prefix_copies)
                self._runner.prefill(plan.remainders)
                self._runner.copy_prefixes(plan.copies)
            for block, batch in self._scheduler.decode_batches():
                requests = [request for _, request in batch]
                with measure("generation"):
                    last = {row: request.last_token for row, request in batch}
                    shifts = {row: request.shift for row, request in batch if request.shift}
                    logits = self._runner.decode(block, last, shifts)  # (N, V)
                with measure("sampling"):
                    params, uniform = [one.params for one in requests], [one.random.random() for one in requests]
                    tokens, logprobs = sample_tokens(logits, params, uniform)  # (N,), (N,)
                    for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
                        _postprocess(request, token, logprob)
                self.num_generated_tokens += len(batch)
        except Exception as error:
            self._scheduler.fail_running(f"{type(error).__name__}: {error}")
        return self._scheduler.take_finished()

    async def _apply_updates(self) -> None:
        while self._updates:
            update, future = self._updates[0]  # the update stays in the list, so that close() can fail it
            try:
                settle(future, await self._worker.run(self._load_weights, update), None)
            except EngineError as error:
                settle(future, None, error)
            except Exception as error:
                settle(future, None, EngineError(f"the weights do not fit the engine's model: {error}"))
            self._updates.pop(0)

    def _load_weights(self, update: WeightUpdate) -> PolicyVersion:
        assert isinstance(update.handle, torch.nn.Module)
        with torch.no_grad():
            load_trained_weights(self._runner.model, trained_weights(update.handle))
        self._scheduler.on_new_weights(update.version.number)
        if self._images is not None:
            self._images.on_new_weights()
        if update.version.checksum is None:
            return update.version
        return replace(update.version, checksum=weights_checksum(self._runner.model))

    def _fail_all(self, reason: str) -> None:
        for request in self._scheduler.requests:
            request.error = reason
            _resolve(request)
        for _, future in self._updates:
            settle(future, None, EngineError(reason))


def _postprocess(request: Request, token: int, logprob: float) -> None:
    if not math.isfinite(logprob):
        request.error = f"the model gave a log-probability of {logprob}: its weights or logits are not finite"
        return
    params = request.params
    if request.first_token_seconds is None:
        request.first_token_seconds = perf_counter() - request.start
    request.token_ids.append(token)
    request.logprobs.append(logprob)
    if params.on_tokens is not None:
        params.on_tokens(request.token_ids)
    try:
        is_stop = token in params.stop_token_ids or (
            params.stop_condition is not None and params.stop_condition.is_met(request.token_ids)
        )
    except Exception as error:  # user code fails only this request
        request.error = f"the stop condition raised {type(error).__name__}: {error}"
        return
    if is_stop:
        request.finish_reason = "stop"
    elif len(request.token_ids) >= params.max_tokens:
        request.finish_reason = "length"


def _resolve(request: Request) -> None:
    if request.error is not None:
        settle(request.future, None, EngineError(request.error))
    else:
        spans, reason = tuple(request.version_spans), request.finish_reason or "cancelled"
        completion = Completion(
            *(tuple(request.token_ids), tuple(request.logprobs), reason, spans),
            first_token_seconds=request.first_token_seconds,
            prefilled_tokens=request.prefilled_tokens,
        )
        settle(request.future, completion, None)
