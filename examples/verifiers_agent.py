"""A task set of verifiers (v1): its harness acts through the gateway, and its rewards score.

agent-r1 train examples/verifiers_agent.py --model Qwen/Qwen2.5-3B-Instruct --tool_format hermes

The package needs an environment of its own, because it pins mcp 2.0.0 and openai < 3: pip install verifiers==0.4.0 uv.
The harness "null" is a chat loop with the tools of the task set, in a process of its own.
"""

import os

import verifiers.v1 as vf

from agent_r1 import Message, Task, ToolEnv

NAME, COUNT, TEST = os.environ.get("VERIFIERS_TASKSET", "gsm8k-v1"), 600, 100
loaded = list(vf.load_taskset(vf.taskset_config_type(NAME)(id=NAME)).take(COUNT))


def as_task(index, row):
    system = [Message.system(row.data.system_prompt)] if row.data.system_prompt else []
    split = "test" if index < min(TEST, len(loaded) // 6) else "train"
    return Task(f"{NAME}/{index}", [*system, Message.user(row.data.prompt_text)], {"row": index}, split)


async def run(base_url, api_key, task):
    # verifiers reads a key from an environment variable, and never gives it to the process of the harness
    variable = f"API_KEY_{api_key}"
    os.environ[variable] = api_key
    try:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        harness = vf.harness_config_type("null")(id="null")
        config = vf.AgentConfig(model="policy", client=client, harness=harness, runtime=vf.SubprocessConfig())
        async with vf.make_agent(config) as agent:
            trace = await agent.run(loaded[task.data["row"]])
    finally:
        del os.environ[variable]
    if not trace.ok:
        raise RuntimeError(f"verifiers: {trace.errors[-1].message if trace.errors else trace.stop_condition}")
    return trace.reward


def reward(trajectory, task):
    return float(trajectory.answer)


env, rewards = ToolEnv(tools=[]), [reward]
tasks = [as_task(index, row) for index, row in enumerate(loaded)]
