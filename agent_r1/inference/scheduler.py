"""The scheduler of the embedded engine: assigns slots of the KV cache to requests, and selects the tokens to compute.

The scheduler never reads or writes a tensor.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

from agent_r1.core.inference import Completion, FinishReason, PolicyVersionSpan, SamplingParams, TopLogprobs
from agent_r1.inference.cache_pages import CachePages, pages_for
from agent_r1.inference.kv_cache import CacheSlot
from agent_r1.inference.model_runner import PrefillChunk, PrefixCopy


@dataclass(slots=True, eq=False)
class Request:
    """One call of ``generate``: its prompt and parameters, and the tokens sampled so far.

    Attributes:
        prompt: the tokens. A negative token stands for a feature of an image.
        shift: the position of a sampled token in the model's position encoding, minus the index of the token in the
            sequence. This difference is the same for all sampled tokens; without images, 0.
        prefilled_tokens: the number of tokens that were prefilled for this request. Tokens whose keys and values were
            copied from another sequence in the KV cache are not counted. The prompt and the sampled tokens are
            prefilled and counted again if the request's slot in the KV cache is emptied, or if the weights change.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    session_id: str
    future: asyncio.Future[Completion]
    random: random.Random
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    version_spans: list[PolicyVersionSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_cancelled: bool = False
    is_prefilled: bool = False
    shift: int = 0
    start: float = field(default_factory=perf_counter)
    first_token_seconds: float | None = None
    prefilled_tokens: int = 0

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.prompt[-1]

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """The tokens whose keys and values the next decode step needs: the whole sequence except the last token."""
        return (*self.prompt, *self.token_ids)[:-1]


Prefills = tuple[tuple[int, int], ...]
"""Ranges (start, end) of a sequence: prefill passes computed the keys and values of the tokens in these ranges. For all
tokens outside the ranges, decode steps computed the keys and values."""


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
    """The work of a prefill. The work is done in the order of the attributes.

    Attributes:
        emptied: the slots whose keys and values are removed, because other slots need their memory.
        compute: the chunks that are computed before anything is copied.
        prefix_copies: copies of the first part of a sequence, from a slot that holds the same first tokens.
        remainders: for each copy in ``prefix_copies``, the chunk with the tokens after the copied tokens.
        copies: copies that complete a sequence, from a slot that holds the whole sequence.
    """

    emptied: list[CacheSlot] = field(default_factory=list)
    compute: list[PrefillChunk] = field(default_factory=list)
    prefix_copies: list[PrefixCopy] = field(default_factory=list)
    remainders: list[PrefillChunk] = field(default_factory=list)
    copies: list[PrefixCopy] = field(default_factory=list)


class Scheduler:
    """A scheduler with continuous batching: requests join and leave the running batch between any two decode steps.

    A session holds one sequence, and has a slot: a place for one sequence in the KV cache. A session keeps its slot
    until the session is released. So each turn of an episode usually computes only its new tokens. Equal prompts are
    computed once and copied, for example for several attempts at a task.

    All slots share the memory, which has room for ``pages`` pages. If a running request needs a page and no page is
    free, slots are emptied. An emptied slot loses its tokens and pages. A session keeps its emptied slot. Slots are
    emptied in this order:

    - slots without a session, which can still hold the tokens of a released session,
    - slots of sessions without a running request, the longest idle session first,
    - the slot of the running request that started last. This request then waits.

    The tokens of an emptied slot are prefilled again when a request needs them.

    Args:
        rows: the number of slots in a block. A block is a part of the KV cache (see ``inference.kv_cache``).
        max_blocks: the maximum number of blocks. A request waits if no slot is free.
        pages: the number of pages that fit in memory. The longest sequence must fit.
        session_pages: the number of pages that a new session takes.
        add_block: allocates a block of the KV cache, and returns the index of the block.
        prefix_multiple: the length of a shared prefix is a multiple of this number. If this number is the length of a
            prefill chunk, sharing changes no bits of the results.
    """

    def __init__(
        self,
        rows: int,
        max_blocks: int,
        pages: int,
        session_pages: int,
        add_block: Callable[[], int],
        prefix_multiple: int,
    ) -> None:
        self._rows, self._max_blocks, self._add_block = rows, max_blocks, add_block
        self._pages, self._session_pages = CachePages(pages), session_pages
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
        return self._rows * self._max_blocks

    @property
    def requests(self) -> tuple[Request, ...]:
        return (*self._waiting, *self._running.values())

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def release(self, session_id: str) -> None:
        """Free a session's slot before the next decode step. A running request of the session is cancelled."""
        self._released.append(session_id)

    def schedule(self) -> bool:
        """Free the slots of released sessions, and start waiting requests. Return whether any request is running.

        A request waits if no slot or too few pages are free, or if another request of its session is running.
        """
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
        """Start a waiting request if a slot and enough pages are free. Return whether the request was started."""
        session = self._sessions.get(request.session_id)
        if session is None and not self._free:  # each slot belongs to a session
            if self._num_blocks >= self._max_blocks:
                return False
            self._num_blocks += 1
            block = self._add_block()
            self._free.extend(CacheSlot(block, row) for row in range(self._rows))
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
        """Let ``slot`` hold enough pages for all tokens of ``request``. Return whether enough pages were found.

        If too few pages are free, other slots are emptied. The slots without a session are emptied first. If
        ``may_empty_sessions`` is true, the slots of sessions that have no running request are emptied next. If the
        pages of all these slots are not enough, no slot is emptied.

        ``spare`` is the number of pages that must still be free at the end.
        """
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
        return max(pages_for(len(request.prompt) + len(request.token_ids)), self._session_pages)

    def _empty(self, slot: CacheSlot) -> None:
        self._pages.drop(slot)
        self._forget_prefixes(slot)
        self._emptied.append(slot)
        for session in self._sessions.values():
            if session.slot == slot:
                session.token_ids = session.prefills = ()

    def plan_prefill(self) -> PrefillPlan:
        """Return the prefill that the running requests need. Equal sequences and prefixes are computed only once.

        After the prefill, the KV cache holds all tokens of each running sequence except the last token.
        """
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
        """Add the prefill of a new sequence to ``plan``. Return how many of its tokens are computed.

        The tokens that are copied from another slot are not counted.
        """
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
        """Remove the finished and the failed requests from the running batch, and return them.

        The session of a request keeps its slot in the KV cache. After a failed request, the tokens in the slot are no
        longer used.
        """
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
