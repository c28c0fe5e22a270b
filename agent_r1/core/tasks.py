"""Asyncio tasks that user code cannot cancel.

An async tool, environment or reward runs in the event loop of the run. So user code can reach every asyncio task, for
example with ``for task in asyncio.all_tasks(): task.cancel()``. With this module, each call of user code runs in its
own asyncio task. The call can cancel only this task, and the asyncio tasks that user code created.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_scope: ContextVar[tuple[object, ...]] = ContextVar("user_code_scope", default=())
"""The scope of the current code: the nested calls of user code that led to the current code, the outermost call first.

The code of the run itself has the scope (). A tool that an environment calls has the scope (environment, tool). Each
call is represented by a new object.
"""


class ProtectedTask(asyncio.Task[T]):
    """An asyncio task with a scope. The scope decides which code can cancel the task.

    All code has a scope, too. The scope lists the nested calls of user code that led to the code, the outermost call
    first:

    - The code of the run itself has the scope ().
    - An environment has the scope (environment,).
    - A tool that the environment calls has the scope (environment, tool).

    Code can cancel a task if the scope of the task begins with the scope of the code. So the run can cancel every task.
    The environment can cancel the task of its tool. The tool cannot cancel the task of the environment.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, T],
        scope: tuple[object, ...],
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        context: Context | None = None,
        **options: Any,
    ) -> None:
        if context is None:
            context = copy_context()
            context.run(_scope.set, scope)  # the scope of the code in ``work``
        super().__init__(work, loop=loop or asyncio.get_running_loop(), context=context, **options)
        self._scope = scope

    def cancel(self, msg: Any | None = None) -> bool:
        caller = _scope.get()
        return self._scope[: len(caller)] == caller and super().cancel(msg)


def user_code_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return an asyncio task that runs ``work``, which is one call of user code, such as a call of a tool.

    The call cannot cancel any :class:`ProtectedTask` that was started outside the call.
    """
    return ProtectedTask(work, (*_scope.get(), object()))


def child_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start ``work`` in a :class:`ProtectedTask`, and return the task. The caller can cancel the task.

    If ``work`` runs user code, such as a tool, with :func:`user_code_task`, the user code cannot cancel the task.
    """
    return ProtectedTask(work, _scope.get())


def shared_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return a :class:`ProtectedTask` that runs ``work``.

    User code cannot cancel the task, even if user code called this function.
    """
    return ProtectedTask(work, ())


def run_protected(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` like :func:`asyncio.run`, and return its result."""
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(main)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(_create_task)
    return loop


def _create_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    if _scope.get():
        return asyncio.Task(work, loop=loop, **options)
    return ProtectedTask(work, (), loop=loop, **options)
