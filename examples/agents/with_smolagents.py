"""An agent of smolagents (``pip install smolagents``), whose prompt is too long for tiny-base:

agent-r1 train --agent examples/agents/with_smolagents.py:run --model Qwen/Qwen2.5-0.5B-Instruct
"""

import asyncio

from smolagents import OpenAIModel, ToolCallingAgent, tool

from agent_r1.tasksets.tinywiki.wiki import search as find


def run(base_url, api_key, task):
    @tool
    def search(query: str) -> str:
        """Find a page.

        Args:
            query: what to find
        """
        return asyncio.run(find.function(query=query, task=task))

    agent = ToolCallingAgent([search], OpenAIModel("policy", base_url, api_key), max_steps=5, verbosity_level=0)
    return agent.run(task.messages[-1].text)
