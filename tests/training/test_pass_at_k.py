"""Sampled attempts: pass@k is estimated without bias from more attempts than k, and votes choose among answers."""

from __future__ import annotations

import asyncio
import statistics
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests_tokenizer import hermes_tokenizer

from agent_r1.config import Layer, resolve
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rewards.scoring import FunctionScorer, exact_match
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import RolloutLimits
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.training.config import EvalConfig, TrainConfig
from agent_r1.training.evaluate import Method, make_table, measure_pass_at_k, sampled_cell
from agent_r1.training.metrics import majority_score, pass_at_k
from agent_r1.training.progress import SilentProgress


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
        """Answer task 0 correctly twice in four attempts, and otherwise differently; task 1 never."""
        counts[text] = counts.get(text, 0) + 1
        right = counts[text] in (2, 3) and "0<|im_end|>" in text
        return f"<answer>{'Yes' if right else f'no {counts[text]}'}</answer>"

    method = Method(
        "m", Agent(ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=999), 9999), taskset.env
    )
    measured = asyncio.run(measure_pass_at_k(method, taskset, 2, 2, 4, RolloutLimits(), SilentProgress()))
    assert (measured.k, measured.attempts) == (2, 4)
    cell = measured.cells["test"]
    assert (cell.one, cell.any) == (statistics.fmean([0.5, 0.0]), statistics.fmean([5 / 6, 0.0]))
    assert (cell.low, cell.high) == pytest.approx((0.25 - 0.49, 0.25 + 0.49), abs=0.001)
    assert cell.majority == statistics.fmean([1.0, 0.0])  # "Yes" has two votes, every other answer one


class Lines(SilentProgress):
    """A display that keeps the printed lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)


class BrokenEnv(ToolEnv):
    """An environment that cannot begin an episode."""

    async def open(self, task: Task, context: Any) -> Any:
        raise OSError("no browser")


def test_attempts_that_failed_are_named_and_not_counted_as_wrong() -> None:
    tasks = [Task(f"t{n}", (Message.user(str(n)),), {"answers": ("yes",)}, "test") for n in range(2)]
    taskset = TaskSet("w", BrokenEnv([]), lambda split: tasks, (FunctionScorer({"em": exact_match}),))
    renderer = TemplateRenderer(hermes_tokenizer())
    agent = Agent(ScriptedEngine(renderer, str), renderer, SamplingParams(max_tokens=999), 9999)
    progress = Lines()
    measured = asyncio.run(
        measure_pass_at_k(Method("m", agent, taskset.env), taskset, 2, 2, 4, RolloutLimits(), progress)
    )
    assert measured.cells == {}
    assert progress.lines[-1].startswith("m on test, sampled: 8 of 8 failed, 8 of them: ")
    assert "no browser" in progress.lines[-1]
    with pytest.raises(
        AgentR1Error, match=r"every attempt of the evaluation failed, 2 of 2 for this reason: .*no browser"
    ):
        asyncio.run(make_table([Method("m", agent, taskset.env)], taskset, 2, RolloutLimits(), progress))


ACTION = Action(Message.assistant("a"), "a")


def attempt(*logprobs: float, em: float) -> Trajectory:
    turns = tuple(
        Turn(n, n - 1 if n else None, (1,), (2,), (value,), (), "stop", ACTION) for n, value in enumerate(logprobs)
    )
    return Trajectory(AttemptId("run", "t", 0, 0), "t", turns, Status.COMPLETED, rewards={"em": em})


def test_the_likeliest_attempt_has_the_highest_mean_log_probability_of_a_token() -> None:
    long_but_sure, short = attempt(-0.1, -0.1, -0.1, em=1.0), attempt(-0.2, em=0.0)
    assert sampled_cell([[long_but_sure, short], [short, attempt(-0.05, em=1.0)]], 1).likeliest == 1.0
    assert sampled_cell([[attempt(em=0.0), short]], 2).likeliest == 0.0  # an attempt without tokens is the least likely


@given(st.lists(st.sampled_from(["x", "y", "the X", None]), min_size=1))
def test_the_majority_scores_what_its_answer_scores(answers: list[str | None]) -> None:
    scores = [float(answer in ("x", "the X")) for answer in answers]
    right, wrong = sum(scores), answers.count("y")
    expected = 0.5 if right == wrong > 0 else float(right > wrong)
    assert majority_score(answers, scores) == expected


@pytest.mark.parametrize("config", [TrainConfig, EvalConfig])
@pytest.mark.parametrize("settings", [{"pass_attempts": 4}, {"pass_k": 8, "pass_attempts": 4}])
def test_attempts_that_would_measure_nothing_are_refused(config: Any, settings: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=r"pass_attempts .*: got 4; give pass_k too, and at least so many attempts"):
        resolve(config, [Layer("test", settings)])
    assert resolve(config, [Layer("test", {"pass_k": 4, "pass_attempts": 8})]).pass_attempts == 8
