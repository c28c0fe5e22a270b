"""The columns of the table: those that are asked for, each in the environment that its split has."""

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.reference_solution import script
from agent_r1.core.taskset import TaskSet
from agent_r1.rollout.scripted_agent import Performer
from agent_r1.tasksets import build
from agent_r1.training.build import with_columns
from agent_r1.training.config import EvalConfig
from agent_r1.training.evaluate import Method, evaluate, lived_in
from agent_r1.training.report import Silence

SMALL = {"model": "tiny-base", "n": 2, "context": 512, "max_tokens": 32}


@pytest.fixture(scope="module")
def world() -> TaskSet:
    return build("tinywiki", None, None, 0)


def test_the_table_has_the_columns_that_are_asked_for(world: TaskSet) -> None:
    table = evaluate(EvalConfig(splits=("renamed-tool", "style-a"), **SMALL), world, Silence())
    assert {tuple(row) for row in table.cells.values()} == {("renamed-tool", "style-a")}


def test_a_column_that_does_not_exist_is_refused(world: TaskSet) -> None:
    with pytest.raises(InvalidInput, match="got style-z"):
        evaluate(EvalConfig(splits=("style-z",), **SMALL), world, Silence())


def test_without_any_the_world_names_its_columns(world: TaskSet) -> None:
    assert with_columns(world, ()) is world


def test_an_agent_is_tried_in_the_variants_environment_and_a_baseline_in_its_own(world: TaskSet) -> None:
    performer = Performer(world.env, lambda attempt: script(Message.assistant("")))
    agent, rag = (
        Method("agent", performer.agent, world.env),
        Method("rag", performer.agent, world.baselines["naive-rag"]),
    )
    assert lived_in(agent, world, "renamed-tool") is world.variants["renamed-tool"] is not world.env
    assert lived_in(agent, world, "style-a") is world.env
    assert lived_in(rag, world, "renamed-tool") is world.baselines["naive-rag"]
