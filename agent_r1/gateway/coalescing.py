"""Answer a repeated request with the answer to the first request.

The client libraries of OpenAI and Anthropic repeat a request after a timeout or a lost connection. If a repetition were
sampled again, an attempt would contain turns that its agent never saw. A request is a repetition if it has the path and
the body of an earlier request, and either a larger number of retries (header ``X-Stainless-Retry-Count``), or no client
waits for the earlier answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from agent_r1.gateway.chat import ChatAnswer, ChatModel, ChatRequest, Draft, LiveAnswer, RequestError

ABANDONED_SECONDS = 30.0
"""How long the sampling of an answer continues while no client waits for the answer, in seconds."""


class PendingAnswer:
    """An answer that is complete or still being sampled. A request and its repetitions share one answer.

    Attributes:
        digest: the hash of the request.
        num_retries: the largest number of retries of the requests that share the answer.
        drafting: the asyncio task that samples the answer.
        live: the part that was sampled so far, if the model streams.
        num_waiting: how many clients wait for the answer now.
        is_delivered: whether the answer was sent to a client.
    """

    def __init__(self, digest: bytes, num_retries: int, drafting: asyncio.Task[Draft], live: LiveAnswer) -> None:
        self.digest, self.num_retries, self.drafting, self.live = digest, num_retries, drafting, live
        self.num_waiting, self.is_delivered = 0, False

    @contextmanager
    def waiting(self, grace: float | None = None) -> Iterator[None]:
        """Count one more waiting client until the ``with`` block ends.

        If the answer is then abandoned, and also ``grace`` seconds later (by default ``ABANDONED_SECONDS``), its
        sampling is cancelled.
        """
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1
            if self.is_abandoned and not self.drafting.done():
                seconds = ABANDONED_SECONDS if grace is None else grace
                cancel = self.drafting.cancel
                asyncio.get_running_loop().call_later(seconds, lambda: self.is_abandoned and cancel())

    @property
    def is_abandoned(self) -> bool:
        """Whether no client has received the answer, and no client waits for it."""
        return self.num_waiting == 0 and not self.is_delivered

    @property
    def answer(self) -> ChatAnswer:
        """The complete answer, available after ``drafting`` is done. Raise RequestError if ``drafting`` failed."""
        return self.drafting.result().answer

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

    @property
    def num_in_progress(self) -> int:
        return sum(not pending.drafting.done() for pending in self._pending)

    def submit(self, request: ChatRequest, digest: bytes, num_retries: int = 0) -> PendingAnswer:
        """Return the answer to ``request``. A repetition of an earlier request gets the earlier answer.

        Raise RequestError after :meth:`close`.
        """
        if self._is_closed:  # for example while the body of the request arrived
            raise key_ended()
        self._forget()
        repeated = [
            pending
            for pending in self._pending
            if pending.digest == digest and (pending.num_retries < num_retries or pending.is_abandoned)
        ]
        if repeated:
            # Equal requests can be sent in parallel. The most likely one is the one whose client left, and then the one
            # that was repeated before.
            known = max(repeated, key=lambda pending: (pending.is_abandoned, pending.num_retries))
            known.num_retries = max(known.num_retries, num_retries)
            return known
        live = LiveAnswer()
        drafting = asyncio.create_task(_draft(self.model, request, live))
        # reads the exception of the task, because asyncio logs a traceback for an exception that nobody reads
        drafting.add_done_callback(_has_failed)
        self._pending.append(PendingAnswer(digest, num_retries, drafting, live))
        return self._pending[-1]

    def close(self) -> None:
        """Cancel all unfinished answers, and refuse later requests."""
        self._is_closed = True
        for pending in self._pending:
            pending.drafting.cancel()
        self._pending.clear()

    def _forget(self) -> None:
        # the repetition of a request that failed or was cancelled is sampled again
        self._pending = [one for one in self._pending if not _has_failed(one.drafting)]
        complete = [one for one in self._pending if one.drafting.done() and one.num_waiting == 0]
        for old in complete[: max(0, len(complete) - self._num_kept)]:
            self._pending.remove(old)


def key_ended() -> RequestError:
    """Return the error for a request whose API key was revoked while the request was in progress."""
    return RequestError(401, "the episode of this API key has ended", code="invalid_api_key")


async def _draft(model: ChatModel, request: ChatRequest, live: LiveAnswer) -> Draft:
    return await model.draft(request, live)


def _has_failed(task: asyncio.Task[Draft]) -> bool:
    if task.done():
        return task.cancelled() or task.exception() is not None
    return task.cancelling() > 0
