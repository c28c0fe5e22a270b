"""Coalescing of retries: a client's repetition of a request gets the answer of the first try.

The clients of OpenAI and Anthropic repeat a request after a timeout or a lost connection. If each repetition sampled
again, an attempt would contain turns that its agent never saw.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agent_r1.core.tasks import shared_task
from agent_r1.gateway.chat import Answer, ChatModel, ChatRequest, Draft, RequestError


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What identifies a request for its repetition.

    Attributes:
        digest: the hash of path and body.
        key: the header ``Idempotency-Key``, or None.
        is_retry: whether the client says that it repeats the request (header ``X-Stainless-Retry-Count``).
    """

    digest: bytes
    key: str | None = None
    is_retry: bool = False


class PendingAnswer:
    """The answer to a request, and how many clients wait for it now."""

    def __init__(self, identity: RequestIdentity, drafting: asyncio.Task[Draft]) -> None:
        self.identity, self.drafting = identity, drafting
        self.num_waiting = 0
        self.is_delivered = False

    @property
    def is_abandoned(self) -> bool:
        """Whether no client has received the answer, and none waits for it."""
        return self.num_waiting == 0 and not self.is_delivered

    def deliver(self) -> Answer:
        """Return the answer, which is complete, to a client."""
        draft = self.drafting.result()
        if not self.is_delivered:
            self.is_delivered = True
            draft.deliver()
        return draft.answer


class AnswerLog:
    """The requests to one model: those in progress, and answers that a repetition can still ask for.

    Args:
        model: answers the requests.
        num_kept: the number of complete answers that are kept for repetitions.
    """

    def __init__(self, model: ChatModel, num_kept: int) -> None:
        self.model, self._num_kept = model, num_kept
        self._pending: list[PendingAnswer] = []

    @property
    def num_in_progress(self) -> int:
        return sum(not pending.drafting.done() for pending in self._pending)

    def submit(self, request: ChatRequest, identity: RequestIdentity) -> PendingAnswer:
        """Return the answer to a request: of an earlier try if the request repeats one, otherwise a new one.

        Raise RequestError if too many requests are in progress, or if ``identity.key`` was used for another request.
        """
        self._forget()
        known = self._find(identity)
        if known is not None:
            return known
        if self.num_in_progress >= self.model.max_concurrent:
            limit = self.model.max_concurrent
            raise RequestError(
                429, f"at most {limit} requests at the same time", code="rate_limit_exceeded", can_retry=True
            )
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
        several times in parallel.
        """
        if identity.key is not None:
            same_key = [pending for pending in self._pending if pending.identity.key == identity.key]
            if any(pending.identity.digest != identity.digest for pending in same_key):
                raise RequestError(400, "this Idempotency-Key was used for another request", code="idempotency_error")
            return same_key[-1] if same_key else None
        same = [pending for pending in self._pending if pending.identity.digest == identity.digest]
        abandoned = next((pending for pending in same if pending.is_abandoned), None)
        return same[-1] if abandoned is None and identity.is_retry and same else abandoned

    def _forget(self) -> None:
        """Forget failed requests, which a repetition has to try again, and the oldest of the complete answers."""
        self._pending = [one for one in self._pending if not _has_failed(one.drafting)]
        complete = [one for one in self._pending if one.drafting.done() and one.num_waiting == 0]
        for old in complete[: max(0, len(complete) - self._num_kept)]:
            self._pending.remove(old)


async def _draft(model: ChatModel, request: ChatRequest) -> Draft:
    return await model.draft(request)


def _has_failed(task: asyncio.Task[Draft]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
