"""What a person types in place of a policy, as the message that it stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.core.messages import Message, Text, ToolCall
from agent_r1.core.tool import ToolSpec

HELP = """\
NAME text            call a tool that needs one thing, as in: search Alba
/NAME {"key": ..}    call a tool with its arguments as JSON
?                    show this again; Ctrl-D leaves
All else is said as it stands, tags included. A line that ends with \\ goes on in the next one."""


def signature(tool: ToolSpec) -> str:
    """A tool in one line.

    Example:
        "search(query: string)  Find a page."
    """
    needed = set(tool.parameters.get("required", ()))
    properties: Mapping[str, Mapping[str, Any]] = tool.parameters.get("properties", {})
    shown = [f"{name}{'' if name in needed else '?'}: {_kind(schema)}" for name, schema in properties.items()]
    return f"{tool.name}({', '.join(shown)})  {tool.description.splitlines()[0] if tool.description else ''}".rstrip()


def _kind(schema: Mapping[str, Any]) -> str:
    return str(schema.get("type", "any"))


def read(line: str, tools: Sequence[ToolSpec]) -> Message:
    """The message of a typed line.

    What cannot be read as a call is said as a policy would say it that gets the form wrong, so that a person is told
    what a policy is told.

    Example:
        read('search Alba', tools) == read('/search {"query": "Alba"}', tools)
    """
    name, _, rest = line.strip().partition(" ")
    if name.startswith("/") and len(name) > 1:
        return _called(name[1:], rest.strip() or "{}")
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        return Message.assistant(line)
    if rest.lstrip().startswith("{"):
        return _called(name, rest)
    return _call(name, _alone(tool, rest.strip()))


def _alone(tool: ToolSpec, text: str) -> Mapping[str, Any]:
    """The one argument that a tool needs; without one to put it under, the text has no name, as the tool will say."""
    needed = tool.parameters.get("required", ())
    names = needed if len(needed) == 1 else list(tool.parameters.get("properties", {}))[:1]
    if not text or not names:
        return {"": text} if text else {}
    schema = tool.parameters["properties"][names[0]]
    return {names[0]: text if schema.get("type") == "string" else _literal(text)}


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _called(name: str, arguments: str) -> Message:
    try:
        given = json.loads(arguments)
    except ValueError:
        given = None
    if isinstance(given, dict):
        return _call(name, given)
    return Message.assistant(f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>')


def _call(name: str, arguments: Mapping[str, Any]) -> Message:
    return Message("assistant", (Text(""),), (ToolCall("call_0", name, arguments, ""),))
