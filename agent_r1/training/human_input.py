"""Read lines that a person types, and convert each line to an assistant message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.core.messages import Message, Text, ToolCall
from agent_r1.core.tool import ToolSpec

HELP = """\
NAME text            call a tool that needs one argument, as in: search Alba
/NAME {"key": ..}    call a tool with its arguments as JSON
?                    show this again; Ctrl-D leaves
Anything else is sent as it is, tags included. A line that ends with \\ continues on the next one."""


def format_signature(tool: ToolSpec) -> str:
    """Return a tool's name, arguments and first line of description, in one line.

    Example:
        "search(query: string)  Find a page."
    """
    required = set(tool.parameters.get("required", ()))
    properties: Mapping[str, Mapping[str, Any]] = tool.parameters.get("properties", {})
    arguments = [
        f"{name}{'' if name in required else '?'}: {schema.get('type', 'any')}" for name, schema in properties.items()
    ]
    description = tool.description.splitlines()[0] if tool.description else ""
    return f"{tool.name}({', '.join(arguments)})  {description}".rstrip()


def parse_line(line: str, tools: Sequence[ToolSpec]) -> Message:
    """Return the assistant message for a line that a person typed.

    - "/NAME ARGUMENTS" is a call, even if no tool has this name. ARGUMENTS must be a JSON object.
    - "NAME ARGUMENTS" is a call if a tool has this name. If ARGUMENTS starts with "{", ARGUMENTS must be a JSON object.
      Otherwise, ARGUMENTS is the value of one argument.
    - Any other line is text.

    If a required JSON object is not valid, no error is raised. The text of the returned message then contains a
    malformed call, and the environment answers this message with an explanation.

    Example:
        parse_line('search Alba', tools) == parse_line('/search {"query": "Alba"}', tools)
    """
    name, _, rest = line.strip().partition(" ")
    if name.startswith("/") and len(name) > 1:
        return _call_with_json(name[1:], rest.strip() or "{}")
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        return Message.assistant(line)
    if rest.lstrip().startswith("{"):
        return _call_with_json(name, rest)
    return _call(name, _single_argument(tool, rest.strip()))


def _single_argument(tool: ToolSpec, text: str) -> Mapping[str, Any]:
    """Return the arguments of a tool call with one value, which a person typed as ``text``.

    - The value is for the only required parameter. If the tool has no or several required parameters, the value is for
      the first parameter.
    - For a parameter of type string, the value is ``text``. For other types, ``text`` is parsed as JSON if possible.
    - If ``text`` is empty, the result is {}.
    - If the tool has no parameters, the result is {"": text}. The tool then refuses the call.

    Example:
        {"query": "Alba"} for a tool with the parameter ``query`` and the text "Alba"
    """
    required = tool.parameters.get("required", ())
    names = required if len(required) == 1 else list(tool.parameters.get("properties", {}))[:1]
    if not text or not names:
        return {"": text} if text else {}
    if tool.parameters["properties"][names[0]].get("type") == "string":
        return {names[0]: text}
    try:
        return {names[0]: json.loads(text)}
    except ValueError:
        return {names[0]: text}


def _call_with_json(name: str, arguments: str) -> Message:
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        return _call(name, parsed)
    return Message.assistant(f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>')


def _call(name: str, arguments: Mapping[str, Any]) -> Message:
    return Message("assistant", (Text(""),), (ToolCall("call_0", name, arguments, ""),))
