"""``people``: questions in plain English about invented people. The agent searches the pages of the people."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.envs.tool_env import NaiveRag, ToolEnv
from agent_r1.retrieval.retriever import BM25Index, Passage, render
from agent_r1.rewards.scoring import FunctionScorer, exact_match, f1
from agent_r1.tasksets.answers import answer_solutions
from agent_r1.tasksets.files import read_settings_file
from agent_r1.tools.function_tool import Tool, tool
from environments.people.world import HELD_OUT_PERSONAL, HELD_OUT_VALUED, PERSONAL, VALUED, Chain, WorldKey, open_world
from environments.shared import page_rewards, solved_example

INSTRUCTION = "Search for one person at a time. When you know the answer, reply with <answer>answer</answer>."
READING = "Read the pages and reply with <answer>answer</answer>."

_ROSE = Passage("Rose Okafor", "Rose Okafor had a rival, Ivan Petrov. She spoke Dutch. Her employer was Ida Lund.")
_IVAN = Passage("Ivan Petrov", "Ivan Petrov played the piano. He was born in Cairo. His teacher was Ross Okafor.")
_ROSS = Passage("Ross Okafor", "Ross Okafor owned an animal, a spaniel. His rival was Rose Okafor. He was a pilot.")
_VERA = Passage("Vera Petrov", "Vera Petrov worked as a nurse. Her best friend was Ida Lund.")
_OMAR = Passage("Omar Petrov", "As a student, Omar Petrov had Rosa Lund as a teacher. His first language was Greek.")

# Two examples of two hops: with only one, a model often leaves out the second search. The people of the examples do not
# occur in the tasks.
EXAMPLES: tuple[Message, ...] = (
    *solved_example("Which language did Omar Petrov speak?", "Greek", _OMAR),
    *solved_example("Where was the rival of Rose Okafor born?", "Cairo", _ROSE, _IVAN),
    *solved_example("Which animal did the teacher of Ivan Petrov keep?", "spaniel", _IVAN, _ROSS),
)
READING_EXAMPLES: tuple[Message, ...] = (
    Message.user(f"{render((_IVAN, _VERA))}\n\nWhere was Ivan Petrov born?"),
    Message.assistant("<answer>Cairo</answer>"),
)

RECIPE: Mapping[str, Any] = {
    "tool_format": "tags",
    "group_size": 8,
    "groups_per_step": 8,
    "max_tokens": 32,
    "context": 2048,
    "reward_weights.f1": 0.0,
    "reward_weights.pages_read": 0.0,
    "reward_weights.supported": 0.0,
}
"""The default settings for training on this task set. Only the reward ``em`` has a weight other than 0."""

OTHER_NAME = "look_up"
"""The name of the search tool in the split ``renamed-tool``."""


class Settings(BaseModel):
    """The settings in the TOML file of ``--data``.

    Example of a file:

        hops = [1, 2, 2]  # two thirds of the training questions have two hops
        pages = 1         # a search returns one page
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    hops: tuple[Literal[1, 2, 3], ...] = Field(default=(1, 2), min_length=1)
    """How many facts (hops) lead to the answer of a training question. The list is repeated: with [1, 2, 2], the
    questions have 1, 2, 2, 1, 2, 2, .. hops."""

    pages: int = Field(default=3, ge=1)
    """The maximum number of pages that a search returns."""

    turns: int = Field(default=7, ge=1)
    """The maximum number of actions in an episode."""


def build(seed: int, data: Path | None = None) -> TaskSet:
    """Build the task set. ``data`` is None or a TOML file of settings. Raises InvalidInput if it cannot be used."""
    if data is not None and data.suffix != ".toml":
        do = "leave it out, because people is generated, or give a TOML file of settings"
        raise InvalidInput("data", got=data, do=do)
    settings = Settings() if data is None else read_settings_file(Settings, data)

    def agent_env(name: str) -> ToolEnv:
        search = search_tool(settings.pages, name)
        examples = [replace(one, calls=tuple(replace(call, name=name) for call in one.calls)) for one in EXAMPLES]
        return ToolEnv(tools=[search], max_turns=settings.turns, system=INSTRUCTION, examples=tuple(examples))

    rewards = {"em": exact_match, "f1": f1, **page_rewards(lambda task: task.data["chain"].pages)}
    return TaskSet(
        name="people",
        env=agent_env("search"),
        tasks=lru_cache(lambda split: tasks(split, seed, settings.hops)),
        scorers=(FunctionScorer(rewards),),
        baselines={"naive-rag": NaiveRag(retrieval_tool(settings.pages), system=READING, examples=READING_EXAMPLES)},
        recipe=RECIPE,
        evaluation=("1-hop", "2-hop", "3-hop"),
        validation="validation",
        kind=lambda task: len(task.data["chain"].relations),
        solutions=partial(solutions, max_turns=settings.turns),
        variants={"renamed-tool": agent_env(OTHER_NAME)},
    )


def solutions(task: Task, max_turns: int) -> ReferenceSolutions:
    chain: Chain = task.data["chain"]
    name = OTHER_NAME if task.split == "renamed-tool" else "search"
    searches = tuple(tool_call(name, query=title) for title in chain.pages)
    return answer_solutions(task, searches, chain.pages[-1], max_turns, {"em": 1.0, "f1": 1.0})


KNOWN = frozenset(relation.name for relation in (*PERSONAL, *VALUED))
UNSEEN = frozenset((HELD_OUT_PERSONAL.name, HELD_OUT_VALUED.name))


@dataclass(frozen=True, slots=True)
class Split:
    """How the questions of a split are drawn.

    Attributes:
        owner: the list of the people's surnames: a key of ``SURNAMES``.
        worlds: the number of worlds (sets of people).
        tasks: the number of questions.
        hops: how many facts a question needs. The numbers are used in turn: 1, 2, 1, 2, .. with (1, 2).
        held_out_wordings: whether pages and questions use wordings that are not used in training.
        last: the possible names of the last relation in a question's chain of facts: "boss" in "Who is the boss of
            Ann's brother?".
    """

    owner: str
    worlds: int
    tasks: int
    hops: tuple[int, ...]
    held_out_wordings: bool = False
    last: frozenset[str] = KNOWN


SPLITS: Mapping[str, Split] = {
    "train": Split("train", worlds=100, tasks=8000, hops=(1, 2)),
    "validation": Split("validation", worlds=10, tasks=240, hops=(1, 2)),
    **{f"{hops}-hop": Split("test", worlds=10, tasks=400, hops=(hops,)) for hops in (1, 2, 3, 4, 5)},
    "paraphrased": Split("test", worlds=10, tasks=400, hops=(1, 2), held_out_wordings=True),
    "renamed-tool": Split("test", worlds=10, tasks=400, hops=(1, 2)),
    "unseen-relation": Split("test", worlds=10, tasks=400, hops=(1, 2), last=UNSEEN),
}
"""The splits. A question with n hops needs a chain of n facts. The last three splits have one difference from training
each: the wordings of pages and questions, the name of the search tool, or the last relation of each question."""

_TRIES = 10_000
"""The maximum number of attempts to draw a new question.

An attempt fails if the random chain of facts ends too early, or if the question has already been drawn.
"""


def tasks(split: str, seed: int, training_hops: tuple[int, ...] = SPLITS["train"].hops) -> tuple[Task, ...]:
    """Return the tasks of a split. Only the tasks of ``train`` depend on ``seed`` and ``training_hops``.

    Equal arguments give equal tasks in the same order. Raises InvalidInput if the split is unknown.
    """
    if split not in SPLITS:
        raise InvalidInput("people split", got=split, do=f"give one of {', '.join(SPLITS)}")
    recipe = replace(SPLITS[split], hops=training_hops) if split == "train" else SPLITS[split]
    prefix = f"{seed}/" if recipe.owner == "train" else ""
    asked: set[str] = set()
    return tuple(_draw_task(split, prefix, recipe, index, asked) for index in range(recipe.tasks))


def _draw_task(split: str, prefix: str, recipe: Split, index: int, asked: set[str]) -> Task:
    hops = recipe.hops[index % len(recipe.hops)]
    number = f"{prefix}{index // len(recipe.hops) % recipe.worlds}"
    key = WorldKey(recipe.owner, number, recipe.held_out_wordings, recipe.last == UNSEEN)
    world = open_world(key)
    rng = random.Random(f"people/{prefix}{split}/{index}")
    for _ in range(_TRIES):
        chain = world.chain(hops, recipe.last, rng)
        if chain is None:
            continue
        text = question(chain, recipe.held_out_wordings, rng)
        if f"{number}: {text}" not in asked:
            asked.add(f"{number}: {text}")
            data = {"answers": (chain.answer,), "world": key, "chain": chain}
            return Task(f"{split}/{index}", (Message.user(text),), data, split)
    got = f"{split} with {recipe.tasks} tasks"
    raise InvalidInput("people split", got=got, do="ask for fewer: its worlds are exhausted")


def question(chain: Chain, held_out_wording: bool, rng: random.Random) -> str:
    """Return a question that asks for the last value of ``chain``, in a wording of training or in the held-out one.

    Example:
        "In which city was the teacher of the rival of Clara Hale born?"
    """
    *way, last = chain.relations
    person = "".join(f"the {relation.noun} of " for relation in reversed(way)) + chain.start
    wording = last.held_out_question if held_out_wording else rng.choice(last.questions)
    return wording.format(x=person)


@lru_cache(maxsize=256)
def _index(world: WorldKey) -> BM25Index:
    return BM25Index(open_world(world).pages())


def search_tool(pages: int, name: str = "search") -> Tool:
    """Return the search tool of an agent. A call returns at most ``pages`` pages, followed by the question of the task.

    Without the question at the end, a small model often answers with the wrong value from the pages.
    """

    @tool(name=name)
    def search(query: str, task: Task) -> ToolResult:
        """Search pages about people. Returns the pages that fit best.

        Args:
            query: the name of a person
        """
        found = _find(query, task, pages)
        return _result(found, f"{render(found)}\n\n{task.messages[-1].text}")

    return search


def retrieval_tool(pages: int) -> Tool:
    """Return the search tool of naive RAG, a baseline that searches once, and then answers the question after it."""

    @tool
    def search(query: str, task: Task) -> ToolResult:
        """Search pages about people.

        Args:
            query: the text of a question
        """
        found = _find(query, task, pages)
        return _result(found, render(found))

    return search


def _find(query: str, task: Task, pages: int) -> Sequence[Passage]:
    (found,) = _index(task.data["world"]).search([query], pages)
    return found


def _result(found: Sequence[Passage], text: str) -> ToolResult:
    return ToolResult((Text(text),), ok=True, data=tuple(passage.title for passage in found))
