"""One run on three environments with different tools: a calculator, a search, and a customer.

python -m examples.three_environments [STEPS [RUN]]

Each environment has one goal, which the agent has to find out by trial. The untrained model is made here: it knows the
form of the calls, and chooses what it computes, looks up and brings at random.
"""

import random
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import fmean

import torch

from agent_r1 import Message, Reply, Task, ToolCall, ToolEnv, UserEnv, train
from agent_r1.store.reader import RunReader
from research.tiny_base.for_env import make_tiny_base_of

NUMBERS, TOWNS, DRINKS = (1, 2), ("Alba", "Brod", "Corin", "Dova"), ("tea", "milk", "juice")


def add(first: int, second: int) -> str:
    """Add two numbers."""
    return str(first + second)


def search(town: str) -> str:
    """Find a town."""
    return "It has a harbour." if town == "Dova" else "It has no harbour."


def bring(drink: str) -> str:
    """Bring a drink."""
    return "done"


class Customer:
    """A customer who leaves when something is said."""

    async def reply(self, task, messages, context):
        return Reply("", end=True)


def results(trajectory):
    return [part.text for turn in trajectory.env_turns for one in turn.results for part in one.parts]


def computed(trajectory, task):
    """Return 1.0 if the sum is 4."""
    return float(results(trajectory) == ["4"])


def found(trajectory, task):
    """Return 1.0 if the agent found the harbour in one search."""
    return float(results(trajectory) == ["It has a harbour."])


def served(trajectory, task):
    """Return 1.0 if the agent brought one drink, and it was milk."""
    calls = [call.arguments for turn in trajectory.env_turns for call in turn.action.message.calls]
    return float(calls == [{"drink": "milk"}])


TOOLS = {"sums": add, "towns": search, "bar": bring}
SYSTEMS = {"sums": "Use the calculator.", "towns": "Look it up.", "bar": "Serve the customer."}
QUESTIONS = {"sums": "Make 4.", "towns": "Where is the harbour?", "bar": "Bring me a drink."}

env = {
    "sums": ToolEnv([add], [computed], system=SYSTEMS["sums"], max_turns=3),
    "towns": ToolEnv([search], [found], system=SYSTEMS["towns"], max_turns=3),
    "bar": UserEnv([bring], Customer(), [served], system=SYSTEMS["bar"], max_turns=3),
}
tasks = [Task(f"{name}/{number}", QUESTIONS[name], env=name) for number in range(8) for name in env]


def random_attempt(name, coin):
    """Return the conversation of an agent that calls the tool of an environment with random arguments."""
    arguments = {
        "sums": {"first": coin.choice(NUMBERS), "second": coin.choice(NUMBERS)},
        "towns": {"town": coin.choice(TOWNS)},
        "bar": {"drink": coin.choice(DRINKS)},
    }[name]
    call = ToolCall("call_0", TOOLS[name].__name__, arguments, "")
    return (
        Message.system(SYSTEMS[name]),
        Message.user(QUESTIONS[name]),
        Message.assistant("", (call,)),
        Message.tool(TOOLS[name](**arguments), "call_0"),
        Message.assistant("Done."),
    )


def make_base(folder, seed=0, steps=70):
    """Make the untrained model in ``folder``."""
    coin = random.Random(seed)
    conversations = [(random_attempt(name, coin), env[name].tools) for _ in range(200) for name in env]
    return make_tiny_base_of(conversations, (), folder, seed, steps)


def main(steps, run):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_base(Path(folder))
        settings = {"groups_per_step": 6, "group_size": 16, "max_tokens": 40, "context": 256}
        train(env, tasks, model=folder, run=run, steps=steps, trainer={"learning_rate": 1e-3}, **settings)
    with closing(RunReader(Path(run))) as reader:
        metrics = [step.values for step in reader.metrics()]
    for name in env:
        curve = [values[f"env_reward/{name}"] for values in metrics]
        print(f"{name}: first 3 steps {fmean(curve[:3]):.2f}, last 3 steps {fmean(curve[-3:]):.2f}")


if __name__ == "__main__":
    main(int((sys.argv[1:] or ["30"])[0]), (sys.argv[2:] or ["runs/three"])[0])
