"""The Alice-in-Wonderland problem of reasoning-gym. docs/results.md says what an agent learns here.

"Alice has 2 brothers and she also has 4 sisters. How many sisters does Alice's brother have?" Five, because Alice is a
sister too. There are three wordings, each a third of the questions, and 64 pairs of numbers, 12 of which occur in the
test only.

agent-r1 train examples/alice.py --model FOLDER
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

from agent_r1 import Task, ToolEnv, reasoning_gym_score, reasoning_gym_tasks

OPTIONS = {"task_type_weights": [0.7, 0.3, 0.0], "max_entities": 8}
"""The shares of siblings, friends and colleagues, and the largest number. An answer is one digit."""

NUM_DRAWN, NUM_TRAIN, NUM_TEST = 6500, 500, 120
"""The number of questions to draw, and to keep per wording and split. Only 704 have brothers first (eleven names)."""

WORDINGS = {"sisters first": " sisters and ", "brothers first": " brothers and ", "friends": " male friends and "}
"""The text between the numbers. The answer uses the first, the last and the last number, respectively."""


def find_wording(task: Task) -> str:
    return next(name for name, between in WORDINGS.items() if between in task.messages[-1].text)


def is_held_out(task: Task) -> bool:
    """Return whether the pair of numbers is used in the test only, which holds for 12 of 64 pairs.

    Each number occurs in training in both places. Pairs of equal numbers are not held out, because it does not matter
    which of the two is used.
    """
    first, last = map(int, re.findall(r"\d+", task.messages[-1].text))
    return first != last and (first + 2 * last) % 5 == 0


def make_splits(drawn: Sequence[Task]) -> list[Task]:
    """Return equally many tasks of each wording per split, in random order, with the wording in their data."""
    labeled = [replace(task, data={**task.data, "wording": find_wording(task)}) for task in drawn]
    shuffled = random.Random(0).sample(labeled, len(labeled))
    tasks: list[Task] = []
    for name in WORDINGS:
        matching = [task for task in shuffled if task.data["wording"] == name]
        tasks += [replace(task, split="train") for task in matching if not is_held_out(task)][:NUM_TRAIN]
        tasks += [replace(task, split="test") for task in matching if is_held_out(task)][:NUM_TEST]
    return random.Random(0).sample(tasks, len(tasks))


env = ToolEnv(tools=[], rewards=[reasoning_gym_score])
tasks = make_splits(reasoning_gym_tasks("aiw", train=NUM_DRAWN, options=OPTIONS))
