"""Model RolloutContext Protocol (https://modelcontextprotocol.io): the tools of a server, by the official SDK.

env = ToolEnv(tools=[*mcp_tools("python server.py"), my_own_tool], rewards=[exact_match])
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal
from weakref import WeakKeyDictionary

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import ContentPart, Media, Text
from agent_r1.core.packages import import_extra
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult, ToolSpec
from agent_r1.tools.execution import DEFAULT_TIMEOUT, run_with_timeout
from agent_r1.tools.function_tool import Tool, to_tool_result
from agent_r1.tools.resources import Opener, Resources
from agent_r1.tools.schema import InvalidArguments, describe_parameters
from agent_r1.tools.tool_errors import ToolErrorKind, error_result

Scope = Literal["episode", "run"]

START_SECONDS = 30.0
"""What starting a server, or connecting to one, may take."""

OPEN_SECONDS = 60.0
"""What a call may wait for its connection, over the time that it has itself: others may have to open first."""

SEED_VARIABLE = "AGENT_R1_SEED"
"""Tells a server that was started for an episode the episode's seed."""

_FAULTS_TOLD = 5
_PAGES = 100


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A command that serves over its standard input and output.

    ``python`` as its first word is the interpreter that runs this. The server inherits the few variables that the
    SDK holds safe (PATH, HOME ..) and is given ``variables``.

    Example:
        StdioServer(("python", "server.py", "--small"), folder=Path("tools"))
    """

    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def __str__(self) -> str:
        return shlex.join(self.command)

    def transport(self, seed: int | None, log: IO[str]) -> Any:
        stdio = import_extra("mcp.client.stdio", extra="mcp")
        first, *arguments = self.command
        parameters = stdio.StdioServerParameters(
            command=sys.executable if first == "python" else first,
            args=arguments,
            env=dict(self.variables) | ({} if seed is None else {SEED_VARIABLE: str(seed)}),
            cwd=self.folder,
        )
        return stdio.stdio_client(parameters, errlog=log)


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server behind a URL, which speaks Streamable HTTP.

    Example:
        HttpServer("http://127.0.0.1:8000/mcp", headers={"Authorization": "Bearer .."})
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.url

    def transport(self, seed: int | None, log: IO[str]) -> Any:
        http = import_extra("mcp.client.streamable_http", extra="mcp")
        client = import_extra("mcp.shared._httpx_utils", extra="mcp").create_mcp_http_client(headers=dict(self.headers))
        return http.streamable_http_client(self.url, http_client=client)


Server = StdioServer | HttpServer


def mcp_tools(
    server: str | Server,
    *,
    scope: Scope = "episode",
    timeout: float = DEFAULT_TIMEOUT,
    only: Sequence[str] = (),
    prefix: str = "",
) -> list[Tool]:
    """The tools of an MCP server, for a ToolEnv.

    The server is asked once, now, what tools it has. Then every episode that calls one of them gets a connection of
    its own, from its first call to its end: with a command a server process, so that what one attempt does there no
    other sees; behind a URL a session, and what sessions share is up to the server. A server that dies or hangs
    costs calls of its episode, which are told to the policy, and nothing else.

    Args:
        server: a command, a URL, or one of them with more said (:class:`StdioServer`, :class:`HttpServer`).
        scope: ``run`` shares one connection between all episodes, for servers that keep no state; after a call that
            was not answered in time, and after its end, the next episode gets a new one.
        timeout: seconds a call may take, once there is a connection.
        only: names of the tools to take; all where not given.
        prefix: stands before each name, to tell apart the tools of two servers.

    Raises:
        InvalidInput: the SDK is not installed, the server cannot be reached, or has no such tool.
    """
    if isinstance(server, str):
        server = HttpServer(server) if re.match("https?://", server) else StdioServer(tuple(shlex.split(server)))
    opener: Opener[Lease] = PerEpisode(server) if scope == "episode" else Shared(server)
    with ThreadPoolExecutor(1) as thread:  # a thread, because this may be called where a loop runs
        listed = thread.submit(asyncio.run, _listed(server)).result()
    missing = sorted(set(only) - {tool.name for tool in listed})
    if missing:
        raise InvalidInput(f"tools of {server}", got=f"no {', '.join(missing)}", do="name tools that it has")
    return [_tool(tool, opener, timeout, prefix) for tool in listed if not only or tool.name in only]


def _tool(listed: Any, opener: Opener[Lease], timeout: float, prefix: str) -> Tool:
    name = re.sub(r"[^A-Za-z0-9_-]", "_", prefix + listed.name)[:64]
    spec = ToolSpec(name, listed.description or listed.title or listed.name, listed.input_schema)

    async def call(arguments: Mapping[str, Any], resources: Resources) -> ToolResult:
        lease = await resources.get(opener)
        return to_tool_result(name, await run_with_timeout(partial(lease.session.call, listed.name, arguments), timeout))

    return Tool(spec, call, SchemaSignature(listed.input_schema), OPEN_SECONDS + timeout)


@dataclass(frozen=True, slots=True)
class SchemaSignature:
    """What a tool takes of which only the JSON schema is known."""

    schema: Mapping[str, Any]

    def bind(
        self, arguments: Mapping[str, Any], task: Task, context: RolloutContext, resources: Resources
    ) -> dict[str, Any] | InvalidArguments:
        """The arguments as they are, where the schema allows them, and the resources to send them by."""
        validator = import_extra("jsonschema", extra="mcp").Draft202012Validator(self.schema)
        faults = [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(dict(arguments))]
        if not faults:
            return {"arguments": arguments, "resources": resources}
        return InvalidArguments(f"{'; '.join(faults[:_FAULTS_TOLD])}. Expected: {describe_parameters(self.schema)}")


class Session:
    """A connection to a server. A task of its own holds it, because the SDK wants it closed by who opened it.

    ``sound`` is False after a call that did not come to its end: what the server does now, nobody knows.
    """

    def __init__(self, server: Server, seed: int | None) -> None:
        self.sound = True
        self._server = server
        self._log: IO[str] | None = None
        self._stop = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(seed))

    @classmethod
    async def open(cls, server: Server, seed: int | None = None) -> Session:
        """Raises ConnectionError where the server cannot be reached."""
        session = cls(server, seed)
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(session._client)
        except TimeoutError as error:
            why = session._told(f"it did not answer within {START_SECONDS:g} seconds")
            await session.close()
            raise ConnectionError(f"no connection to {server}: {why}") from error
        except BaseException:
            await session.close()
            raise
        return session

    async def _hold(self, seed: int | None) -> None:
        """Opens the connection and keeps it until asked to stop. Whoever waits for it learns how that went."""
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            self._log = log
            try:
                async with import_extra("mcp", extra="mcp").Client(self._server.transport(seed, log)) as client:
                    self._client.set_result(client)
                    await self._stop.wait()
            except Exception as error:
                self.sound = False
                if not self._client.done():
                    why = self._told(_in_words(error))
                    self._client.set_exception(ConnectionError(f"no connection to {self._server}: {why}"))

    async def tools(self) -> list[Any]:
        """What the server lists."""
        client, listed, cursor = await self._client, [], None
        for _ in range(_PAGES):
            page = await client.list_tools(cursor=cursor)
            listed += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return listed

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """What the server says, and where it says nothing, why."""
        client = await self._client
        try:
            return result_of(await client.call_tool(name, dict(arguments)))
        except asyncio.CancelledError:
            self.sound = False
            raise
        except Exception as error:
            self.sound = False
            return error_result(ToolErrorKind.RAISED, f"{name} failed, its server gave no result: {self._told(_in_words(error))}")

    async def close(self) -> None:
        self._stop.set()
        if not self._client.done():
            self._holder.cancel()
        await asyncio.wait([self._holder])

    def _told(self, why: str) -> str:
        """Why, with what the server wrote last to its standard error."""
        assert self._log is not None
        self._log.seek(0)
        written = self._log.read().strip().splitlines()
        return f"{why} ({written[-1][:200]})" if written else why


def _in_words(error: BaseException) -> str:
    """The first error in a group of groups, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(slots=True)
class Lease:
    """What an episode holds: a session, and what to do with it at the end."""

    session: Session
    give_back: Callable[[Session], Any]

    async def close(self) -> None:
        await self.give_back(self.session)


@dataclass(frozen=True, slots=True, eq=False)
class PerEpisode:
    """Opens a session for each episode."""

    server: Server

    async def open(self, task: Task, context: RolloutContext) -> Lease:
        return Lease(await Session.open(self.server, context.seed), Session.close)


@dataclass(slots=True)
class _Current:
    """The session that the episodes of one event loop share, and how many use each that is open."""

    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: Session | None = None
    users: dict[Session, int] = field(default_factory=dict)


class Shared:
    """Gives all episodes one session, as long as it is sound. The end of the event loop closes it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Current] = WeakKeyDictionary()

    async def open(self, task: Task, context: RolloutContext) -> Lease:
        current = self._current()
        async with current.opening:
            if current.session is None or not current.session.sound:
                current.session = await Session.open(self._server)
            current.users[current.session] = current.users.get(current.session, 0) + 1
            return Lease(current.session, self._give_back)

    async def _give_back(self, session: Session) -> None:
        current = self._current()
        current.users[session] -= 1
        if not session.sound and current.users[session] == 0:
            del current.users[session]
            await session.close()

    def _current(self) -> _Current:
        return self._of_loop.setdefault(asyncio.get_running_loop(), _Current())


async def _listed(server: Server) -> list[Any]:
    """The server's tools, by a connection for that alone."""
    try:
        session = await Session.open(server)
    except ConnectionError as error:
        raise InvalidInput("MCP server", got=str(error), do="start it by hand to see what is wrong") from error
    try:
        async with asyncio.timeout(START_SECONDS):
            return await session.tools()
    except Exception as error:
        got = f"{server}, which does not list its tools ({_in_words(error)})"
        raise InvalidInput("MCP server", got=got, do="give a server that has tools") from error
    finally:
        await session.close()


def result_of(called: Any) -> ToolResult:
    """An SDK result as ours. The structured content is data for rewards; the policy sees it where there is no other."""
    parts = tuple(part for block in called.content for part in _parts(block))
    if not parts and called.structured_content is not None:
        parts = (Text(json.dumps(called.structured_content, ensure_ascii=False)),)
    error = ToolErrorKind.RAISED if called.is_error else None
    return ToolResult(parts, ok=not called.is_error, error=error, data=called.structured_content)


def _parts(block: Any) -> tuple[ContentPart, ...]:
    """Text as it is; media by reference, with a line of text for policies that only read."""
    match block.type:
        case "text":
            return (Text(block.text),)
        case "image" | "audio":
            content = base64.b64decode(block.data)
            told = Text(f"[{block.type}: {block.mime_type}, {len(content)} bytes]")
            return (told, Media(hashlib.sha256(content).hexdigest(), block.mime_type))
        case "resource" if isinstance(block.resource, import_extra("mcp_types", extra="mcp").TextResourceContents):
            return (Text(block.resource.text),)
        case "resource":
            return (Text(f"[resource: {block.resource.uri}]"),)
        case _:
            return (Text(f"[resource: {block.uri}]"),)
