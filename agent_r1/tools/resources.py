"""What the tools of one episode hold: an interpreter, a connection. Opened at first use, closed with the episode."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol, TypeVar

from agent_r1.core.environment import RolloutContext
from agent_r1.core.task import Task

_log = logging.getLogger(__name__)


class Resource(Protocol):
    """Something open that has to be closed."""

    async def close(self) -> None: ...


_R = TypeVar("_R", bound=Resource)
_Opened = TypeVar("_Opened", bound=Resource, covariant=True)


class Opener(Protocol[_Opened]):
    """Opens a resource for each episode whose tools ask for it. Tools that share an opener share what it opened."""

    async def open(self, task: Task, context: RolloutContext) -> _Opened:
        """May raise; where it is cancelled it leaves nothing open."""
        ...


class Resources:
    """The resources of one episode, by their opener. An async tool with a parameter of this type is handed those of
    its episode.

    Example:
        browsers = Browsers()       # its ``async def open(task, context)`` starts a browser

        @tool
        async def visit(url: str, resources: Resources) -> str:
            '''Read a page.'''
            browser = await resources.get(browsers)      # the same one at every call of the episode
            return await browser.text(url)
    """

    def __init__(self, task: Task, context: RolloutContext) -> None:
        self._task, self._context = task, context
        self._openings: dict[Opener[Any], asyncio.Task[Any]] = {}
        self._closing: asyncio.Task[None] | None = None

    async def get(self, opener: Opener[_R]) -> _R:
        """What ``opener`` opened for this episode; the first call opens it, in its own time.

        A call that is cancelled or out of time leaves the opening to the others that wait for it, and to later calls.
        An opening that failed is not tried again: it raises as it did. Raises RuntimeError where the episode is over.
        """
        if self._closing is not None:
            raise RuntimeError("the episode is over")
        if opener not in self._openings:
            self._openings[opener] = asyncio.create_task(opener.open(self._task, self._context))
        opened: _R = await asyncio.shield(self._openings[opener])
        return opened

    async def close(self) -> None:
        """Close all that was opened. It goes on where the caller is cancelled.

        What cannot be closed is logged, and keeps nothing else open.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for opening in self._openings.values():
            opening.cancel()
        opened = await asyncio.gather(*self._openings.values(), return_exceptions=True)
        closings = (resource.close() for resource in opened if not isinstance(resource, BaseException))
        for outcome in await asyncio.gather(*closings, return_exceptions=True):
            if isinstance(outcome, BaseException):
                reason = f"{type(outcome).__name__}: {outcome}"
                _log.warning("closing a resource of %s failed: %s", self._context.id, reason)
