"""Shapes: generated pictures with colored shapes, and questions about a color. Two tools return pictures.

A picture has four places, each of which can hold a circle, a square or a triangle. There are three kinds of questions:

- color: the picture has only one shape. No tool is needed.
- place: all places hold shapes, and the question names a place. ``crop`` shows this place alone.
- turned: the question asks for the color at a place after a rotation. ``rotate`` shows the rotated picture.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from agent_r1.core.errors import InvalidInput, import_extra
from agent_r1.core.images import decode_image
from agent_r1.core.messages import Image, Message, Text
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.rewards.scoring import FunctionScorer, exact_match
from agent_r1.tasksets.answers import answer, reference
from agent_r1.tools.function_tool import tool

COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (20, 160, 60),
    "blue": (30, 70, 220),
    "yellow": (240, 210, 20),
}
SHAPES = ("circle", "square", "triangle")
PLACES = ("top left", "top right", "bottom right", "bottom left")
"""The four places of a picture, in clockwise order: a rotation by 90 degrees moves each shape to the next place."""

SIDE = 32
"""The width and the height of a place, in pixels."""

Kind = Literal["color", "place", "turned"]
KINDS: tuple[Kind, ...] = ("color", "place", "turned")
SPLITS: Mapping[str, tuple[Kind, ...]] = {
    "train": KINDS,
    "validation": KINDS,
    **{kind: (kind,) for kind in KINDS},
    "shuffled-images": KINDS,
}
"""The kinds of questions of each split, which are used in turn.

``shuffled-images`` is a control experiment: each task has the picture of another task. In this split, a policy that
looks at the picture is right only as often as a policy that guesses.
"""

TASKS = 300
"""The number of tasks of every split except ``train``. ``train`` has four times as many tasks."""

MAX_TURNS = 4
RECIPE: Mapping[str, Any] = {
    "steps": 140,
    "groups_per_step": 16,
    "group_size": 8,
    "max_tokens": 32,
    "context": 1024,
    "trainer.learning_rate": 5e-4,
    "trainer.micro_tokens": 8192,
}

Quarters = Mapping[str, tuple[str, str]]
"""The content of a picture: for each place that is not empty, (shape, color)."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question that asks for the color of one shape in a picture.

    Attributes:
        kind: "color" if the question names the shape; "place" or "turned" if the question names the place.
        quarters: the content of the picture.
        place: the place of the shape after the picture is rotated clockwise by ``degrees``.
        degrees: the angle of the rotation; 0 if ``kind`` is not "turned".
        answer: the color of the shape.
    """

    kind: Kind
    quarters: Quarters
    place: str
    degrees: int
    answer: str

    @property
    def text(self) -> str:
        if self.kind == "color":
            return f"What color is the {self.quarters[self.place][0]}?"
        turned = f" after a rotation by {self.degrees} degrees clockwise" if self.degrees else ""
        return f"What color is at the {self.place}{turned}?"


def draw(quarters: Quarters) -> Image:
    pillow, drawing = import_extra("PIL.Image", "images"), import_extra("PIL.ImageDraw", "images")
    picture = pillow.new("RGB", (2 * SIDE, 2 * SIDE), "white")
    pen = drawing.Draw(picture)
    for place, (shape, color) in quarters.items():
        left, top = SIDE * ("right" in place), SIDE * ("bottom" in place)
        box = (left + 3, top + 3, left + SIDE - 4, top + SIDE - 4)
        if shape == "circle":
            pen.ellipse(box, fill=COLORS[color])
        elif shape == "square":
            pen.rectangle(box, fill=COLORS[color])
        else:
            pen.polygon([(box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) // 2, box[1])], fill=COLORS[color])
    return Image.from_pil(picture)


@tool
def crop(place: str, task: Task) -> Image:
    """Show one place of the picture, enlarged.

    Args:
        place: the place, such as top left.
    """
    if place not in PLACES:
        raise ValueError(f"the place is one of: {', '.join(PLACES)}")
    pillow = import_extra("PIL.Image", "images")
    left, top = SIDE * ("right" in place), SIDE * ("bottom" in place)
    quarter = _open(task).crop((left, top, left + SIDE, top + SIDE))
    return Image.from_pil(quarter.resize((2 * SIDE, 2 * SIDE), pillow.Resampling.NEAREST))


@tool
def rotate(degrees: int, task: Task) -> Image:
    """Show the picture rotated clockwise.

    Args:
        degrees: 90, 180 or 270.
    """
    if degrees not in (90, 180, 270):
        raise ValueError("the degrees are 90, 180 or 270")
    return Image.from_pil(_open(task).rotate(-degrees))


def _open(task: Task) -> Any:
    return decode_image(task.messages[-1].images[0].data)


def build(seed: int) -> TaskSet:
    """Build the task set. Raises InvalidInput if pillow is not installed."""
    import_extra("PIL", "images")
    return TaskSet(
        name="shapes",
        env=ToolEnv(tools=[crop, rotate], max_turns=MAX_TURNS),
        tasks=lru_cache(lambda split: tasks(split, seed)),
        scorers=(FunctionScorer({"em": exact_match}),),
        rewards=("em",),
        recipe=RECIPE,
        evaluation=(*KINDS, "shuffled-images"),
        validation="validation",
        solutions=solutions,
        kind=lambda task: KINDS.index(task.data["question"].kind),
    )


def tasks(split: str, seed: int) -> tuple[Task, ...]:
    """Return the tasks of a split. Only the tasks of ``train`` depend on ``seed``.

    Equal arguments give equal tasks in the same order. Raises InvalidInput if the split is unknown.
    """
    if split not in SPLITS:
        raise InvalidInput("split of shapes", got=split, do=f"give one of {', '.join(SPLITS)}")
    drawn, count = (f"train/{seed}", 4 * TASKS) if split == "train" else (split, TASKS)
    kinds = SPLITS[split]
    questions = [
        draw_question(kinds[index % len(kinds)], random.Random(f"shapes/{drawn}/{index}")) for index in range(count)
    ]
    # take the picture of the next question of the same kind, so that the question makes sense for it
    shift = len(kinds) if split == "shuffled-images" else 0
    pictures = [draw(questions[(index + shift) % count].quarters) for index in range(count)]
    return tuple(
        Task(
            f"{split}/{index}",
            (Message("user", (picture, Text(f"{question.text} Answer as <answer>red</answer>."))),),
            {"answers": (question.answer,), "question": question},
            split,
        )
        for index, (question, picture) in enumerate(zip(questions, pictures, strict=True))
    )


def draw_question(kind: Kind, rng: random.Random) -> Question:
    place, degrees = rng.choice(PLACES), rng.choice((90, 180, 270)) if kind == "turned" else 0
    filled = (place,) if kind == "color" else PLACES
    quarters = {each: (rng.choice(SHAPES), rng.choice(list(COLORS))) for each in filled}
    before = PLACES[(PLACES.index(place) - degrees // 90) % len(PLACES)]  # from here the rotation moves the shape
    return Question(kind, quarters, place, degrees, quarters[before][1])


def solutions(task: Task) -> ReferenceSolutions:
    question: Question = task.data["question"]
    look = tool_call("rotate", degrees=question.degrees or 180)
    if question.kind != "turned":
        look = tool_call("crop", place=question.place)
    other = next(color for color in COLORS if color != question.answer)
    return ReferenceSolutions(
        gold=(
            reference("the answer", answer(question.answer)),
            reference("the answer, after a tool", look, answer(question.answer)),
        ),
        wrong=(
            reference("another color", answer(other)),
            reference("a wrong place, then another color", tool_call("crop", place="x"), answer(other)),
            reference("no answer", Message.assistant("I see a picture.")),
        ),
        expected_rewards={"em": 1.0},
    )
