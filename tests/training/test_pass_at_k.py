"""pass@k is estimated without bias from more attempts than k."""

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
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rewards import FunctionScorer, exact_match
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import RolloutLimits
from agent_r1.rollout.scripted_engine import ScriptedEngine
from agent_r1.training.config import EvalConfig, TrainConfig
from agent_r1.training.eval_metrics import pass_at_k
from agent_r1.training.evaluate import Method, measure_pass_at_k
from agent_r1.training.progress import SilentProgress
from agent_r1.training.tables import PassAtK


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_with_a_right_one(attempts: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, attempts)), data.draw(st.integers(1, attempts))
    outcomes = [True] * right + [False] * (attempts - right)
    choices = list(combinations(outcomes, k))
    assert pass_at_k(attempts, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_is_measured_per_split_from_all_attempts() -> None:
    tasks = [Task(f"t{n}", (Message.user(str(n)),), {"answers": ("yes",)}, "test") for n in range(2)]
    taskset = TaskSet("w", ToolEnv([]), lambda split: tasks, (FunctionScorer({"em": exact_match}),))
    renderer = TemplateRenderer(hermes_tokenizer())
    counts: dict[str, int] = {}

    def reply(text: str) -> str:
        """Answer task 0 correctly once in four attempts, task 1 never."""
        counts[text] = counts.get(text, 0) + 1
        return f"<answer>{'yes' if counts[text] == 3 and '0<|im_end|>' in text else 'no'}</answer>"

    method = Method(
        "m", Agent(ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=999), 9999), taskset.env
    )
    measured = asyncio.run(measure_pass_at_k(method, taskset, 2, 2, 4, RolloutLimits(), SilentProgress()))
    assert measured == PassAtK(2, {"test": statistics.fmean([0.5, 0.0])}, 4, {"test": statistics.fmean([0.25, 0.0])})


@pytest.mark.parametrize("config", [TrainConfig, EvalConfig])
@pytest.mark.parametrize("settings", [{"pass_attempts": 4}, {"pass_k": 8, "pass_attempts": 4}])
def test_attempts_that_would_measure_nothing_are_refused(config: Any, settings: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=r"pass_attempts .*: got 4; give pass_k too, and at least so many attempts"):
        resolve(config, [Layer("test", settings)])
    assert resolve(config, [Layer("test", {"pass_k": 4, "pass_attempts": 8})]).pass_attempts == 8
