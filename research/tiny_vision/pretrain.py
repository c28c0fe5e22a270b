"""Pretraining for the task set shapes: the model imitates the format of calls and answers, with random content.

By default, the answers and the arguments are drawn without a look at the picture. So everything that the model sees
after reinforcement learning was learned from rewards. A share of right answers gives it a start.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from agent_r1.core.inference import PromptMedia
from agent_r1.core.messages import Message
from agent_r1.core.reference_solution import tool_call
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolSpec
from agent_r1.model.forward import hidden_states
from agent_r1.model.vision import ImageProcessor, PassImages
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.tasksets import shapes
from agent_r1.tasksets.answers import answer

Conversation = tuple[Message, ...]
TOOLS: tuple[ToolSpec, ...] = (shapes.crop.spec, shapes.rotate.spec)

STEPS, BATCH, LEARNING_RATE = 120, 16, 3e-3
"""Optimizer steps, conversations per step, and the peak of the learning rate."""


@dataclass(frozen=True, slots=True)
class Example:
    """The tokens of a conversation, with its images. ``targets`` are the indices of the tokens to predict."""

    ids: tuple[int, ...]
    media: tuple[PromptMedia, ...]
    targets: tuple[int, ...]


def random_conversation(task: Task, rng: random.Random, seeing: float = 0.0) -> Conversation:
    """Return a conversation about a task: a random call or none, then a random color.

    With the probability ``seeing``, the color is the right one.
    """
    is_right = rng.random() < seeing
    reply = answer(task.data["answers"][0] if is_right else rng.choice(list(shapes.COLORS)))
    tool = rng.choice((shapes.crop, shapes.rotate, None, None))
    if tool is None:
        return (*task.messages, reply)
    place, degrees = rng.choice(shapes.PLACES), rng.choice((90, 180, 270))
    call = tool_call(tool.spec.name, **({"place": place} if tool is shapes.crop else {"degrees": degrees}))
    picture = tool.function(place if tool is shapes.crop else degrees, task)
    return (*task.messages, call, Message("tool", (picture,), call_id="call_0"), reply)


def make_example(renderer: TemplateRenderer, conversation: Conversation) -> Example:
    """Return the example of a conversation. Its targets are the assistant's messages, including the end tokens."""
    rendered = renderer.render(conversation, TOOLS)
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
    steps: int = STEPS,
    seeing: float = 0.0,
) -> Iterator[float]:
    """Train the model in place, and yield the mean loss per target token (nats) after each step."""
    rng = random.Random(seed)
    tasks = shapes.tasks("train", seed=1000 + seed)  # other pictures than those of a training with the same seed
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 10, (steps - step) / (0.4 * steps))
        batch = [make_example(renderer, random_conversation(task, rng, seeing)) for task in rng.sample(tasks, BATCH)]
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(model, images, batch)
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
