"""Train an agent of your own that calls its model with OpenAI's client (``pip install openai``):

agent-r1 train --agent examples/own_agent.py:run
"""

import json

import openai

from agent_r1.tasksets.tinywiki.wiki import search


async def look_up(call, task):
    try:
        page = await search.function(**json.loads(call.function.arguments), task=task)
    except Exception as error:  # a bad call: the model reads why, and can learn from it
        page = f"error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": page}


async def run(base_url, api_key, task):
    messages, tools = [{"role": m.role, "content": m.text} for m in task.messages], [search.spec.to_openai()]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(5):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            messages.append(message := answer.choices[0].message)
            if not message.tool_calls:
                return message.content
            messages += [await look_up(call, task) for call in message.tool_calls]
