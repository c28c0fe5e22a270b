"""The columns of the table: the requested splits, each in the environment of that split."""

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import SamplingParams
from agent_r1.core.taskset import TaskSet
from agent_r1.renderers.byte_tokenizer import byte_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.tasksets import build
from agent_r1.training.config import EvalConfig
from agent_r1.training.evaluate import Method, env_for_method, evaluate
from agent_r1.training.progress import SilentProgress

SMALL = {"model": "tiny-base", "evaluate_n": 2, "context": 512, "max_tokens": 32}


@pytest.fixture(scope="module")
def taskset() -> TaskSet:
    return build("tinywiki", None, None, 0)


def test_the_table_has_the_columns_that_are_asked_for(taskset: TaskSet) -> None:
    table = evaluate(EvalConfig(splits=("renamed-tool", "style-a"), **SMALL), taskset, SilentProgress())
    assert {tuple(row) for row in table.cells.values()} == {("renamed-tool", "style-a")}


def test_a_column_that_does_not_exist_is_refused(taskset: TaskSet) -> None:
    with pytest.raises(InvalidInput, match="got style-z"):
        evaluate(EvalConfig(splits=("style-z",), **SMALL), taskset, SilentProgress())


def test_an_agent_is_tried_in_the_variants_environment_and_a_baseline_in_its_own(taskset: TaskSet) -> None:
    renderer = TemplateRenderer(byte_tokenizer())
    silent = Agent(ScriptedEngine(renderer, lambda prompt: ""), renderer, SamplingParams(), 999)
    agent, rag = (
        Method("agent", silent, taskset.env),
        Method("rag", silent, taskset.baselines["naive-rag"]),
    )
    assert env_for_method(agent, taskset, "renamed-tool") is taskset.variants["renamed-tool"] is not taskset.env
    assert env_for_method(agent, taskset, "style-a") is taskset.env
    assert env_for_method(rag, taskset, "renamed-tool") is taskset.baselines["naive-rag"]
