"""Pretraining for the task set shapes: single skills, one at a time, and never the way to solve a task.

The skills are: to name the color of a shape that is alone in a picture, to show a place that the user names, and to
write calls and answers in the format of the task set. In examples of the third skill, nothing depends on the question.
That a question about a place is answered by a look at this place has to be learned from rewards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from agent_r1.core.inference import PromptMedia
from agent_r1.core.messages import Image, Message, Text, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.taskset import tool_call
from agent_r1.model.forward import hidden_states
from agent_r1.model.vision import ImageProcessor, PassImages
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.tasksets.answers import answer
from environments import shapes

Conversation = tuple[Message, ...]
TOOLS: tuple[ToolSpec, ...] = (shapes.crop.spec, shapes.rotate.spec)

_CHOICES = (shapes.crop, shapes.crop, shapes.rotate, None)
"""The tools of the planner, with equal probabilities. None: it answers at once."""

LEARNING_RATE = 3e-3
"""The peak of the learning rate."""

_WARMUP_STEPS, _DECAY_SHARE = 20, 0.4
"""Steps of warm-up, and the share of the steps in which the rate decays."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A number of steps, and the number of examples of each skill in a batch."""

    steps: int
    names: int = 0
    shows: int = 0
    plans: int = 0


PHASES = (Phase(steps=80, names=24, shows=40), Phase(steps=160, shows=12, plans=20))


@dataclass(frozen=True, slots=True)
class Example:
    """The tokens of a conversation, with its images. ``targets`` are the indices of the tokens to predict."""

    ids: tuple[int, ...]
    media: tuple[PromptMedia, ...]
    targets: tuple[int, ...]


class ExampleMaker:
    """Draws training examples.

    Args:
        renderer: the renderer of the model.
        seed: determines the pictures and the conversations.
    """

    def __init__(self, renderer: TemplateRenderer, seed: int) -> None:
        self._renderer, self._rng = renderer, random.Random(seed)
        self._tasks = shapes.tasks("train", 1000 + seed)  # other pictures than those of a training with the same seed
        self._single = [task for task in self._tasks if task.data["question"].kind == "color"]

    def batch(self, phase: Phase) -> list[Example]:
        """Return the examples of a step. Only a phase with plans has the descriptions of the tools in its prompts."""
        rng, has_tools = self._rng, phase.plans > 0
        conversations = [
            *(name(rng.choice(self._single)) for _ in range(phase.names)),
            *(show(rng.choice(self._tasks), rng, with_picture=has_tools) for _ in range(phase.shows)),
            *(plan(rng.choice(self._tasks), rng) for _ in range(phase.plans)),
        ]
        return [make_example(self._renderer, one, TOOLS if has_tools else ()) for one in conversations]


def name(task: Task) -> Conversation:
    """Return a conversation about a picture with one shape: its color."""
    return (*task.messages, answer(task.data["answers"][0]))


def show(task: Task, rng: random.Random, *, with_picture: bool) -> Conversation:
    """Return a conversation in which the user names a place, and the model calls ``crop`` for this place."""
    place, picture = rng.choice(shapes.PLACES), task.messages[0].images if with_picture else ()
    return Message("user", (*picture, Text(f"Show the {place}."))), tool_call("crop", place=place)


def plan(task: Task, rng: random.Random) -> Conversation:
    """Return a conversation of a planner that sees, and does not read the question.

    It calls ``crop`` or ``rotate`` with a random argument, or no tool. Then it answers: with the color of a shape that
    is alone in a picture that it has seen, and with a random color if all its pictures have several shapes.
    """
    question: shapes.Question = task.data["question"]
    colors = [color for _, color in question.quarters.values()]
    tool, place, degrees = rng.choice(_CHOICES), rng.choice(shapes.PLACES), rng.choice((90, 180, 270))
    looks: Conversation = ()
    if tool is shapes.crop:
        looks = _look(tool_call("crop", place=place), shapes.crop.function(place, task))
        colors = [question.quarters[place][1]] if place in question.quarters else colors
    elif tool is shapes.rotate:
        looks = _look(tool_call("rotate", degrees=degrees), shapes.rotate.function(degrees, task))
    return (*task.messages, *looks, answer(colors[0] if len(colors) == 1 else rng.choice(list(shapes.COLORS))))


def _look(call: Message, picture: Image) -> Conversation:
    return call, Message("tool", (picture,), call_id="call_0")


def make_example(
    renderer: TemplateRenderer, conversation: Conversation, tools: tuple[ToolSpec, ...] = TOOLS
) -> Example:
    """Return the example of a conversation. Its targets are the assistant's messages, including the end tokens."""
    rendered = renderer.render(conversation, tools)
    header, ids = renderer.encode("<|im_start|>assistant\n"), rendered.token_ids
    targets, is_speaking = [], False
    for end, token in enumerate(ids, start=1):
        if is_speaking:
            targets.append(end - 1)
        is_speaking = ids[end - len(header) : end] == header or (is_speaking and token != renderer.end_token_id)
    return Example(ids, rendered.media, tuple(targets))


def pretrain(
    model: PreTrainedModel,
    images: ImageProcessor,
    renderer: TemplateRenderer,
    seed: int,
    phases: Sequence[Phase] = PHASES,
) -> Iterator[float]:
    """Train the model in place, and yield the mean loss per target token (nats) after each step."""
    maker = ExampleMaker(renderer, seed)
    batches = [partial(maker.batch, phase) for phase in phases for _ in range(phase.steps)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step, batch in enumerate(batches):
        left = (len(batches) - step) / (_DECAY_SHARE * len(batches))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / _WARMUP_STEPS, left)
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(model, images, batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield float(loss.detach())


def _loss(model: PreTrainedModel, images: ImageProcessor, batch: list[Example]) -> torch.Tensor:
    ids = pad_sequence([torch.tensor(one.ids) for one in batch], batch_first=True)  # (B, T)
    read = PassImages.of([one.media for one in batch], ids.shape[1], images, model.device)
    hidden = hidden_states(model, ids, images=read).flatten(0, 1)  # (B * T, H)
    targets = torch.tensor([row * ids.shape[1] + at for row, one in enumerate(batch) for at in one.targets])
    return functional.cross_entropy(model.get_output_embeddings()(hidden[targets - 1]), ids.flatten()[targets])
