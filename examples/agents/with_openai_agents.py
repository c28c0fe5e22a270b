"""An agent of the OpenAI Agents SDK (``pip install openai-agents``):

agent-r1 train --agent examples/agents/with_openai_agents.py:run
"""

import openai
from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool

from agent_r1.tasksets.tinywiki.wiki import search as find


async def run(base_url, api_key, task):
    @function_tool
    async def search(query: str) -> str:
        """Find a page."""
        return await find.function(query=query, task=task)

    model = OpenAIResponsesModel("policy", openai.AsyncOpenAI(base_url=base_url, api_key=api_key))
    system, question = (message.text for message in task.messages)
    agent = Agent("assistant", instructions=system, tools=[search], model=model)
    result = await Runner.run(agent, question, run_config=RunConfig(tracing_disabled=True))
    return result.final_output
