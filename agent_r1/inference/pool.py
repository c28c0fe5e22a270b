"""A pool of inference servers that serve the same weights, as one inference engine.

All turns of a session go to the same server, whose cache has the keys and values of the earlier turns. A server that
fails is fenced: it gets no more requests, and other servers continue its unfinished requests.

New weights are loaded in two phases: all servers pause and load the weights, and then all servers continue. So no two
servers sample from different versions.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import (
    Canary,
    Capabilities,
    Completion,
    FinishReason,
    InferenceEngine,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    WeightUpdate,
)
from agent_r1.core.profile import measure
from agent_r1.inference.server_process import ReplicaError

MAX_ABORTS = 20
"""A generation fails after this number of aborted requests in a row without a new token."""

ABORT_SECONDS = 0.05  # the pause after the first abort; each later pause is twice as long

MAX_ABORT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Piece:
    """The answer of a server to one request. "abort": the server ended the request before its end."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[PolicyVersionSpan, ...]
    finish_reason: Literal["stop", "length", "abort"]


Request = Callable[[Prompt, SamplingParams], Awaitable[Piece]]


async def generate_in_pieces(request: Request, prompt: Prompt, params: SamplingParams) -> Completion:
    """Sample a completion of ``prompt`` by one or more requests, each of which continues the tokens so far.

    Several requests are needed if the server aborts one, or stops at a stop string that does not meet the stop
    condition (for example, inside a thought). Raise EngineError after ``MAX_ABORTS`` aborts in a row without a new
    token.
    """
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[PolicyVersionSpan, ...] = ()
    aborts = 0
    while True:
        rest = replace(params, max_tokens=params.max_tokens - len(tokens), seed=seed_at(params.seed, len(tokens)))
        with measure("servers"):
            piece = await request(replace(prompt, token_ids=prompt.token_ids + tokens), rest)
        added = tuple(replace(span, start=span.start + len(tokens)) for span in piece.version_spans)
        spans += added[1:] if spans and added and spans[-1].version == added[0].version else added
        tokens, logprobs = tokens + piece.token_ids, logprobs + piece.logprobs
        if piece.token_ids and (reason := finish_reason(tokens, params)):
            return Completion(tokens, logprobs, reason, spans)
        aborts = aborts + 1 if piece.finish_reason == "abort" and not piece.token_ids else 0
        if aborts >= MAX_ABORTS:
            raise EngineError(f"the server aborted the same request {aborts} times")
        if piece.finish_reason == "abort":
            await asyncio.sleep(min(ABORT_SECONDS * 2**aborts, MAX_ABORT_SECONDS))


def finish_reason(tokens: tuple[int, ...], params: SamplingParams) -> FinishReason | None:
    """Return why a generation is complete after ``tokens`` (at least one token). None: it must be continued."""
    if tokens[-1] in params.stop_token_ids:
        return "stop"
    condition = params.stop_condition
    if condition is not None and condition.is_met(tokens):
        return "stop"
    return "length" if len(tokens) >= params.max_tokens else None


def seed_at(seed: int, position: int) -> int:
    """Return the seed (below 2^63) of a request that continues a completion after ``position`` sampled tokens."""
    if position == 0:
        return seed % 2**63
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 2**63


log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FAILURES = 3
"""After this number of failed requests in a row, a server gets no more requests, even if its health check passes."""


class Replica(InferenceEngine, Protocol):
    """An inference server in a pool. All methods raise ReplicaError if the server fails."""

    @property
    def name(self) -> str: ...

    async def request(self, prompt: Prompt, params: SamplingParams) -> Piece:
        """Send one request, and return the sampled tokens. After an abort by the server, return the tokens so far."""
        ...

    async def stage(self, update: WeightUpdate) -> None:
        """Load new weights. The server samples no token until :meth:`commit`."""
        ...

    async def commit(self, version: PolicyVersion) -> None:
        """Start to sample with the loaded weights, which have the version ``version``."""
        ...

    async def verify(self, canary: Canary) -> None:
        """Raise ReplicaError if the server's log-probabilities differ from those of the trainer."""
        ...

    async def check_health(self) -> None:
        """Raise ReplicaError if the server reports that it cannot work."""
        ...

    async def probe(self) -> None:
        """Sample one token, because a server that hangs can still report that it is healthy."""
        ...

    async def recover(self) -> None:
        """Let a paused server continue, and sample one token to test the server. The caller sets a time limit."""
        ...


RECOVERY_SECONDS = 10.0
"""The time limit for the test whether a failed server works again, in seconds."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of a pool."""

    in_flight: int = 64  # the largest number of requests that a server has at the same time
    update_seconds: float = 600.0  # the time limit for each phase of an update of the weights
    stall_seconds: float = 120.0  # the time limit for the next answer of a server that has requests


class EnginePool:
    """An ``InferenceEngine`` over several servers.

    Call :meth:`update_weights` before the first generation. Only an update checks which weights the servers have: each
    server must compute the trainer's log-probabilities for fixed prompts (see ``inference.canary``).
    """

    def __init__(self, replicas: Sequence[Replica], limits: PoolLimits | None = None) -> None:
        self._limits = limits or PoolLimits()
        self._members = [_Member(replica, self._limits.in_flight) for replica in replicas]
        self._sessions: dict[str, _Member] = {}
        self._updating = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._watcher: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        return self._members[0].replica.capabilities

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All servers, including servers that get no requests."""
        return tuple(member.replica for member in self._members)

    @property
    def loads(self) -> tuple[int, ...]:
        """The number of requests that each server has, in the order of ``replicas``."""
        return tuple(member.num_requests for member in self._members)

    @property
    def num_serving(self) -> int:
        """The number of servers that work. A failed server counts again after a successful update of its weights."""
        return sum(member.fenced is None for member in self._members)

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        """Return a completion. If a server fails, another server continues the tokens sampled so far."""

        async def request(prompt: Prompt, params: SamplingParams) -> Piece:
            return await self._request(prompt, params, session_id)

        return await generate_in_pieces(request, prompt, params)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        """Load new weights into all servers. Unfinished requests pause, and continue with them.

        A server that fails gets no more requests until a later update succeeds. Raise EngineError if none is left.
        """
        async with self._updating:
            self._open.clear()
            try:
                await asyncio.gather(*(self._recover(member) for member in self._members if member.fenced))
                working = [member for member in self._members if member.fenced is None or member.is_recovered]
                staged = await self._for_each(working, lambda replica: replica.stage(update))
                committed = await self._for_each(staged, lambda replica: replica.commit(update.version))
                verified = await self._for_each(committed, lambda replica: replica.verify(update.canary))
                for member in verified:
                    member.readmit(update.version.number)
            finally:
                self._open.set()
        if not verified:
            raise EngineError(f"no server serves version {update.version.number} of the weights: {self.reasons()}")
        return update.version

    async def release(self, session_id: str) -> None:
        member = self._sessions.pop(session_id, None)
        if member is not None:
            await member.replica.release(session_id)

    async def close(self) -> None:
        self._is_closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        for member in self._members:
            member.end("the engine was closed")
            await member.replica.close()

    async def _request(self, prompt: Prompt, params: SamplingParams, session_id: str | None) -> Piece:
        if self._watcher is None and not self._is_closed:
            self._watcher = asyncio.create_task(self._watch())
        while True:
            await self._open.wait()
            member = self._choose(session_id)
            with member.request():
                async with member.slots:
                    if self._open.is_set() and member.fenced is None:
                        piece = await self._request_from(member, prompt, params)
                        if piece is not None:
                            return piece

    async def _request_from(self, member: _Member, prompt: Prompt, params: SamplingParams) -> Piece | None:
        before = member.version
        try:
            piece = await member.run(member.replica.request(prompt, params))
            member.last_answer = time.monotonic()
            await self._open.wait()  # an update of the weights is in progress: its canary tests the server
            member.check_version(piece, before)
        except ReplicaError as error:
            await self._on_failure(member, str(error))
            return None
        member.num_failures = 0
        return piece if member.fenced is None else None

    def _choose(self, session_id: str | None) -> _Member:
        serving = [member for member in self._members if member.fenced is None]
        if not serving:
            raise EngineError(f"no inference server is left: {self.reasons()}")
        known = None if session_id is None else self._sessions.get(session_id)
        if known is not None and known.fenced is None:
            return known
        least = min(serving, key=lambda member: member.num_requests)
        if session_id is not None:
            self._sessions[session_id] = least
        return least

    async def _on_failure(self, member: _Member, reason: str) -> None:
        member.num_failures += 1
        if member.num_failures >= MAX_FAILURES:
            member.fence(reason)
        try:
            await member.replica.check_health()
        except ReplicaError:
            member.fence(reason)

    async def _for_each(self, members: Sequence[_Member], work: Callable[[Replica], Awaitable[None]]) -> list[_Member]:
        async def attempt(member: _Member) -> bool:
            try:
                async with asyncio.timeout(self._limits.update_seconds):
                    await work(member.replica)
            except EngineError as error:
                member.fence(str(error))
                return False
            except TimeoutError:
                member.fence(f"an update of the weights took longer than {self._limits.update_seconds:g} s")
                return False
            return True

        done = await asyncio.gather(*map(attempt, members))
        return [member for member, succeeded in zip(members, done, strict=True) if succeeded]

    async def _recover(self, member: _Member) -> None:
        member.is_recovered = False
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(RECOVERY_SECONDS):
                await member.replica.recover()
                member.is_recovered = True

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._limits.stall_seconds / 4)
            silent = [member for member in self._members if member.is_silent(self._limits.stall_seconds / 4)]
            await asyncio.gather(*map(self._probe, silent if self._open.is_set() else []))

    async def _probe(self, member: _Member) -> None:
        try:
            async with asyncio.timeout(self._limits.stall_seconds):
                await member.replica.probe()
            member.last_answer = time.monotonic()
        except TimeoutError:
            # during an update no server samples; and the request of a full server may have ended meanwhile
            if self._open.is_set() and member.is_silent(self._limits.stall_seconds):
                member.fence(f"it answered nothing for {self._limits.stall_seconds:g} s")
        except EngineError as error:
            member.fence(str(error))

    def reasons(self) -> str:
        """Return why servers get no requests, such as "name: reason; name: reason"."""
        return "; ".join(f"{member.replica.name}: {member.fenced}" for member in self._members if member.fenced)


class _Member:
    """A server of a pool, and its state."""

    def __init__(self, replica: Replica, in_flight: int) -> None:
        self.replica = replica
        self.slots = asyncio.Semaphore(in_flight)
        self.version: int | None = None
        self.fenced: str | None = None
        self.is_recovered = False
        self.num_requests, self.num_failures = 0, 0
        self.last_answer = time.monotonic()
        self._on_fence: set[asyncio.Future[None]] = set()

    @contextmanager
    def request(self) -> Iterator[None]:
        if self.num_requests == 0:
            self.last_answer = time.monotonic()
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        fenced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = asyncio.create_task(work)
        self._on_fence.add(fenced)
        try:
            either: set[asyncio.Future[Any]] = {request, fenced}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return request.result()
            raise ReplicaError(self.fenced or "it is fenced")
        finally:
            self._on_fence.discard(fenced)
            request.cancel()

    def fence(self, reason: str) -> None:
        if self.fenced is None:
            log.warning("the inference server %s is left out: %s", self.replica.name, reason)
        self.end(reason)

    def end(self, reason: str) -> None:
        self.fenced = self.fenced or reason
        for future in self._on_fence:
            if not future.done():
                future.set_result(None)

    def readmit(self, version: int) -> None:
        if self.fenced is not None:
            log.warning("the inference server %s serves again", self.replica.name)
        self.fenced, self.num_failures, self.version = None, 0, version

    def is_silent(self, seconds: float) -> bool:
        waits = self.fenced is None and self.num_requests > 0
        return waits and time.monotonic() - self.last_answer > seconds

    def check_version(self, piece: Piece, before: int | None) -> None:
        versions = [span.version for span in piece.version_spans]
        if before is None or self.version is None or not versions:
            return
        if min(versions) < before or max(versions) > self.version:
            raise ReplicaError(f"it sampled with version {min(versions)} of the weights instead of {self.version}")
