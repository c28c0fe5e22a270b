"""The agents of other frameworks in examples/agents run unchanged, and their recorded tokens are those sampled."""

import importlib.metadata
import json
import runpy
from pathlib import Path

import pytest

from agent_r1.core.trajectory import Status
from agent_r1.tasksets import build

FOLDER = Path(__file__).parents[2] / "examples" / "agents"
PACKAGES = {
    "with_openai_agents.py": ("openai-agents",),
    "with_langgraph.py": ("langchain", "langgraph", "langchain-openai"),
    "with_pydantic_ai.py": ("pydantic-ai-slim",),
    "with_smolagents.py": ("smolagents",),
}


def call(tool, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def load(name):
    for package in PACKAGES[name]:
        try:
            importlib.metadata.version(package)  # the module "agents" can be the folder of these examples
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed (make test-extras)")
    return runpy.run_path(str(FOLDER / name))["run"]


@pytest.fixture(scope="module")
def task():
    return build("tinywiki", None, None, 0, None).tasks("train")[0]


def searching(task):
    """The policy that looks for the first name in the question, and answers with what the page says."""

    def reply(prompt):
        (answer,), start = task.data["answers"], task.data["chain"].start
        if answer not in prompt.rpartition(start)[2]:
            return f"I look.\n{call('search', query=start)}"
        # smolagents wants the answer as a call
        return call("final_answer", answer=answer) if "final_answer" in prompt else f"<answer>{answer}</answer>"

    return reply


def test_every_example_is_tested():
    assert sorted(PACKAGES) == sorted(path.name for path in FOLDER.glob("*.py"))
    for path in FOLDER.glob("*.py"):
        code = path.read_text("utf-8").split('"""', 2)[2]
        assert len(list(filter(None, code.splitlines()))) <= 18, path


@pytest.mark.parametrize("name", PACKAGES)
def test_an_agent_of_a_framework_trains_on_the_tokens_that_were_sampled(episodes, task, name):
    run = load(name)
    trajectory = episodes.play(lambda url, key, _: run(url, key, task), searching(task), context=20_000)
    assert trajectory.status is Status.COMPLETED, trajectory.reason
    assert task.data["answers"][0] in trajectory.answer
    assert trajectory.start[-1].text.endswith(task.messages[-1].text)
    for turn, (prompt, _, completion) in zip(trajectory.turns, episodes.engine.generations, strict=True):
        assert (trajectory.prompt_ids(turn), turn.action_ids) == (prompt.token_ids, completion.token_ids)
    branches = name == "with_smolagents.py"  # it writes its calls into the conversation as text
    assert [turn.parent for turn in trajectory.turns] == ([None, None] if branches else [None, 0])


@pytest.mark.parametrize("name", PACKAGES)
def test_a_cut_answer_ends_the_episode_as_out_of_tokens_in_every_framework(episodes, task, name):
    run = load(name)
    trajectory = episodes.play(lambda url, key, _: run(url, key, task), searching(task), context=20_000, max_tokens=5)
    assert trajectory.status is Status.OUT_OF_TOKENS and trajectory.turns, trajectory.reason
