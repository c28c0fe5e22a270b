"""The Alice-in-Wonderland problem as reasoning-gym asks it; docs/adapters.md says what an agent learns here.

"Alice has 2 brothers and she also has 4 sisters. How many sisters does Alice's brother have?" She is one of them: 5.
There are three wordings, a third of the questions each, and 64 pairs of numbers, 12 of which only the test asks for.

agent-r1 train examples/alice.py --model FOLDER
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

from agent_r1 import Task, ToolEnv
from agent_r1.envs.adapters import reasoning_gym_score, reasoning_gym_tasks

ASKED = {"task_type_weights": [0.7, 0.3, 0.0], "max_entities": 8}
"""Of siblings, of friends and of colleagues; the greatest number. An answer is one digit."""

DRAWN, TRAIN, TEST = 6500, 500, 120
"""Questions drawn, and those taken of each wording. With brothers first there are only 704, for eleven names."""

WORDINGS = {"sisters first": " sisters and ", "brothers first": " brothers and ", "friends": " male friends and "}
"""What stands between the numbers. The number asked for is the first, the last and the last."""


def wording(task: Task) -> str:
    return next(name for name, between in WORDINGS.items() if between in task.messages[-1].text)


def held_out(task: Task) -> bool:
    """Whether only the test asks for its two numbers: 12 pairs of 64. Each number stays in training, in either place.

    Pairs of equals are not among them, as it does not matter there which of the two is taken.
    """
    first, last = map(int, re.findall(r"\d+", task.messages[-1].text))
    return first != last and (first + 2 * last) % 5 == 0


def divided(drawn: Sequence[Task]) -> list[Task]:
    """As many tasks of each wording in either split, in random order; the wording's name is added to their data."""
    named = [replace(task, data={**task.data, "wording": wording(task)}) for task in drawn]
    shuffled = random.Random(0).sample(named, len(named))
    tasks: list[Task] = []
    for name in WORDINGS:
        asked = [task for task in shuffled if task.data["wording"] == name]
        tasks += [replace(task, split="train") for task in asked if not held_out(task)][:TRAIN]
        tasks += [replace(task, split="test") for task in asked if held_out(task)][:TEST]
    return random.Random(0).sample(tasks, len(tasks))


env = ToolEnv(tools=[], rewards=[reasoning_gym_score])
tasks = divided(reasoning_gym_tasks("aiw", train=DRAWN, options=ASKED))
