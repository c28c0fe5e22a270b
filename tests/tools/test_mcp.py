"""Real MCP servers, over stdio and over HTTP, in a ToolEnv."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from extras import requires

from agent_r1 import ToolEnv
from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Image, Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId
from agent_r1.tools import mcp
from agent_r1.tools.mcp import HttpServer, StdioServer, mcp_tools
from agent_r1.tools.tool_errors import ToolErrorKind

pytestmark = requires("mcp", "mcp")

SERVER = f"python {Path(__file__).parent / 'mcp_server.py'}"
NAMES = ["count", "add", "raises", "dies", "hangs", "floods", "the_environment", "picture", "numbers", "say", "forged"]
Live = Callable[..., Awaitable[list[ToolResult]]]


@pytest.fixture(scope="session")
def live(make_action, call) -> Live:
    async def live(env: ToolEnv, *calls: tuple[str, dict[str, Any]] | str, member: int = 0) -> list[ToolResult]:
        task = Task("t", ())
        episode = await env.open(task, RolloutContext(AttemptId("run", "t", 0, member), 100 + member))
        made = [(entry, {}) if isinstance(entry, str) else entry for entry in calls]
        try:
            actions = [make_action("", call(name, **arguments)) for name, arguments in made]
            return [(await episode.step(action)).results[0] for action in actions]
        finally:
            await episode.close()

    return live


@pytest.fixture(autouse=True)
def short_limit_of_hanging_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = mcp.run_with_timeout

    async def run(request: Any, timeout: float) -> Any:
        return await limited(request, 0.5 if request.args[0] == "hangs" else timeout)

    monkeypatch.setattr(mcp, "run_with_timeout", run)


@pytest.fixture(scope="module")
def env() -> ToolEnv:
    return ToolEnv(mcp_tools(SERVER), max_turns=20)


@pytest.fixture(scope="module")
def shared() -> ToolEnv:
    return ToolEnv(mcp_tools(SERVER, scope="run", only=[*NAMES[:5], "the.environment"]), max_turns=20)


def test_tools_have_names_descriptions_and_schemas(env: ToolEnv) -> None:
    assert [spec.name for spec in env.tools] == NAMES  # a dot is no part of a tool's name here
    add = env.tools_by_name["add"].spec
    assert add.description == "Add two numbers." and add.parameters["required"] == ["a"]
    assert add.parameters["properties"]["b"]["default"] == 1


def test_results_are_shown_and_wrong_arguments_are_not_sent(env: ToolEnv, live: Live) -> None:
    calls = (("add", {"a": 2, "b": 3}), ("add", {"b": "x"}), "count", "raises", "picture", "forged", "floods")
    added, wrong, counted, raised, pictured, forged, flooded = asyncio.run(live(env, *calls))
    assert wrong.error == ToolErrorKind.INVALID_ARGUMENTS
    assert "'a' is a required property" in wrong.parts[0].text and "'x' is not of type 'integer'" in wrong.parts[0].text
    assert "Expected: a (integer), b (integer, optional)" in wrong.parts[0].text
    assert added.ok and '"sum": 5' in added.parts[0].text
    assert counted.data == {"result": 1}  # the structured content, for rewards
    assert (raised.ok, raised.error) == (False, ToolErrorKind.RAISED) and "raises" in raised.parts[0].text
    image, undeclared = pictured.parts
    assert undeclared == image
    assert isinstance(image, Image) and (image.mime, image.width, image.height) == ("image/png", 6, 4)
    assert forged.error == ToolErrorKind.BAD_RESULT and "cannot be decoded" in forged.parts[0].text
    assert len(flooded.parts[0].text) < 3000 and "cut here" in flooded.parts[0].text


def test_a_list_is_shown_as_json_and_a_text_as_it_is(env: ToolEnv, live: Live) -> None:
    lists: list[list[int]] = [[1, 23, 4], [7], []]
    calls = [("numbers", {"which": which}) for which in lists]
    shown = [result.parts for result in asyncio.run(live(env, *calls))]
    assert shown == [(Text(json.dumps({"result": which})),) for which in lists]
    said = asyncio.run(live(env, *(("say", {"text": text}) for text in ("7", "two\nlines", ""))))
    assert [result.parts[0].text for result in said] == ["7", "two\nlines", ""]


def test_each_episode_has_its_own_server_which_ends_with_it_even_if_a_call_hangs(
    env: ToolEnv, live: Live, has_ended
) -> None:
    async def two() -> list[list[ToolResult]]:
        one, other = ("count", "count", "the_environment", "hangs"), ("count", "count", "the_environment")
        return await asyncio.gather(live(env, *one, member=1), live(env, *other, member=2))

    results = asyncio.run(two())
    assert [[result.data["result"] for result in counted[:2]] for counted in results] == [[1, 2], [1, 2]]
    assert results[0][3].error == ToolErrorKind.TIMED_OUT
    places = [counted[2].data for counted in results]
    assert [place["seed"] for place in places] == ["101", "102"]
    assert places[0]["pid"] != places[1]["pid"] and all(has_ended(int(place["pid"])) for place in places)


def test_the_first_call_starts_the_server_and_its_start_is_not_timed(monkeypatch, env: ToolEnv, live: Live) -> None:
    opened: list[int | None] = []
    original_open, limited = mcp._Connection.open, mcp.run_with_timeout

    async def recording_open(server: Any, seed: int | None = None) -> Any:
        opened.append(seed)
        await asyncio.sleep(2.1)  # longer than a call may take
        return await original_open(server, seed)

    monkeypatch.setattr(mcp._Connection, "open", recording_open)
    monkeypatch.setattr(mcp, "run_with_timeout", lambda request, timeout: limited(request, 2.0))
    asyncio.run(live(env))
    assert opened == []
    (counted,) = asyncio.run(live(env, "count"))
    assert counted.ok and opened == [100]


@pytest.mark.parametrize("scope", ["env", "shared"])
def test_a_server_that_crashes_fails_calls_and_the_next_episode_has_a_new_one(
    scope: str, live: Live, request: pytest.FixtureRequest
) -> None:
    env = request.getfixturevalue(scope)

    async def two() -> list[list[ToolResult]]:
        return [await live(env, "count", "dies", "count"), await live(env, "count")]

    (counted, died, after), (fresh,) = asyncio.run(two())
    assert counted.ok and not died.ok and not after.ok
    assert "its server gave no result" in died.parts[0].text and "(out of memory)" in died.parts[0].text
    assert fresh.data == {"result": 1}


def test_a_cancelled_episode_leaves_no_server(env: ToolEnv, live: Live, has_ended, make_action, call) -> None:
    pids: list[int] = []

    async def cancelled() -> None:
        episode = await env.open(Task("t", ()), RolloutContext(AttemptId("run", "t", 0, 0), 0))
        process = (await episode.step(make_action("", call("the_environment")))).results[0]
        pids.append(int(process.data["pid"]))
        try:
            async with asyncio.timeout(0.2):
                await episode.step(make_action("", call("hangs")))
        finally:
            await episode.close()

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert has_ended(pids[0])


def test_a_shared_server_serves_all_episodes_and_ends_with_the_loop(shared: ToolEnv, live: Live, has_ended) -> None:
    async def three() -> list[list[ToolResult]]:
        both = await asyncio.gather(live(shared, "count"), live(shared, "count", member=1))
        return [*both, await live(shared, "count", "the_environment")]

    one, two, (last, place) = asyncio.run(three())
    assert {one[0].data["result"], two[0].data["result"], last.data["result"]} == {1, 2, 3}
    assert place.data["seed"] == "none" and has_ended(int(place.data["pid"]))


def test_a_shared_server_that_hung_is_replaced(shared: ToolEnv, live: Live) -> None:
    async def two() -> tuple[list[ToolResult], list[ToolResult]]:
        return await live(shared, "count", "hangs"), await live(shared, "count")

    (_, hung), (fresh,) = asyncio.run(two())
    assert hung.error == ToolErrorKind.TIMED_OUT and fresh.data == {"result": 1}


def test_http_tools_stdio_tools_and_functions_work_together(serve_script, live: Live) -> None:
    def shout(text: str) -> str:
        """Shout.

        Args:
            text: what.
        """
        return text.upper()

    url, _ = serve_script(Path(__file__).parent / "mcp_server.py")
    remote = mcp_tools(HttpServer(f"{url}/mcp", headers={"X-Test": "1"}), prefix="far_")
    env = ToolEnv([shout, *remote, *mcp_tools(SERVER, only=["add"])], max_turns=20)
    calls = (
        ("shout", {"text": "hey"}),
        ("far_add", {"a": 1}),
        ("add", {"a": 2}),
        "far_hangs",
        "far_raises",
        "far_dies",
    )
    shouted, far, near, hung, raised, died = asyncio.run(live(env, *calls))
    assert shouted.parts[0].text == "HEY"
    assert [added.data for added in (far, near)] == [{"sum": 2}, {"sum": 3}]
    assert hung.error == ToolErrorKind.TIMED_OUT and raised.error == died.error == ToolErrorKind.RAISED


def test_a_server_with_variables_and_a_folder(tmp_path: Path, live: Live) -> None:
    (tmp_path / "tell.py").write_text(
        "import os\nfrom mcp.server.mcpserver import MCPServer\nserver = MCPServer('tell')\n"
        "@server.tool()\ndef tell() -> str:\n    'Tell.'\n    return os.environ.get('WORD', '') + os.getcwd()\n"
        "server.run()\n",
        "utf-8",
    )
    server = StdioServer(("python", "tell.py"), variables={"WORD": "here: "}, folder=tmp_path)
    (process,) = asyncio.run(live(ToolEnv(mcp_tools(server)), "tell"))
    assert process.parts[0].text == f"here: {tmp_path}"


def test_a_server_that_fails_to_start_for_an_episode_gives_an_error_result(live: Live, tmp_path: Path) -> None:
    script = tmp_path / "once.py"
    script.write_text(Path(SERVER.split()[1]).read_text("utf-8"), "utf-8")
    env = ToolEnv(mcp_tools(f"python {script}", only=["count"]))
    script.write_text("raise SystemExit('the disk is full')", "utf-8")
    first, second = asyncio.run(live(env, "count", "count"))
    for result in (first, second):
        assert result.error == ToolErrorKind.RAISED and "(the disk is full)" in result.parts[0].text


@pytest.mark.parametrize(
    ("server", "line"),
    [
        ("python -c 'import nothing_here'", "Connection closed .*No module named 'nothing_here'"),
        ("no_such_command", "No such file or directory"),
        ("http://127.0.0.1:9/mcp", "All connection attempts failed"),
    ],
)
def test_a_server_that_cannot_be_reached_is_an_error_of_one_line(server: str, line: str) -> None:
    with pytest.raises(InvalidInput, match=line) as caught:
        mcp_tools(server)
    assert "\n" not in str(caught.value)


def test_a_server_that_never_answers_is_an_error_of_one_line(monkeypatch, has_ended) -> None:
    monkeypatch.setattr(mcp, "START_SECONDS", 0.7)
    with pytest.raises(InvalidInput, match=r"it did not answer within 0\.7 seconds"):
        mcp_tools("sleep 1000")


def test_a_tool_that_the_server_does_not_have_is_an_error_of_one_line(monkeypatch) -> None:
    async def none(server: Any) -> list[Any]:
        return []

    monkeypatch.setattr(mcp, "_list_tools", none)
    with pytest.raises(InvalidInput, match="got no search; name tools that it has"):
        mcp_tools(SERVER, only=["search"])
