"""User code cannot cancel the tasks of a run, only its own."""

from __future__ import annotations

import asyncio

from agent_r1.core.tasks import child_task, run_protected, shared_task, user_code_task


def cancel_all_others() -> list[bool]:
    me = asyncio.current_task()
    return [task.cancel() for task in asyncio.all_tasks() if task is not me]


def test_user_code_cannot_cancel_the_run() -> None:
    async def user_code() -> list[bool]:
        return cancel_all_others()

    async def main() -> tuple[list[bool], str]:
        other = asyncio.create_task(asyncio.sleep(0, "finished"))
        return await user_code_task(user_code()), await other

    cancelled, result = run_protected(main())
    assert cancelled == [False, False] and result == "finished"


def test_user_code_cancels_its_own_tasks_and_has_time_limits() -> None:
    async def user_code() -> tuple[bool, str]:
        own = asyncio.create_task(asyncio.sleep(60))
        try:
            async with asyncio.timeout(0):
                await asyncio.sleep(60)
        except TimeoutError:
            return own.cancel(), "timed out"
        return False, "not timed out"

    async def main() -> tuple[bool, str]:
        return await user_code_task(user_code())

    assert run_protected(main()) == (True, "timed out")


def test_a_tool_cannot_cancel_the_environment_that_called_it() -> None:
    async def tool() -> list[bool]:
        return cancel_all_others()

    async def environment() -> tuple[list[bool], list[str]]:
        calls = [child_task(asyncio.sleep(0, "call")), shared_task(asyncio.sleep(0, "batch"))]
        return await user_code_task(tool()), await asyncio.gather(*calls)

    async def main() -> tuple[list[bool], list[str]]:
        return await user_code_task(environment())

    cancelled, results = run_protected(main())
    assert cancelled == [False] * 4 and results == ["call", "batch"]


def test_the_run_cancels_user_code() -> None:
    async def main() -> bool:
        running = user_code_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
        return running.cancelled()

    assert run_protected(main())
