"""Which request holds which slot of the KV cache, and what of its prefix is already there.

All of this is bookkeeping on the host: the scheduler never touches a tensor.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from agent_r1.core.inference import Completion, FinishReason, PolicyVersionSpan, SamplingParams
from agent_r1.inference.kv_cache import CacheSlot
from agent_r1.inference.model_runner import PrefillChunk


@dataclass(slots=True, eq=False)
class Request:
    """One generation on its way through the engine."""

    prompt: tuple[int, ...]
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

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.prompt[-1]

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """The tokens that the KV cache must hold before the next decode step: all but the last one."""
        return (*self.prompt, *self.token_ids)[:-1]


@dataclass(slots=True)
class _Session:
    """A session's slot, and the tokens whose keys and values it holds."""

    slot: CacheSlot
    token_ids: tuple[int, ...] = ()


class Scheduler:
    """Continuous batching: requests join and leave the running batch between any two steps.

    A session keeps its slot from its first request until it is released, so that each turn of an episode computes only
    its new tokens. A prefix cache maps prompts to slots that hold them: of equal new prompts, as in a group of attempts
    at one task, one is computed and the others are copied.

    Args:
        rows: slots of a block.
        max_blocks: the most blocks that fit into memory; requests without a free slot wait.
        add_block: allocates a block of the KV cache and returns its index.
    """

    def __init__(self, rows: int, max_blocks: int, add_block: Callable[[], int]) -> None:
        self._rows, self._max_blocks, self._add_block = rows, max_blocks, add_block
        self._num_blocks = 0
        self._version = 0
        self._free: deque[CacheSlot] = deque()
        self._sessions: dict[str, _Session] = {}
        self._prefix_cache: dict[tuple[int, ...], CacheSlot] = {}
        self._waiting: list[Request] = []
        self._running: dict[CacheSlot, Request] = {}
        self._released: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._released)

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests that are not finished."""
        return (*self._waiting, *self._running.values())

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def release(self, session_id: str) -> None:
        """Free the session's slot before the next step."""
        self._released.append(session_id)

    def schedule(self) -> bool:
        """Give waiting requests the slot of their session or a free one; return whether any request is running."""
        self._free_released()
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if request.is_cancelled:
                continue
            session = self._sessions.get(request.session_id) or self._open_session(request.session_id)
            if session is None or session.slot in self._running:
                self._waiting.append(request)
            else:
                request.version_spans.append(PolicyVersionSpan(0, self._version))
                self._running[session.slot] = request
        return bool(self._running)

    def _free_released(self) -> None:
        released, self._released = self._released, []
        for session_id in released:
            session = self._sessions.pop(session_id, None)
            if session is None:
                continue
            if session.slot in self._running:
                self._running.pop(session.slot).is_cancelled = True
            self._free.append(session.slot)

    def _open_session(self, session_id: str) -> _Session | None:
        if not self._free:
            if self._num_blocks >= self._max_blocks:
                return None
            self._num_blocks += 1
            block = self._add_block()
            self._free.extend(CacheSlot(block, row) for row in range(self._rows))
        slot = self._free.popleft()
        self._forget_prefixes(slot)
        self._sessions[session_id] = _Session(slot)
        return self._sessions[session_id]

    def drop_cancelled(self) -> None:
        for slot in [slot for slot, request in self._running.items() if request.is_cancelled]:
            del self._running[slot]

    def plan_prefill(self) -> tuple[list[PrefillChunk], list[tuple[CacheSlot, PrefillChunk]]]:
        """Return the chunks to compute, and those to copy instead, each with the slot to copy from.

        The chunks to compute must run first: a slot to copy from may be prefilled in the same step. After both, every
        running slot holds all but the last token of its sequence.
        """
        new: list[PrefillChunk] = []
        for slot, request in self._running.items():
            if not request.is_prefilled:
                request.is_prefilled = True
                session, needed = self._sessions[request.session_id], request.cached_tokens
                cached = _common_prefix(session.token_ids, needed)
                if cached < len(session.token_ids):
                    self._forget_prefixes(slot)  # its later tokens will be overwritten
                session.token_ids = needed
                new.append(PrefillChunk(slot, cached, needed[cached:]))
        # Slots that will be overwritten have left the prefix cache by now, so that its entries are valid.
        for chunk in new:
            if chunk.cached == 0 and chunk.token_ids:
                self._prefix_cache.setdefault(chunk.token_ids, chunk.slot)
        compute: list[PrefillChunk] = []
        copy: list[tuple[CacheSlot, PrefillChunk]] = []
        for chunk in new:
            source = self._prefix_cache.get(chunk.token_ids, chunk.slot) if chunk.cached == 0 else chunk.slot
            if source == chunk.slot:
                compute.append(chunk)
            else:
                copy.append((source, chunk))
        return compute, copy

    def decode_batches(self) -> Iterator[tuple[int, list[tuple[int, Request]]]]:
        """Yield the index of each block with its running requests by row."""
        for block in range(self._num_blocks):
            batch = [(slot.row, request) for slot, request in self._running.items() if slot.block == block]
            if batch:
                yield block, batch

    def fail_running(self, reason: str) -> None:
        """Make all running requests fail; nothing that the cache holds is relied on afterwards."""
        self._prefix_cache.clear()
        for request in self._running.values():
            request.error = reason

    def take_finished(self) -> list[Request]:
        """Remove the requests that ended from the running batch and return them. Their sessions keep their slots."""
        finished = [
            (slot, request) for slot, request in self._running.items() if request.finish_reason or request.error
        ]
        for slot, request in finished:
            del self._running[slot]
            self._sessions[request.session_id].token_ids = () if request.error else request.cached_tokens
        return [request for _, request in finished]

    def on_new_weights(self, version: int) -> None:
        """Invalidate all keys and values: running sequences are prefilled again, and a new version span begins."""
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
    """Return how many tokens at the start of ``needed`` are equal to the start of ``held``."""
    if needed[: len(held)] == held:
        return len(held)
    return next((i for i, (a, b) in enumerate(zip(held, needed, strict=False)) if a != b), len(needed))
