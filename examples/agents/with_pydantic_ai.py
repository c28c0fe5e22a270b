"""An agent of PydanticAI (``pip install 'pydantic-ai-slim[openai]'``):

agent-r1 train --agent examples/agents/with_pydantic_ai.py:run
"""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agent_r1.tasksets.tinywiki.wiki import search as find


async def run(base_url, api_key, task):
    async def search(query: str) -> str:
        """Find a page."""
        return await find.function(query=query, task=task)

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    system, question = (message.text for message in task.messages)
    result = await Agent(model, instructions=system, tools=[search]).run(question)
    return result.output
