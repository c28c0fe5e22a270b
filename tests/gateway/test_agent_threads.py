"""The threads of agent programs: closing them leaves nothing open."""

import asyncio

from agent_r1.core.task import Task
from agent_r1.gateway.agent_program import AgentThreads


async def loop_of_the_program(base_url: str, key: str, task: Task) -> asyncio.AbstractEventLoop:
    asyncio.get_running_loop().create_task(asyncio.sleep(1000))  # a task that the program abandons
    return asyncio.get_running_loop()


def test_the_event_loop_of_agents_is_closed_with_their_threads() -> None:
    async def call_and_close() -> None:
        threads = AgentThreads()
        loop = await threads.call(loop_of_the_program, "http://127.0.0.1:1/v1", "key", Task("a", "Who?"))
        assert isinstance(loop, asyncio.AbstractEventLoop) and loop.is_running()
        threads.close()
        async with asyncio.timeout(300):
            while not loop.is_closed():
                await asyncio.sleep(0.01)

    asyncio.run(call_and_close())
