"""Tools of MCP servers (Model Context Protocol, https://modelcontextprotocol.io), through the official SDK.

env = ToolEnv(tools=[*mcp_tools("python server.py"), my_own_tool], rewards=[exact_match])
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal
from weakref import WeakKeyDictionary

from agent_r1.core.arguments import describe_parameters
from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput, import_extra
from agent_r1.core.images import decode_base64
from agent_r1.core.messages import ContentPart, Image, Text, ToolResult, ToolSpec
from agent_r1.core.redaction import REDACTED, redact, redact_command, redact_url
from agent_r1.core.task import Task
from agent_r1.tools.execution import DEFAULT_TIMEOUT, run_with_timeout
from agent_r1.tools.function_tool import MAX_SHOWN_ERRORS, InvalidArguments, Opener, Resources, Tool, to_tool_result
from agent_r1.tools.tool_errors import ToolErrorKind, error_result

__all__ = ["HttpServer", "StdioServer", "mcp_tools"]

START_SECONDS = 30.0
"""The time limit for starting or connecting to a server."""

OPEN_SECONDS = 60.0
"""The time that a call can wait for its connection. The time limit of the call begins after the wait."""

SEED_VARIABLE = "AGENT_R1_SEED"
"""The environment variable that gives the seed of an episode to a server process started for this episode."""

_MAX_PAGES = 100

_MIN_SECRET = 6
"""The minimum length of a credential that is removed from messages. Values such as "1" or "true" are kept."""


@dataclass(frozen=True, slots=True)
class StdioServer:
    """An MCP server that is started as a command and communicates over its standard input and output."""

    # the words of the command. ``python`` as the first word is replaced by the running interpreter
    command: tuple[str, ...]
    # environment variables, in addition to the variables that the SDK passes on (PATH, HOME ..)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)  # the values can be credentials
    folder: Path | None = None  # the working directory; None for the current directory

    def __str__(self) -> str:
        return redact_command(self.command)

    @property
    def secrets(self) -> Collection[str]:
        return self.variables.values()

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
    """An MCP server at a URL, with the transport "Streamable HTTP"."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # the values can be credentials

    def __str__(self) -> str:
        return redact_url(self.url)

    @property
    def secrets(self) -> Collection[str]:
        return self.headers.values()

    def transport(self, seed: int | None, log: IO[str]) -> Any:
        http = import_extra("mcp.client.streamable_http", extra="mcp")
        client = import_extra("mcp.shared._httpx_utils", extra="mcp").create_mcp_http_client(headers=dict(self.headers))
        return http.streamable_http_client(self.url, http_client=client)


McpServer = StdioServer | HttpServer


def redact_secrets(text: str, server: McpServer) -> str:
    """Return the text without the variables or headers of ``server``, and without credentials in addresses."""
    words = {word for value in server.secrets for word in (value, *value.split()) if len(word) >= _MIN_SECRET}
    for word in sorted(words, key=len, reverse=True):  # a credential can contain another one
        text = text.replace(word, REDACTED)
    return redact(text)


def mcp_tools(
    server: str | McpServer,
    *,
    scope: Literal["episode", "run"] = "episode",
    timeout: float = DEFAULT_TIMEOUT,
    only: Sequence[str] = (),
    prefix: str = "",
) -> list[Tool]:
    """Return the tools of an MCP server, for a ToolEnv. The server is asked for its tools once.

    If ``server`` is a command, each connection has its own server process. If ``server`` is a URL, each connection is a
    session, and the server decides which state the sessions share. If a connection fails, only the calls of the episode
    with this connection fail, with an explanation. Raise InvalidInput if the server cannot be reached, or if a tool in
    ``only`` does not exist.
    """
    if isinstance(server, str):
        server = HttpServer(server) if re.match("https?://", server) else StdioServer(tuple(shlex.split(server)))
    opener: Opener[_Lease] = _PerEpisode(server) if scope == "episode" else _Shared(server)
    with ThreadPoolExecutor(1) as thread:  # in a thread, because the caller can be inside an event loop
        descriptions = thread.submit(asyncio.run, _list_tools(server)).result()
    missing = sorted(set(only) - {tool.name for tool in descriptions})
    if missing:
        raise InvalidInput(f"tools of {server}", got=f"no {', '.join(missing)}", do="name tools that it has")
    return [_make_tool(tool, opener, timeout, prefix) for tool in descriptions if not only or tool.name in only]


def _make_tool(description: Any, opener: Opener[_Lease], timeout: float, prefix: str) -> Tool:
    name = re.sub(r"[^A-Za-z0-9_-]", "_", prefix + description.name)[:64]
    text = description.description or description.title or description.name
    schema: Mapping[str, Any] = description.input_schema

    async def call(arguments: Mapping[str, Any], resources: Resources) -> ToolResult:
        lease = await resources.get(opener)
        request = partial(lease.connection.call, description.name, arguments)
        return await to_tool_result(name, await run_with_timeout(request, timeout))

    def bind(
        arguments: Mapping[str, Any], task: Task, context: RolloutContext, resources: Resources
    ) -> dict[str, Any] | InvalidArguments:
        validator = import_extra("jsonschema", extra="mcp").Draft202012Validator(schema)
        errors = [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(dict(arguments))]
        if not errors:
            return {"arguments": arguments, "resources": resources}
        return InvalidArguments(f"{'; '.join(errors[:MAX_SHOWN_ERRORS])}. Expected: {describe_parameters(schema)}")

    return Tool(ToolSpec(name, text, schema), call, bind, OPEN_SECONDS + timeout)


class _Connection:
    def __init__(self, server: McpServer, seed: int | None) -> None:
        self.usable = True
        self._server = server
        self._log: IO[str] | None = None
        self._stop = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(seed))

    @classmethod
    async def open(cls, server: McpServer, seed: int | None = None) -> _Connection:
        connection = cls(server, seed)
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(connection._client)
        except TimeoutError as error:
            why = connection._add_log(f"it did not answer within {START_SECONDS:g} seconds")
            await connection.close()
            raise ConnectionError(f"no connection to {server}: {why}") from error
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _hold(self, seed: int | None) -> None:
        # The SDK needs one task to open and close a client, but the calls of an episode come from many tasks.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            self._log = log
            try:
                async with import_extra("mcp", extra="mcp").Client(self._server.transport(seed, log)) as client:
                    self._client.set_result(client)
                    await self._stop.wait()
            except Exception as error:
                self.usable = False
                if not self._client.done():
                    why = self._add_log(_describe(error))
                    self._client.set_exception(ConnectionError(f"no connection to {self._server}: {why}"))

    async def list_tools(self) -> list[Any]:
        client, descriptions, cursor = await self._client, [], None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            descriptions += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return descriptions

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        client = await self._client
        try:
            return _convert_result(await client.call_tool(name, dict(arguments)))
        except asyncio.CancelledError:
            self.usable = False
            raise
        except Exception as error:
            self.usable = False
            text = f"{name} failed, its server gave no result: {self._add_log(_describe(error))}"
            return error_result(ToolErrorKind.RAISED, text)

    async def close(self) -> None:
        self._stop.set()
        if not self._client.done():
            self._holder.cancel()
        await asyncio.wait([self._holder])

    def _add_log(self, reason: str) -> str:
        assert self._log is not None
        self._log.seek(0)
        lines = [line.strip() for line in self._log if re.search(r"\w\w", line)]  # not the frame of a traceback
        return redact_secrets(f"{reason} ({lines[-1][:200]})" if lines else reason, self._server)


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(slots=True)
class _Lease:
    """The use of a connection by one episode."""

    connection: _Connection
    release: Callable[[_Connection], Any]

    async def close(self) -> None:
        await self.release(self.connection)


@dataclass(frozen=True, slots=True, eq=False)
class _PerEpisode:
    server: McpServer

    async def open(self, task: Task, context: RolloutContext) -> _Lease:
        return _Lease(await _Connection.open(self.server, context.seed), _Connection.close)


@dataclass(slots=True)
class _SharedState:
    """The shared connections of one event loop, and the number of episodes that use each."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: _Connection | None = None
    num_users: dict[_Connection, int] = field(default_factory=dict)


class _Shared:
    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._states: WeakKeyDictionary[asyncio.AbstractEventLoop, _SharedState] = WeakKeyDictionary()

    async def open(self, task: Task, context: RolloutContext) -> _Lease:
        state = self._state()
        async with state.lock:
            if state.connection is None or not state.connection.usable:
                state.connection = await _Connection.open(self._server)
            state.num_users[state.connection] = state.num_users.get(state.connection, 0) + 1
            return _Lease(state.connection, self._release)

    async def _release(self, connection: _Connection) -> None:
        state = self._state()
        state.num_users[connection] -= 1
        if not connection.usable and state.num_users[connection] == 0:
            del state.num_users[connection]
            await connection.close()

    def _state(self) -> _SharedState:
        return self._states.setdefault(asyncio.get_running_loop(), _SharedState())


async def _list_tools(server: McpServer) -> list[Any]:
    try:
        connection = await _Connection.open(server)
    except ConnectionError as error:
        raise InvalidInput("MCP server", got=str(error), do="start it by hand to see what is wrong") from error
    try:
        async with asyncio.timeout(START_SECONDS):
            return await connection.list_tools()
    except Exception as error:
        got = f"{server}, which does not list its tools ({_describe(error)})"
        raise InvalidInput("MCP server", got=got, do="give a server that has tools") from error
    finally:
        await connection.close()


def _convert_result(result: Any) -> ToolResult:
    try:
        parts = tuple(part for block in result.content for part in _convert_block(block))
    except InvalidInput as refused:
        return error_result(ToolErrorKind.BAD_RESULT, f"the tool failed: {refused}")
    data = result.structured_content
    # The texts of a list do not show where an item ends, and not that one item is a list.
    is_list = len(parts) != 1 or (data is not None and isinstance(data.get("result"), list))
    if data is not None and is_list and all(isinstance(part, Text) for part in parts):
        parts = (Text(json.dumps(data, ensure_ascii=False)),)
    error = ToolErrorKind.RAISED if result.is_error else None
    return ToolResult(parts, ok=not result.is_error, error=error, data=data)


def _convert_block(block: Any) -> tuple[ContentPart, ...]:
    match block.type:
        case "text":
            return (Text(block.text),)
        case "image":
            return (Image.from_bytes(decode_base64(block.data), block.mime_type or None),)
        case "audio":
            return (Text(f"[audio: {block.mime_type}, {len(block.data) * 3 // 4} bytes]"),)
        case "resource" if isinstance(block.resource, import_extra("mcp_types", extra="mcp").TextResourceContents):
            return (Text(block.resource.text),)
        case "resource":
            return (Text(f"[resource: {block.resource.uri}]"),)
        case _:
            return (Text(f"[resource: {block.uri}]"),)
