"""A tiny base for another world: a model of its kind that has that world's words, and its manners, not its wits.

It imitates a speaker that knows the form of an action and draws its content at random, so that whatever it does better
after reinforcement learning, it learned from the rewards of that world.
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
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolSpec
from agent_r1.core.trajectory import STATUS_POLICY
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import RolloutLimits
from agent_r1.rollout.scripted_engine import ScriptedEngine
from agent_r1.training.evaluate import Method, attempts
from research.tiny_base.examples import spoken
from research.tiny_base.init_model import start_model
from research.tiny_base.pretrain import LEARNING_RATE, Progress, imitate
from research.tiny_base.tokenizer import make_tokenizer

Conversation = tuple[Message, ...]

STEPS, BATCH = 100, 32
"""Steps of imitation, and conversations of each."""

_TOKENS = 1 << 20
"""More than any conversation has when every character is a token."""


def conversations(env: Env, tasks: Sequence[Task], speak: Callable[[str], str]) -> list[Conversation]:
    """What is said in an episode of each task, where the agent says ``speak(prompt)``; a prompt is rendered text.

    Episodes are lived one after the other, so that a speaker which draws at random says the same each time. One that
    failed is left out, as it would be in training. Raises AgentR1Error where all failed, with the reason of the first.
    """
    renderer = TemplateRenderer(make_tokenizer([]))
    agent = Agent(ScriptedEngine(renderer, speak), renderer, SamplingParams(max_tokens=_TOKENS), _TOKENS)
    groups = asyncio.run(attempts(Method("speaker", agent, env), (), tasks, 1, RolloutLimits(concurrency=1)))
    lived = [group.trajectories[0] for group in groups]
    heard = [trajectory.messages for trajectory in lived if STATUS_POLICY[trajectory.status] == "train"]
    if lived and not heard:
        raise AgentR1Error(f"no episode can be imitated; the first: {lived[0].status}: {lived[0].reason}")
    return heard


def tiny_base_for(
    heard: Sequence[Conversation],
    words: Iterable[str],
    folder: Path,
    seed: int,
    steps: int = STEPS,
    tools: tuple[ToolSpec, ...] = (),
    learning_rate: float = LEARNING_RATE,
) -> Progress:
    """Make a model that speaks as the assistant does in the conversations, and write it to ``folder``.

    Args:
        heard: conversations, as :func:`conversations` gives them.
        words: further words of the world, which they may lack; others are spelled.
        folder: a folder that ``train(model=..)`` takes.
        seed: of the weights, and of the order of the conversations.
        steps: optimizer steps.
        tools: those of the world; they stand in its prompts.
        learning_rate: the highest. Where what is said hangs on what was read, half of the default taught more.

    Returns how well it imitates at last: where the content is random, the loss stays at the entropy of that.
    """
    plain = TemplateRenderer(make_tokenizer([]))
    tokenizer = make_tokenizer([*words, *(plain.render_text(each, tools) for each in heard)])
    renderer, rng = TemplateRenderer(tokenizer), random.Random(seed)
    examples = [spoken(renderer, each, tools) for each in heard]
    model = start_model(tokenizer, seed)
    *_, last = imitate(model, [partial(rng.sample, examples, min(BATCH, len(examples)))] * steps, learning_rate)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return last
