"""Chat: typed lines become a conversation with a model that calls tools; commands, limits and leaving."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agent_r1.cli import main
from agent_r1.commands import chat as command
from agent_r1.core.events import AttemptFinished, AttemptStarted
from agent_r1.core.inference import SamplingParams
from agent_r1.core.trajectory import AttemptId, Status, Trajectory
from agent_r1.renderers.byte_tokenizer import byte_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.store.folder import create_run
from agent_r1.store.saved_weights import SavedWeights
from agent_r1.training import chat
from agent_r1.training.build import Placement
from agent_r1.training.config import RunConfig

TINYWIKI = ("--taskset", "tinywiki")
JSON = ("tiny-base", "agent.py", "--json")
AGENT = '''
from agent_r1 import Message, Task, ToolEnv, exact_match

def search(query: str) -> str:
    """Find a page."""
    return f"{query}: capital Brodra.\\x1b[2J"

def weigh(town: str) -> str:
    """Weigh a town."""
    raise RuntimeError("too heavy")

env = ToolEnv(tools=[search, weigh], rewards=[exact_match], max_turns=3, system="Answer in one word.")
tasks = [
    Task("one", (Message.user("What is the capital of Alaban?"),), {"answers": ("Brodra",)}),
    Task("two", (Message.user("What is the capital of Bruno?"),), {"answers": ("Brodra",)}),
]
'''


class ScriptedPolicy:
    """A policy that gives these texts, one after the other, and then fails."""

    def __init__(self, *texts: str, context: int = 8000) -> None:
        self._texts, self._context = iter(texts), context

    def agent(self, engine: object, config: RunConfig, temperature: float) -> Agent:
        renderer = TemplateRenderer(byte_tokenizer())
        engine = ScriptedEngine(renderer, lambda prompt: next(self._texts, None) or 1 / 0)
        return Agent(engine, renderer, SamplingParams(temperature, max_tokens=100), self._context)


def script(monkeypatch: pytest.MonkeyPatch, *texts: str, context: int = 8000) -> None:
    """Let the chat talk to a scripted policy."""
    monkeypatch.setattr(chat, "load_policy", lambda *_: ScriptedPolicy(*texts, context=context))
    monkeypatch.setattr(chat, "resolve_placement", lambda *_: Placement(engine=lambda *_: ScriptedEngine(None, str)))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT, "utf-8")
    with closing(create_run(tmp_path / "runs/demo", {"taskset": "agent"})) as writer:
        for group, task in ((3, "one"), (4, "two"), (8, "three")):
            attempt = AttemptId("demo", task, group, 0)
            ended = AttemptFinished(Trajectory(attempt, task, (), Status.COMPLETED, rewards={"em": -float(group)}))
            asyncio.run(writer.record(AttemptStarted(attempt, "train", 0), ended))
    monkeypatch.setattr(command, "find_weights", lambda *_: SavedWeights(tmp_path, 1, True))
    return Path("agent.py")


class Talk:
    """``talk("line", ..)`` is the exit code and the output of a chat with tiny-base in which these lines are typed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *lines: str, arguments: tuple[str, ...] = ("tiny-base", "agent.py")) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        self._capfd.readouterr()
        code = main(["chat", *arguments])
        return code, *self._capfd.readouterr()


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Talk:
    return Talk(monkeypatch, capfd)


def test_calls_and_results_are_shown_and_the_conversation_continues(talk: Talk) -> None:
    code, out, _ = talk(
        "What is the capital of Alaban?", "And the river?", arguments=("tiny-base", "--json", *TINYWIKI)
    )
    assert code == 0 and 'search({"query": "' in out and "\ntool: " in out
    messages = json.loads(out.splitlines()[-1])["messages"]
    assert [message["content"] for message in messages if message["role"] == "user"] == [
        "What is the capital of Alaban?",
        "And the river?",
    ]


def test_commands_are_not_sent_to_the_model(agent: Path, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "Alba"}}\n</tool_call>'
    script(monkeypatch, call, "Brodra", "Hello")
    code, out, _ = talk("", "/tools", "/help", "Which is it?", "/reset", "Hi", "/quit", "never read", arguments=JSON)
    assert code == 0 and out.count("/reset    start a new conversation") == 2
    assert "search(query: string)  Find a page." in out and "a new conversation" in out and "never read" not in out
    assert "tool: Alba: capital Brodra.\ufffd[2J" in out and "assistant: Brodra" in out
    roles = [(message["role"], message["content"]) for message in json.loads(out.splitlines()[-1])["messages"]]
    assert roles == [("system", "Answer in one word."), ("user", "Hi"), ("assistant", "Hello")]


@pytest.mark.parametrize(
    ("arguments", "question"),
    [
        ((), "A question of task one, whose data the tools use:\nWhat is the capital of Alaban?"),
        (("4.0",), "A question of task two, whose data the tools use:\nWhat is the capital of Bruno?"),
        (("best",), "A question of task one, whose data the tools use:\nWhat is the capital of Alaban?"),
    ],
    ids=str,
)
def test_the_question_of_the_chosen_task_is_printed(
    agent: Path, talk: Talk, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], question: str
) -> None:
    script(monkeypatch)
    code, out, err = talk(arguments=("demo", "agent.py", *arguments))
    assert (code, err) == (0, "") and question in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("nothing",), "model: got nothing"),
        (("tiny-base", "none.py"), "FILE.py: got none.py, which is not a file"),
        (("tiny-base", "agent.py", "--checkpoint", "newest"), "--checkpoint: got newest, and runs/tiny-base is no run"),
        (("tiny-base", "agent.py", "worst"), "attempt: got worst, and runs/tiny-base is no run"),
        (("demo", "agent.py", "7.7"), "attempt: got '7.7', which is no attempt of runs/demo"),
        (("demo", "agent.py", "8.0"), "attempt: got its task three, which agent has not in train"),
        (("demo", "agent.py", "4.0", "--number", "1"), "--number: got it and the attempt 4.0; leave one out"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(agent: Path, talk: Talk, arguments: tuple[str, ...], line: str) -> None:
    code, out, err = talk("Hello", arguments=arguments)
    assert code == 2 and line in err and len(err.splitlines()) == 1 and out == ""


def test_limits_and_failures_are_explained(agent: Path, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "weigh", "arguments": {"town": "Alba"}}\n</tool_call>'
    script(monkeypatch, call, call, call, "done")
    code, out, _ = talk("one", "two", "three")
    assert code == 0 and out.count("too heavy") == 2
    assert "(3 actions in a row are the limit; the calls were not run)" in out
    assert "assistant: done" in out and "(no answer: ZeroDivisionError" in out


def test_a_full_context_is_explained(agent: Path, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, "fine", context=50)
    _, out, _ = talk("x" * 60, arguments=("tiny-base",))
    assert "(the context of 50 tokens is full; /reset starts a new conversation)" in out


def test_ctrl_c_at_the_prompt_leaves_with_exit_code_0(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    script(monkeypatch)
    code, out, err = talk(arguments=("tiny-base", "--json"))
    assert code == 0 and json.loads(out.splitlines()[-1]) == {"messages": []} and err == ""
