"""Pretrain a tiny model for any environment: it imitates the action format with random content.

Everything that the model does better after reinforcement learning is then learned from the rewards of the environment.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from agent_r1.core.environment import Env
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import STATUS_POLICY
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import RolloutLimits
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.training.evaluate import Method, attempts
from research.tiny_base.examples import conversation_example
from research.tiny_base.pretrain import LEARNING_RATE, Progress, make_initial_model, train_on_batches
from research.tiny_base.tokenizer import make_tokenizer

Conversation = tuple[Message, ...]

STEPS, BATCH = 100, 32
"""Optimizer steps of pretraining, and conversations per step."""

_TOKENS = 1 << 20
"""An upper bound for the tokens of a conversation if every character is a token."""


def record_conversations(env: Env, tasks: Sequence[Task], respond: Callable[[str], str]) -> list[Conversation]:
    """Return the messages of one episode of each task, in which the agent answers ``respond(prompt)``.

    A prompt is rendered text. Episodes run one after the other, so that a ``respond`` that draws random numbers from a
    seed gives the same conversations each time. A failed episode is left out, as it would be in training.

    Raises:
        AgentR1Error: if all episodes failed, with the reason of the first.
    """
    renderer = TemplateRenderer(make_tokenizer([]))
    agent = Agent(ScriptedEngine(renderer, respond), renderer, SamplingParams(max_tokens=_TOKENS), _TOKENS)
    groups = asyncio.run(attempts(Method("speaker", agent, env), (), tasks, 1, RolloutLimits(concurrency=1)))
    trajectories = [group.trajectories[0] for group in groups]
    conversations = [trajectory.messages for trajectory in trajectories if STATUS_POLICY[trajectory.status] == "train"]
    if trajectories and not conversations:
        first = trajectories[0]
        raise AgentR1Error(f"no episode can be imitated; the first: {first.status}: {first.reason}")
    return conversations


def make_tiny_base(
    conversations: Sequence[Conversation],
    words: Iterable[str],
    folder: Path,
    seed: int,
    steps: int = STEPS,
    tools: tuple[ToolSpec, ...] = (),
    learning_rate: float = LEARNING_RATE,
) -> Progress:
    """Train a model to imitate the assistant in the conversations, write it to ``folder``, and return the last step.

    Args:
        conversations: as :func:`record_conversations` returns them.
        words: further words of the environment that get a token; all others are spelled in characters.
        folder: a folder that ``train(model=..)`` takes.
        seed: the seed of the weights and of the order of the conversations.
        steps: optimizer steps.
        tools: the tools of the environment, which its prompts describe.
        learning_rate: the peak. If answers depend on the prompt, half of the default worked better.

    If the content is random, the loss does not fall below its entropy.
    """
    return make_tiny_base_of([(each, tools) for each in conversations], words, folder, seed, steps, learning_rate)


def make_tiny_base_of(
    conversations: Sequence[tuple[Conversation, tuple[ToolSpec, ...]]],
    words: Iterable[str],
    folder: Path,
    seed: int,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
) -> Progress:
    """Make a model as :func:`make_tiny_base` for several environments: each conversation comes with its own tools."""
    plain = TemplateRenderer(make_tokenizer([]))
    tokenizer = make_tokenizer([*words, *(plain.render_text(each, tools) for each, tools in conversations)])
    renderer, rng = TemplateRenderer(tokenizer), random.Random(seed)
    examples = [conversation_example(renderer, each, tools) for each, tools in conversations]
    model = make_initial_model(tokenizer, seed)
    *_, last = train_on_batches(
        model, [partial(rng.sample, examples, min(BATCH, len(examples)))] * steps, learning_rate
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return last
