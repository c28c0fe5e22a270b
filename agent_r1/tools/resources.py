"""Resources that the tools of an episode use, such as an interpreter.

A resource is opened by the first call that needs it, and closed at the end of the episode.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol, TypeVar

from agent_r1.core.environment import RolloutContext
from agent_r1.core.task import Task

_log = logging.getLogger(__name__)


class Resource(Protocol):
    async def close(self) -> None: ...


_R = TypeVar("_R", bound=Resource)
_Opened = TypeVar("_Opened", bound=Resource, covariant=True)


class Opener(Protocol[_Opened]):
    """An object that opens one resource per episode. All tools with the same opener share this resource."""

    async def open(self, task: Task, context: RolloutContext) -> _Opened:
        """Open a resource and return it. If this method raises, the call that needs the resource fails.

        If this method is cancelled, it must close everything that it has opened.
        """
        ...


class Resources:
    """The open resources of one episode.

    An async tool with a parameter of type ``Resources`` receives the resources of its episode.

    Example:
        browsers = Browsers()       # its ``async def open(task, context)`` starts a browser

        @tool
        async def visit(url: str, resources: Resources) -> str:
            '''Read a page.'''
            browser = await resources.get(browsers)     # the same browser in each call of the episode
            return await browser.text(url)
    """

    def __init__(self, task: Task, context: RolloutContext) -> None:
        self._task, self._context = task, context
        self._openings: dict[Opener[Any], asyncio.Task[Any]] = {}
        self._closing: asyncio.Task[None] | None = None

    async def get(self, opener: Opener[_R]) -> _R:
        """Return the resource of ``opener`` in this episode. The first call opens the resource.

        If the first call is cancelled or times out, the resource is still opened, for later calls. If opening the
        resource fails, the first call and all later calls raise the same error.

        Raises:
            RuntimeError: if the episode has ended.
        """
        if self._closing is not None:
            raise RuntimeError("the episode is over")
        if opener not in self._openings:
            self._openings[opener] = asyncio.create_task(opener.open(self._task, self._context))
        resource: _R = await asyncio.shield(self._openings[opener])
        return resource

    async def close(self) -> None:
        """Close all open resources, even if the caller is cancelled. Errors are logged."""
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
