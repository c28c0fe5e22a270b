"""Coalescing of retries: a client's repetition of a request gets the answer of the first try.

The clients of OpenAI and Anthropic repeat a request after a timeout or a lost connection. If each repetition sampled
again, an attempt would contain turns that its agent never saw. They also repeat a request that failed: such a
repetition is sampled again, although an equal request may have an answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agent_r1.core.tasks import shared_task
from agent_r1.gateway.chat import Answer, ChatModel, ChatRequest, Draft, RequestError

ABANDONED_SECONDS = 30.0
"""How long an answer is sampled for which no client waits, in seconds. Meanwhile a retry can join."""


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What identifies a request for its repetition.

    Attributes:
        digest: the hash of path and body.
        key: the header ``Idempotency-Key``, or None.
        num_retries: how often the client has sent the request before (header ``X-Stainless-Retry-Count``).
    """

    digest: bytes
    key: str | None = None
    num_retries: int = 0


class PendingAnswer:
    """The answer to a request, and how many clients wait for it now.

    ``num_retries`` is that of the latest request that got this answer: a retry repeats the answer to an earlier try.
    """

    def __init__(self, identity: RequestIdentity, drafting: asyncio.Task[Draft]) -> None:
        self.identity, self.drafting = identity, drafting
        self.num_retries, self.num_waiting = identity.num_retries, 0
        self.is_delivered = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a client that waits for the answer. After the last one has left, the sampling ends soon."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1
            if self.is_abandoned and not self.drafting.done():
                asyncio.get_running_loop().call_later(ABANDONED_SECONDS, self._cancel_if_abandoned)

    def _cancel_if_abandoned(self) -> None:
        if self.is_abandoned:
            self.drafting.cancel()

    @property
    def is_abandoned(self) -> bool:
        """Whether no client has received the answer, and none waits for it."""
        return self.num_waiting == 0 and not self.is_delivered

    @property
    def answer(self) -> Answer:
        """The answer, which is complete. Raises RequestError if the request failed."""
        return self.drafting.result().answer

    def deliver(self) -> None:
        """Record that a client receives the answer."""
        if not self.is_delivered:
            self.is_delivered = True
            self.drafting.result().deliver()


class AnswerLog:
    """The requests to one model: those in progress, and answers that a repetition can still ask for.

    Args:
        model: answers the requests.
        num_kept: the number of complete answers that are kept for repetitions.
    """

    def __init__(self, model: ChatModel, num_kept: int) -> None:
        self.model, self._num_kept = model, num_kept
        self._pending: list[PendingAnswer] = []
        self._num_failures: Counter[bytes] = Counter()  # failed requests that were not repeated yet, by their digests

    @property
    def num_in_progress(self) -> int:
        return sum(not pending.drafting.done() for pending in self._pending)

    def submit(self, request: ChatRequest, identity: RequestIdentity) -> PendingAnswer:
        """Return the answer to a request: of an earlier try if the request repeats one, otherwise a new one.

        Raise RequestError if ``identity.key`` was used for another request.
        """
        self._forget()
        known = self._find(identity)
        if known is not None:
            known.num_retries = max(known.num_retries, identity.num_retries)
            return known
        pending = PendingAnswer(identity, shared_task(_draft(self.model, request)))
        self._pending.append(pending)
        return pending

    def close(self) -> None:
        """Cancel the requests in progress."""
        for pending in self._pending:
            pending.drafting.cancel()
        self._forget()

    def _find(self, identity: RequestIdentity) -> PendingAnswer | None:
        """Return the pending answer to the request that ``identity`` repeats, or None.

        Without a key and a retry count, only an abandoned answer matches: an agent can sample the same conversation
        several times in parallel. A counted retry repeats a failed request if there is one, otherwise an earlier try.
        """
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
        if self._num_failures[identity.digest]:
            self._num_failures[identity.digest] -= 1
            return None
        tries = [pending for pending in same if pending.num_retries < identity.num_retries]
        return max(tries, key=lambda pending: pending.num_retries, default=None)

    def _forget(self) -> None:
        """Forget failed requests, which a repetition has to try again, and the oldest of the complete answers."""
        self._num_failures.update(one.identity.digest for one in self._pending if _can_be_repeated(one.drafting))
        self._pending = [one for one in self._pending if not _has_failed(one.drafting)]
        complete = [one for one in self._pending if one.drafting.done() and one.num_waiting == 0]
        for old in complete[: max(0, len(complete) - self._num_kept)]:
            self._pending.remove(old)


async def _draft(model: ChatModel, request: ChatRequest) -> Draft:
    return await model.draft(request)


def _has_failed(task: asyncio.Task[Draft]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _can_be_repeated(task: asyncio.Task[Draft]) -> bool:
    """Return whether a failed request is one that its client sends again."""
    if task.cancelled():
        return True
    error = task.exception() if task.done() else None
    return isinstance(error, RequestError) and error.can_retry
