"""An agent of LangGraph, made with LangChain (``pip install langchain langchain-openai``):

agent-r1 train --agent examples/agents/with_langgraph.py:run
"""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

from agent_r1.tasksets.tinywiki.wiki import search as find


async def run(base_url, api_key, task):
    async def search(query: str) -> str:
        """Find a page."""
        return await find.function(query=query, task=task)

    agent = create_agent(ChatOpenAI(model="policy", base_url=base_url, api_key=api_key), [search])
    state = await agent.ainvoke({"messages": [(m.role, m.text) for m in task.messages]})
    return state["messages"][-1].text
