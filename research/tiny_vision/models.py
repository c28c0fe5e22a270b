"""Tiny vision models: architecture, random weights, chat template, image processor.

Three kinds: Qwen2.5-VL and Qwen3-VL (one grid of features, positions in three rows) and SmolVLM (tiles, ordinary
positions).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from agent_r1.core.inference import PromptMedia
from agent_r1.core.messages import Image, Message, Text, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.taskset import tool_call
from agent_r1.model.forward import hidden_states
from agent_r1.model.vision import ImageProcessor, PassImages
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.tasksets.answers import answer
from environments import shapes

Kind = Literal["qwen2_5_vl", "qwen3_vl", "smolvlm"]

PATCH = 8
"""The side of a patch of an image, in pixels. 2 x 2 patches become one feature."""

TILE = 32
"""The side of a tile of SmolVLM, in pixels."""

_QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_TILE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")
_GRID = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))

_CONTENT = """\
{%- macro show(content) %}
    {%- if content is string %}{{ content }}
    {%- else %}
        {%- for part in content %}{{ PLACEHOLDER if part.type == 'image' else part.text }}{% endfor %}
    {%- endif %}
{%- endmacro %}
"""
_MESSAGES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + show(message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def with_vision_tokens(tokenizer: PreTrainedTokenizerBase, kind: Kind) -> PreTrainedTokenizerBase:
    """Add the special tokens of a kind of vision model to a tokenizer, and give it a chat template with images."""
    grid = kind == "smolvlm"
    tokenizer.add_special_tokens({"additional_special_tokens": [*(_TILE_TOKENS if grid else _QWEN_TOKENS)]})
    if grid:
        tokenizer.add_tokens([*_GRID])
    placeholder = "'<image>'" if grid else "'<|vision_start|><|image_pad|><|vision_end|>'"
    tokenizer.chat_template = _CONTENT.replace("PLACEHOLDER", placeholder) + _MESSAGES
    return tokenizer


def make_vision_model(kind: Kind, tokenizer: PreTrainedTokenizerBase, seed: int, width: int = 32) -> PreTrainedModel:
    """Return a model with random weights that depend on the seed only. ``width`` is the hidden size."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(_config(kind, tokenizer, width)).eval()


def save_vision_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model, tokenizer and image processor to ``folder``, which ``train(model=..)`` takes."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _image_processor(model.config.model_type).save_pretrained(folder)


def _config(kind: Kind, tokenizer: PreTrainedTokenizerBase, width: int) -> Any:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (*_QWEN_TOKENS, *_TILE_TOKENS)}
    text: dict[str, Any] = {
        "vocab_size": 8 * math.ceil(len(tokenizer) / 8),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if kind == "smolvlm":
        vision = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1, "image_size": TILE}
        return SmolVLMConfig(
            text_config={"model_type": "llama", **text, "head_dim": width // 2},
            vision_config={**vision, "num_attention_heads": 2, "patch_size": PATCH},
            image_token_id=ids["<image>"],
            scale_factor=2,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
        )
    vision = {"depth": 2, "hidden_size": width, "intermediate_size": 2 * width, "num_heads": 2}
    vision |= {"out_hidden_size": width, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 1}
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
    }
    half = width // 4  # of the size of a head: 2 heads
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * (half // 3), *[half // 3] * 2]}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision, **tokens)
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    text |= {"head_dim": width // 2, "rope_parameters": {**rope, "mrope_interleaved": True}}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)


def _image_processor(model_type: str) -> Any:
    if model_type == "smolvlm":
        size = {"longest_edge": 2 * TILE}
        return SmolVLMImageProcessorPil(size=size, max_image_size={"longest_edge": TILE}, do_image_splitting=True)
    side = 2 * PATCH
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, temporal_patch_size=1, min_pixels=side**2, max_pixels=(16 * PATCH) ** 2
    )


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
