"""Answer a repeated request with the answer to the first request.

The client libraries of OpenAI and Anthropic repeat a request after a timeout or a lost connection. If a repetition were
sampled again, an attempt would contain turns that its agent never saw. A repeated request is sampled again if sampling
the first answer failed or was cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from agent_r1.gateway.chat import Answer, ChatModel, ChatRequest, Draft, LiveAnswer, RequestError
from agent_r1.gateway.streams import POLL_SECONDS

ABANDONED_SECONDS = 30.0
"""How long the sampling of an answer continues while no client waits for the answer, in seconds."""

MAX_FAILURES = 1024
"""The largest number of different failed requests that are remembered."""


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The parts of an HTTP request that show whether the request repeats an earlier request.

    Attributes:
        digest: the hash of path and body.
        key: the header ``Idempotency-Key``, or None.
        num_retries: how often the client has already sent the request (header ``X-Stainless-Retry-Count``).
    """

    digest: bytes
    key: str | None = None
    num_retries: int = 0


class PendingAnswer:
    """An answer that is complete or still being sampled. A request and its repetitions share one answer.

    Attributes:
        identity: the identity of the first request.
        drafting: the asyncio task that samples the answer.
        live: the part that was sampled so far, if the model streams.
        num_retries: the largest ``num_retries`` of the requests that share the answer.
        num_waiting: how many clients wait for the answer now.
        is_delivered: whether the answer was sent to a client.
    """

    def __init__(self, identity: RequestIdentity, drafting: asyncio.Task[Draft], live: LiveAnswer) -> None:
        self.identity, self.drafting, self.live = identity, drafting, live
        self.num_retries, self.num_waiting = identity.num_retries, 0
        self.is_delivered = False

    @contextmanager
    def waiting(self, grace: float | None = None) -> Iterator[None]:
        """Count one more waiting client until the ``with`` block ends.

        An answer is abandoned if no client waits for the answer, and no client has received the answer. If the answer
        is abandoned when the block ends, it is checked again ``grace`` seconds later. If the answer is then also
        abandoned, its sampling is cancelled. The default of ``grace`` is ``ABANDONED_SECONDS``.
        """
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1
            if self.is_abandoned and not self.drafting.done():
                seconds = ABANDONED_SECONDS if grace is None else grace
                asyncio.get_running_loop().call_later(seconds, self._cancel_if_abandoned)

    def _cancel_if_abandoned(self) -> None:
        if self.is_abandoned:
            self.drafting.cancel()

    @property
    def is_abandoned(self) -> bool:
        """Whether no client has received the answer, and no client waits for it."""
        return self.num_waiting == 0 and not self.is_delivered

    @property
    def answer(self) -> Answer:
        """The complete answer, available after ``drafting`` is done. Raise RequestError if ``drafting`` failed."""
        return self.drafting.result().answer

    async def begin(self) -> None:
        """Wait for the first token if the model streams, otherwise for the complete answer."""
        while not self.drafting.done() and not self.live.has_begun:
            await asyncio.wait({self.drafting}, timeout=POLL_SECONDS)

    def deliver(self) -> None:
        """Record that a client now gets the answer. Later calls do nothing."""
        if not self.is_delivered:
            self.is_delivered = True
            self.drafting.result().deliver()


class AnswerLog:
    """The answers of one model: unfinished answers, and the newest ``num_kept`` complete answers."""

    def __init__(self, model: ChatModel, num_kept: int) -> None:
        self.model, self._num_kept = model, num_kept
        self._pending: list[PendingAnswer] = []
        self._is_closed = False
        self._num_failures: dict[bytes, int] = {}  # failed requests that were not repeated yet, by their digests

    @property
    def num_in_progress(self) -> int:
        return sum(not pending.drafting.done() for pending in self._pending)

    def submit(self, request: ChatRequest, identity: RequestIdentity) -> PendingAnswer:
        """Return the answer to ``request``. A repetition of an earlier request gets the earlier answer.

        Raise RequestError if ``identity.key`` was used for a different request, or after :meth:`close`.
        """
        if self._is_closed:  # for example while the body of the request arrived
            raise key_ended()
        self._forget()
        known = self._find(identity)
        if known is not None:
            known.num_retries = max(known.num_retries, identity.num_retries)
            return known
        live = LiveAnswer()
        pending = PendingAnswer(identity, asyncio.create_task(_draft(self.model, request, live)), live)
        num_failures = self._num_failures.get(identity.digest, 0)
        pending.drafting.add_done_callback(partial(self._count_failures, identity.digest, num_failures))
        self._pending.append(pending)
        return pending

    def close(self) -> None:
        """Cancel all unfinished answers, and refuse later requests."""
        self._is_closed = True
        for pending in self._pending:
            pending.drafting.cancel()
        self._forget()

    def _find(self, identity: RequestIdentity) -> PendingAnswer | None:
        # Return the earlier answer that a new request must get, or None if a new answer must be sampled.
        if identity.key is not None:
            same_key = [pending for pending in self._pending if pending.identity.key == identity.key]
            if any(pending.identity.digest != identity.digest for pending in same_key):
                raise RequestError(400, "this Idempotency-Key was used for another request", code="idempotency_error")
            return same_key[-1] if same_key else None
        same = [
            pending
            for pending in self._pending
            if pending.identity.digest == identity.digest and not pending.drafting.cancelling()
        ]
        abandoned = next((pending for pending in same if pending.is_abandoned), None)
        if abandoned is not None or identity.num_retries == 0:
            return abandoned
        if identity.digest in self._num_failures:
            self._change_failures(identity.digest, -1)
            return None
        tries = [pending for pending in same if pending.num_retries < identity.num_retries]
        return max(tries, key=lambda pending: pending.num_retries, default=None)

    def _forget(self) -> None:
        self._pending = [one for one in self._pending if not _has_failed(one.drafting)]
        complete = [one for one in self._pending if one.drafting.done() and one.num_waiting == 0]
        for old in complete[: max(0, len(complete) - self._num_kept)]:
            self._pending.remove(old)

    def _count_failures(self, digest: bytes, num_earlier: int, drafting: asyncio.Task[Draft]) -> None:
        # This also reads the exception of the task: asyncio logs a traceback for an unread exception.
        if _can_be_repeated(drafting):
            self._change_failures(digest, 1)
        elif not _has_failed(drafting):
            self._change_failures(digest, -num_earlier)

    def _change_failures(self, digest: bytes, change: int) -> None:
        number = self._num_failures.pop(digest, 0) + change
        if number > 0:
            self._num_failures[digest] = number  # at the end, because the oldest one is forgotten first
        if len(self._num_failures) > MAX_FAILURES:
            del self._num_failures[next(iter(self._num_failures))]


def key_ended() -> RequestError:
    """Return the error for a request whose API key was revoked while the request was in progress."""
    return RequestError(401, "the episode of this API key has ended", code="invalid_api_key")


async def _draft(model: ChatModel, request: ChatRequest, live: LiveAnswer) -> Draft:
    return await model.draft(request, live)


def _has_failed(task: asyncio.Task[Draft]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _can_be_repeated(task: asyncio.Task[Draft]) -> bool:
    if task.cancelled():
        return True
    error = task.exception() if task.done() else None
    return isinstance(error, RequestError) and error.can_retry
