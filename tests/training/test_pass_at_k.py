"""pass@k: unbiased from more attempts than k, whatever is drawn."""

from __future__ import annotations

import asyncio
import statistics
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests_tokenizer import hermes_tokenizer

from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.envs import ToolEnv
from agent_r1.renderers.renderer import Chat
from agent_r1.rewards import FunctionScorer, exact_match
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import Limits
from agent_r1.rollout.scripted_engine import ScriptedEngine
from agent_r1.training.config import EvalConfig, TrainConfig
from agent_r1.training.eval_metrics import pass_at_k
from agent_r1.training.evaluate import Method, pass_at
from agent_r1.training.report import PassAtK, Silence


@given(st.integers(1, 8), st.data())
def test_it_is_the_share_of_all_choices_of_k_that_have_a_right_one(attempts: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, attempts)), data.draw(st.integers(1, attempts))
    marks = [True] * right + [False] * (attempts - right)
    choices = list(combinations(marks, k))
    assert pass_at_k(attempts, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_it_is_measured_over_the_splits_from_all_attempts() -> None:
    tasks = [Task(f"t{n}", (Message.user(str(n)),), {"answers": ("yes",)}, "test") for n in range(2)]
    world = TaskSet("w", ToolEnv([]), lambda split: tasks, (FunctionScorer({"em": exact_match}),))
    chat = Chat(hermes_tokenizer())
    said: dict[str, int] = {}

    def reply(text: str) -> str:
        """Task 0 is answered rightly once in four attempts, task 1 never."""
        said[text] = said.get(text, 0) + 1
        return f"<answer>{'yes' if said[text] == 3 and '0<|im_end|>' in text else 'no'}</answer>"

    method = Method("m", Agent(ScriptedEngine(chat, reply), chat, SamplingParams(max_tokens=999), 9999), world.env)
    measured = asyncio.run(pass_at(method, world, 2, 2, 4, Limits(), Silence()))
    assert measured == PassAtK(2, {"test": statistics.fmean([0.5, 0.0])}, 4, {"test": statistics.fmean([0.25, 0.0])})


@pytest.mark.parametrize("config", [TrainConfig, EvalConfig])
@pytest.mark.parametrize("settings", [{"pass_attempts": 4}, {"pass_k": 8, "pass_attempts": 4}])
def test_attempts_that_would_measure_nothing_are_refused(config: Any, settings: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=r"pass_attempts .*: got 4; give pass_k too, and at least so many attempts"):
        resolve(config, [Layer("test", settings)])
    assert resolve(config, [Layer("test", {"pass_k": 4, "pass_attempts": 8})]).pass_attempts == 8
