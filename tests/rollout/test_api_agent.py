"""A model behind an API: a server that answers, fails and hangs, and the same model without an API."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from chat_servers import Answer, Serve, Server, completion, failing, reply

import agent_r1
from agent_r1 import Message, Task, ToolEnv, exact_match
from agent_r1.chat_api import MAX_ANSWER, ChatApi, Failure
from agent_r1.cli import main
from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import ToolCall
from agent_r1.core.trajectory import AttemptId, Status, Trajectory
from agent_r1.gateway.episode import ServedModel
from agent_r1.gateway.server import Gateway
from agent_r1.rewards.scoring import calls_are_valid, final_answer
from agent_r1.rollout.api_agent import ApiAgent, UsageMeter, read_action
from agent_r1.rollout.collector import RolloutLimits
from agent_r1.rollout.scripted import ScriptedAgent
from agent_r1.tasksets import build
from agent_r1.training import evaluate
from agent_r1.training.build import Placement
from agent_r1.training.config import EvalConfig
from agent_r1.training.evaluate import BASE, Method, attempts, greedy_attempts
from agent_r1.training.policy import load_policy

KEY = "sk-a-secret-key"
OWN = """
from agent_r1 import Message, Task, ToolEnv, exact_match

def add(a: int, b: int) -> int:
    '''Add two numbers.'''
    return a + b

env = ToolEnv([add], [exact_match], max_turns=3)
tasks = [Task(str(n), f"{n} + {n}?", {"answers": (str(2 * n),)}) for n in range(4)]
"""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ENV = ToolEnv([add], [exact_match], max_turns=3)
TASKS = [Task(str(n), f"{n} + {n}?", {"answers": (str(2 * n),)}) for n in range(4)]


def message(content: str | None, *calls: tuple[str, Any], **more: Any) -> str:
    """A completion with calls: pairs of a name, and arguments as an API writes them (text)."""
    called = [
        {"id": f"id{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    said = {"role": "assistant", "content": content, **({"tool_calls": called} if called else {})}
    usage = {"usage": {"prompt_tokens": 100, "completion_tokens": 10}}
    return json.dumps({"choices": [{"message": said, "finish_reason": "stop"}], **usage, **more})


def solve(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """A model that adds with the tool, and answers with its result."""
    last = body["messages"][-1]
    number = int(body["messages"][0]["content"].split()[0])
    if last["role"] == "tool":
        reply(handler, message(f"<answer>{last['content']}</answer>"))
    else:
        reply(handler, message("", ("add", json.dumps({"a": number, "b": number}))))


def agent(server: Server, meter: UsageMeter | None = None, **api: Any) -> ApiAgent:
    made = ChatApi(server.url, **{"pause": 0.0, "tries": 2, "seconds": 20.0, **api})
    return ApiAgent(made, "m", SamplingParams(0.0, max_tokens=64), 1000, meter=meter or UsageMeter())


def act(actor: ApiAgent, env: ToolEnv = ENV, tasks: list[Task] = TASKS, **limits: Any) -> list[Trajectory]:
    """One attempt at each task."""
    limited = RolloutLimits(**{"retries": 0, **limits})
    groups = asyncio.run(attempts(Method("m", actor, env), env.scorers, tasks, 1, limited))
    return [group.trajectories[0] for group in groups]


def test_a_model_acts_with_the_tools_of_the_environment_and_its_tokens_are_counted(serve: Serve) -> None:
    server, meter = serve(solve), UsageMeter((2.0, 10.0))
    found = act(agent(server, meter, key=KEY))
    assert [one.rewards for one in found] == [{"exact_match": 1.0}] * 4
    assert all(one.status is Status.COMPLETED and len(one.turns) == 2 for one in found)
    assert found[1].turns[0].results[0].parts[0].text == "2"  # type: ignore[union-attr]
    assert meter.usage.answers == 8 and meter.usage.prompt_tokens == 800 and meter.usage.completion_tokens == 80
    assert meter.usage.cost == pytest.approx((800 * 2 + 80 * 10) / 1e6) and meter.usage.unreported == 0
    first = next(body for body in server.bodies if len(body["messages"]) == 1)
    assert first["tools"] == [ENV.tools[0].to_openai()]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.0, 64)
    (second,) = [body for body in server.bodies if len(body["messages"]) == 3 and "1 + 1" in str(body)]
    call = {"id": "id0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
    assert second["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "id0"},
    ]
    assert set(server.keys) == {f"Bearer {KEY}"} and KEY not in repr(agent(server, key=KEY))


def hang(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    time.sleep(2)


@pytest.mark.parametrize(
    ("answer", "reason", "requests"),
    [
        (failing("broken", 500), "status 500: broken", 2),
        (failing("overloaded", 529), "status 529: overloaded", 2),
        (failing("too many", 429), "status 429: too many", 2),
        (failing(f"wrong key {KEY}", 401), "status 401: wrong key ***", 1),
        (failing("no such model", 404), "status 404", 1),
        (failing('{"error": "no such model"}'), 'no chat completion: {"error": "no such model"}', 2),
        (failing('{"choices": []}'), "no chat completion", 2),
        (failing('{"choices": [{"message": "hi"}]}'), "no chat completion", 2),
        (failing('{"choices": [{"message": {"content": "", "tool_calls": 3}}]}'), "cannot be read", 2),
        (failing("x" * (MAX_ANSWER + 1)), "more than 1,000,000 bytes", 1),
        (failing("", 302, Location="http://127.0.0.1:9/"), "status 302", 1),
        (hang, "no answer within 0.2 seconds", 2),
    ],
)
def test_a_failure_is_the_reason_of_the_attempt(serve: Serve, answer: Answer, reason: str, requests: int) -> None:
    server = serve(answer)
    seconds = 0.2 if answer is hang else 20.0
    (found,) = act(agent(server, key=KEY, seconds=seconds), tasks=TASKS[:1])
    assert found.status is (Status.CANCELLED if requests == 1 else Status.ENGINE_FAILED)
    assert not found.rewards and not found.turns
    assert found.reason is not None and reason in found.reason and KEY not in found.reason
    assert len(server.bodies) == requests


def test_nobody_listens(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(solve)
    server.http.shutdown()  # first: its thread would go on with the number of the closed socket
    server.http.server_close()
    found = act(agent(server, tries=3), tasks=TASKS[:2])
    assert all(one.status is Status.ENGINE_FAILED and "ConnectError" in str(one.reason) for one in found)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"cannot connect to {server.url}, try 2 of 3 in 0 s"
    assert len(lines) <= 2, "at most one in ten seconds, and not one for each attempt"


def test_a_request_is_repeated_until_it_succeeds_after_the_pause_that_the_server_demands(serve: Serve) -> None:
    server = serve(failing("broken", 500), failing("busy", 429, Retry_After="1"), failing("<html>"), solve)
    began = time.monotonic()
    (found,) = act(agent(server, tries=4), tasks=TASKS[1:2])
    assert found.rewards == {"exact_match": 1.0} and len(server.bodies) == 5
    assert time.monotonic() - began >= 1.0


def test_a_slow_server_is_cut_off_at_the_limit_of_the_episode(serve: Serve) -> None:
    server = serve(hang)
    (found,) = act(agent(server), tasks=TASKS[:1], episode_seconds=0.2)
    assert found.status is Status.CANCELLED


WRONG: tuple[tuple[str, Any], ...] = (
    ("add", '{"a": 1, '),
    ("add", "[1, 1]"),
    ("plus", '{"a": 1}'),
    ("add", '{"a": 1}'),
)


def test_malformed_calls_get_the_explanations_that_a_policy_gets(serve: Serve) -> None:
    texts = [f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(raw)}}}\n</tool_call>' for name, raw in WRONG]
    policy = [Message.assistant("\n".join(texts)), Message.assistant("<answer>2</answer>")]
    scripted = ScriptedAgent(ENV, lambda attempt: lambda conversation, turn: policy[turn])
    server = serve(failing(message("", *WRONG)), failing(message("<answer>2</answer>")))
    (found,) = act(agent(server), tasks=TASKS[1:2])
    (expected,) = asyncio.run(scripted.run(TASKS[1], RolloutContext(AttemptId("test", "1", 0, 0), 0)))
    assert [result.parts for result in found.turns[0].results] == [one.parts for one in expected.turns[0].results]
    assert len(found.turns[0].results) == 4 and not calls_are_valid(found)
    assert found.rewards == {"exact_match": 1.0}
    sent = server.bodies[1]["messages"]
    # The calls are sent back with arguments that servers can parse, and each has its result.
    assert [json.loads(call["function"]["arguments"]) for call in sent[1]["tool_calls"]] == [{}, {}, {"a": 1}, {"a": 1}]
    assert [one["tool_call_id"] for one in sent[2:]] == ["id0", "id1", "id2", "id3"]


def test_messages_of_other_servers_are_read() -> None:
    def read(**fields: Any) -> Message:
        action = read_action({"role": "assistant", **fields}, 7)
        assert not isinstance(action, Failure)
        return action.message

    assert read(content=None, refusal="I cannot.").text == "I cannot."
    assert read(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]).text == "a\nb"
    assert isinstance(read_action({"content": [3]}, 0), Failure)
    for thought in ({"reasoning_content": "So."}, {"reasoning": "So."}):
        found = read(content="Yes.", **thought)
        assert (found.reasoning, found.text) == ("So.", "Yes.")
    in_text = read(content="<think>\nSo.\n</think>\n\nYes.")
    assert (in_text.reasoning, in_text.text) == ("So.", "Yes.")
    strange = read(content="", tool_calls=[3, {"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {}}])
    assert strange.calls[1] == ToolCall("call_7_1", "f", {"a": 1}, '{"a": 1}')
    assert [call.error for call in strange.calls] == ['the call has no "name"', None, 'the call has no "name"']


def test_answers_without_usage_are_counted_as_such(serve: Serve) -> None:
    server, meter = serve(failing(completion("<answer>0</answer>"))), UsageMeter()
    act(agent(server, meter), tasks=TASKS[:2])
    assert (meter.usage.answers, meter.usage.unreported, meter.usage.cost) == (2, 2, None)


def test_an_answer_that_cannot_be_read_is_counted_too(serve: Serve) -> None:
    unread = json.dumps(json.loads(completion([3])) | {"usage": {"prompt_tokens": 7, "completion_tokens": 3}})
    server, meter = serve(failing(unread), failing(message("<answer>0</answer>"))), UsageMeter()
    assert act(agent(server, meter), tasks=TASKS[:1])[0].rewards == {"exact_match": 1.0}
    assert (meter.usage.answers, meter.usage.prompt_tokens, meter.usage.completion_tokens) == (2, 107, 13)


def refuse(param: str) -> str:
    return json.dumps({"error": {"message": f"'{param}'", "param": param, "code": "unsupported_parameter"}})


def test_arguments_that_a_model_refuses_are_replaced_once(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(failing(refuse("max_tokens"), 400), failing(refuse("temperature"), 400), solve)
    found = act(agent(server), tasks=TASKS[1:3], concurrency=1)
    assert [one.rewards for one in found] == [{"exact_match": 1.0}] * 2
    assert all("temperature" not in body and body["max_completion_tokens"] == 64 for body in server.bodies[2:])
    assert len(server.bodies) == 2 + 4
    assert [record.getMessage() for record in caplog.records].count("m refuses the temperature 0 and has its own") == 1
    endless = serve(failing(refuse("max_tokens"), 400))
    assert act(agent(endless), tasks=TASKS[:1])[0].status is Status.CANCELLED and len(endless.bodies) == 2


@pytest.mark.parametrize(
    "answer",
    [
        failing('{"error": {"code": "context_length_exceeded"}}', 400),
        failing("This model's maximum context length is 4096 tokens", 400),
        failing(message("<answer>0</answer>", usage={"prompt_tokens": 1000, "completion_tokens": 1})),
    ],
)
def test_a_conversation_that_is_too_long_counts_as_for_a_policy(serve: Serve, answer: Answer) -> None:
    (found,) = act(agent(serve(answer)), tasks=TASKS[:1])
    assert found.status is Status.OUT_OF_TOKENS and found.rewards == {"exact_match": 0.0}


def test_an_answer_that_is_cut_is_out_of_tokens_and_too_many_turns_are_out_of_turns(serve: Serve) -> None:
    cut = {"choices": [{"message": {"content": "<answer>"}, "finish_reason": "length"}]}
    assert act(agent(serve(failing(json.dumps(cut)))), tasks=TASKS[:1])[0].status is Status.OUT_OF_TOKENS
    (found,) = act(agent(serve(failing(message("", ("add", '{"a": 1, "b": 1}'))))), tasks=TASKS[:1])
    assert found.status is Status.OUT_OF_TURNS and len(found.turns) == 3


def test_an_environment_can_ask_the_model(serve: Serve) -> None:
    client = agent(serve(failing(completion("Hello.")))).client(0)
    assert asyncio.run(client((Message.user("Hi"),))).text == "Hello."
    with pytest.raises(EngineError, match="status 500"):
        asyncio.run(agent(serve(failing("", 500))).client(0)((Message.user("Hi"),)))


# ---- the command and the Python interface

Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    for name in ("AGENT_R1_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "own.py").write_text(OWN, "utf-8")

    def call(*arguments: object) -> tuple[int, dict[str, Any], str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, json.loads(out.splitlines()[-1]) if "--json" in arguments else {"out": out}, err

    return call


def test_the_command_evaluates_models_behind_an_api_without_a_model_of_its_own(
    run: Run, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def fail_one(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if body["model"] == "b" and body["messages"][0]["content"].startswith("3"):
            return reply(handler, f"no, {KEY}", 400)
        solve(handler, body)

    server = serve(fail_one)
    of_api = ("--api_url", f"{server.url}/chat/completions", "--api_model", "a,b", "--api_prices", "1,2,3,4")
    code, data, err = run("eval", "own.py", *of_api, "--labels", "b=second", "--json")
    assert code == 0 and "no --model, so these rows are left out: base-tool-call" in err and KEY not in err
    assert list(data["table"]) == ["a", "second"]
    assert data["table"]["a"]["train"]["em"] == 1.0 and data["table"]["a"]["train"]["n"] == 4
    failed = data["table"]["second"]["train"]
    assert (failed["em"], failed["n"], failed["failed"]) == (1.0, 3, 1)
    assert data["usage"]["a"] == {
        **{"answers": 8, "prompt_tokens": 800, "completion_tokens": 80, "unreported": 0},
        "cost": pytest.approx((800 + 160) / 1e6),
    }
    assert "second on train: 1 of 4 failed, 1 of them: status 400: no, ***" in err
    assert set(server.keys) == {f"Bearer {KEY}"}
    code, data, err = run("eval", "own.py", *of_api, "--pass_k", 2, "--quiet")
    assert code == 0 and "a: 2,400 prompt tokens and 240 completion tokens in 24 answers, cost 0.0029" in data["out"]
    assert "likeliest -" in data["out"] and {body["temperature"] for body in server.bodies} == {0.0, 1.0}


def test_without_a_model_torch_and_transformers_are_not_imported(run: Run, serve: Serve) -> None:
    given = ["eval", "own.py", "--api_url", serve(solve).url, "--api_model", "a", "--json"]
    program = "import sys\nfrom agent_r1.cli import main\nsys.modules.update(torch=None, transformers=None)\n"
    command = [sys.executable, "-c", f"{program}sys.exit(main({given!r}))"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["table"]["a"]["train"]["em"] == 1.0, done.stderr


def test_without_a_model_the_limits_are_not_those_of_tiny_base(run: Run, serve: Serve) -> None:
    server = serve(failing(message("<answer>0</answer>", usage={"prompt_tokens": 600, "completion_tokens": 40})))
    for given, expected in (((), 1024), (("--max_tokens", 48), 48)):
        code, data, err = run("eval", "own.py", "--api_url", server.url, "--api_model", "a", *given, "--json")
        assert code == 0 and data["table"]["a"]["train"]["em"] == 0.25, err
        assert server.bodies[-1]["max_tokens"] == expected
    trainer = agent_r1.Trainer(ENV, TASKS)
    for settings, expected in (({}, 1024), ({"max_tokens": 48}, 48), ({"model": "tiny-base"}, 32)):
        trainer.evaluate(api_url=server.url, api_model=["a"], **settings)
        assert server.bodies[-1]["max_tokens"] == expected


PROGRAM = (
    OWN
    + """
def run(base_url, api_key, task):
    raise SystemExit("it is never called")
"""
)


def test_an_agent_program_is_refused_before_anything_is_evaluated(run: Run, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, "utf-8")
    given = ("--model", "tiny-base", "--api_url", serve(solve).url, "--api_model", "a")
    code, _, err = run("eval", "program.py", *given)
    assert code == 2 and "api_model: got a with an agent program" in err and err.count("\n") == 1


def test_the_row_of_an_api_stands_beside_chosen_methods(run: Run, serve: Serve) -> None:
    given = ("--model", "tiny-base", "--api_url", serve(solve).url, "--api_model", "a", "--max_tokens", "4")
    code, data, err = run("eval", "own.py", *given, "--methods", "base-tool-call", "--json")
    assert code == 0 and set(data["table"]) == {"base-tool-call", "a"}, err


SEVERAL = (
    OWN
    + """
env = {"sums": env, "words": ToolEnv([], [exact_match], system="Answer in one word.")}
tasks = [Task(t.id, t.messages, t.data, env="sums") for t in tasks]
tasks += [Task("word", "9 words?", {"answers": ("9",)}, env="words")]
"""
)


def test_each_task_has_the_tools_of_its_own_environment(run: Run, serve: Serve, tmp_path: Path) -> None:
    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if "tools" in body:
            return solve(handler, body)
        assert body["messages"][0] == {"role": "system", "content": "Answer in one word."}
        reply(handler, message("<answer>9</answer>"))

    (tmp_path / "several.py").write_text(SEVERAL, "utf-8")
    server = serve(answer)
    code, data, err = run("eval", "several.py", "--api_url", server.url, "--api_model", "a", "--json")
    assert code == 0, err
    assert {name: cell["em"] for name, cell in data["table"]["a"].items()} == {"sums/train": 1.0, "words/train": 1.0}


def test_a_server_that_nobody_started_is_one_line_before_anything_is_played(run: Run, serve: Serve) -> None:
    server = serve(solve)
    server.http.shutdown()  # first: its thread would go on with the number of the closed socket
    server.http.server_close()
    began = time.monotonic()
    url = server.url.replace("//", "//ann:secret@")
    code, _, err = run("eval", "own.py", "--api_url", url, "--api_model", "a,b", "--quiet")
    assert code == 2 and time.monotonic() - began < 20
    assert "which cannot be reached" in err and err.count("\n") == 1 and "secret" not in err


def test_a_server_that_is_busy_at_first_is_asked_again(run: Run, serve: Serve) -> None:
    busy = [failing("busy", status) for status in (503, 429)]
    code, data, err = run("eval", "own.py", "--api_url", serve(*busy, solve).url, "--api_model", "a", "--json")
    assert code == 0 and data["table"]["a"]["train"] is not None, err


def test_a_server_that_always_fails_is_one_line(run: Run, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve(failing("broken", 500)).url
    monkeypatch.setattr(evaluate, "API_TRIES", 1)
    given = ("--api_url", url, "--api_model", "a", "--retries", 0, "--quiet")
    code, _, err = run("eval", "own.py", *given)
    assert code == 1 and err.count("\n") == 1
    assert "every attempt of the evaluation failed, 4 of 4 for this reason: status 500: broken" in err


@pytest.mark.parametrize(("status", "text"), [(401, "wrong key"), (403, "not yours"), (404, "no such model")])
def test_a_refusal_that_is_final_is_not_repeated_and_one_line(run: Run, serve: Serve, status: int, text: str) -> None:
    def refuse_one(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        return solve(handler, body) if body["model"] == "good" else reply(handler, text, status)

    server = serve(refuse_one)
    code, _, err = run("eval", "own.py", "--api_url", server.url, "--api_model", "bad", "--quiet")
    assert (code, len(server.bodies), err.count("\n")) == (1, 4, 1)  # a request for each task
    assert f"every attempt of the evaluation failed, 4 of 4 for this reason: status {status}: {text}" in err
    code, data, err = run("eval", "own.py", "--api_url", server.url, "--api_model", "good,bad", "--json")
    assert code == 0 and f"bad on train: 4 of 4 failed, 4 of them: status {status}: {text}" in err
    assert data["table"]["good"]["train"]["n"] == 4 and data["table"]["bad"]["train"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--api_url", "http://x/v1"), "give api_url and api_model, or neither"),
        (("--api_model", "a"), "give api_url and api_model, or neither"),
        (("--api_url", "x.org", "--api_model", "a"), "such as https://api.openai.com/v1"),
        (("--api_url", "http://x", "--api_model", "a,a"), "give different names"),
        (("--api_url", "http://x", "--api_model", "a,b", "--api_prices", "1,2"), "give two prices"),
        (("--api_url", "http://x", "--api_model", "a", "--labels", "a"), "as ROW=NAME"),
        (("--api_url", "http://x", "--api_model", "a", "--labels", "b=c"), "--labels: got 'b'; choose from a"),
        (("--api_url", "http://x", "--api_model", "a,b", "--labels", "b=a"), "the rows a, a; give each"),
        (("--api_url", "http://x", "--api_model", "a", "--decode.method", "step"), "give --model"),
        (("--model", "http://ann:secret@x/v1"), "eval --api_url URL --api_model NAME"),
        (
            ("--api_url", "http://x", "--api_model", "a", "--context_policy.name", "window"),
            "context_policy: got window",
        ),
        (("--api_url", "http://x", "--api_model", "a", "--splits", "none"), "none in the split 'none'"),
    ],
)
def test_a_wrong_setting_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    critic = ("--decode.critic", "c") if "--decode.method" in arguments else ()
    code, _, err = run("eval", "own.py", *arguments, *critic, "--quiet")
    assert code == 2 and message in err and err.count("\n") == 1 and "secret" not in err


def test_a_trainer_evaluates_a_model_behind_an_api(serve: Serve) -> None:
    trainer = agent_r1.Trainer(ENV, TASKS)
    table = trainer.evaluate(api_url=serve(solve).url, api_model=["a"])
    assert list(table.cells) == ["a"] and table.usage["a"].answers == 8
    cell = table.cells["a"]["train"]
    assert cell is not None and cell.em == 1.0
    with pytest.raises(InvalidInput, match="give api_url and api_model"):
        trainer.evaluate(api_model=["a"])


def test_a_model_behind_the_gateway_has_the_attempts_of_the_model_itself() -> None:
    """The greedy attempts at the same tasks have equal messages, except the ids of calls."""
    taskset = build("tinywiki", None, None, 0)
    config = EvalConfig(model="tiny-base", max_tokens=64, context=512, concurrency=8)
    policy = load_policy(config, taskset)
    engine = Placement().engine(policy, config)

    def conversation(trajectory: Trajectory) -> list[tuple[object, ...]]:
        return [
            (one.role, one.text, [(call.name, call.arguments, call.error is None) for call in one.calls])
            for one in trajectory.messages
        ]

    async def compare() -> list[list[Trajectory]]:
        local, gateway = policy.agent(engine, config, 0.0), Gateway()
        await gateway.start()
        key = gateway.register(ServedModel(local, "tiny-base"))
        behind = ApiAgent(ChatApi(gateway.base_url, key), "tiny-base", SamplingParams(max_tokens=64), 512)
        rows = [Method(BASE, local, taskset.env), Method("api", behind, taskset.env)]
        try:
            return [await greedy_attempts(row, taskset, "style-a", 30, RolloutLimits(8)) for row in rows]
        finally:
            await gateway.close()
            await engine.close()

    own, api = asyncio.run(compare())
    assert list(map(conversation, own)) == list(map(conversation, api))
    assert [one.rewards for one in own] == [one.rewards for one in api]
    assert [one.status for one in own] == [one.status for one in api]
    assert max(len(one.turns) for one in own) > 2 and any(final_answer(one) for one in own)
