"""Tool calls as tags and fences in plain text, for models that know no other way (Search-R1, 2503.09516).

<search>mayor of Alba</search>
<information>Alba: mayor Bruno.</information>
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agent_r1.core.messages import Call, Message, ToolSpec
from agent_r1.rollout.config import TagsConfig
from agent_r1.rollout.formats.format import Format, Reading, Tools, Written, arguments_of, broken, read_json

PLAIN_TEMPLATE = """\
{%- for message in messages %}
    {{- message.content }}
    {{- eos_token if loop.last and message.role == 'assistant' and not add_generation_prompt else '\\n\\n' }}
{%- endfor %}"""
"""A conversation as running text, for tokenizers without a template: what is said, apart by empty lines."""

PLAIN_BREAK = "\n\n"
"""What follows an action in :data:`PLAIN_TEMPLATE`, where no token ends it."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands around something.

    Example:
        Marks("<search>", "</search>"), Marks("```python\\n", "\\n```")
    """

    opening: str
    closing: str

    @classmethod
    def of(cls, tag: str) -> Marks:
        """The marks of a tag; one that begins with three backticks is a fence."""
        return cls(f"{tag}\n", "\n```") if tag.startswith("```") else cls(f"<{tag}>", f"</{tag}>")


class Tags(Format):
    """Each tool has a tag: its name, or what ``config.names`` says; ``python`` has a fence. An action ends with its
    first call. The one text that a tool needs stands bare, anything else is a JSON object of arguments.
    """

    name: ClassVar[str] = "tags"
    one_call: ClassVar[bool] = True

    def __init__(self, config: TagsConfig | None = None) -> None:
        self._config = config or TagsConfig()
        self._observation = Marks.of(self._config.observation)

    def read(self, said: str, tools: Tools) -> Reading:
        calls = tuple(self._calls(said, tools))
        first = min(
            (said.find(self.marks(tool).opening) for tool in tools if self.marks(tool).opening in said), default=0
        )
        return Reading(said[:first] if calls else said, calls)

    def marks(self, tool: ToolSpec) -> Marks:
        return Marks.of(self._config.names.get(tool.name, "```python" if tool.name == "python" else tool.name))

    def _calls(self, said: str, tools: Tools) -> Iterator[Written]:
        place = 0
        while True:
            starts = [(said.find(self.marks(tool).opening, place), tool) for tool in tools]
            found = min(((start, tool) for start, tool in starts if start >= 0), key=lambda one: one[0], default=None)
            if found is None:
                return
            start, tool = found
            marks = self.marks(tool)
            inside, closed, _ = said[start + len(marks.opening) :].partition(marks.closing)
            place = start + len(marks.opening + inside + closed)
            if not closed:
                yield broken(inside, place, f"the call is not closed by {marks.closing.strip()}", tool.name)
            else:
                yield _call(tool, inside, place)

    def shaped(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """Plain text under the roles that every template knows; neighbours of one role become one message."""
        by_name = {tool.name: tool for tool in tools}
        shaped: list[dict[str, Any]] = []
        for message in messages:
            role = "user" if message.role == "tool" else message.role
            text = self._text(message, by_name)
            if shaped and shaped[-1]["role"] == role == "user":
                shaped[-1]["content"] += PLAIN_BREAK + text
            else:
                shaped.append({"role": role, "content": text})
        return shaped

    def _text(self, message: Message, by_name: dict[str, ToolSpec]) -> str:
        if message.role == "tool":
            marks = self._observation
            text = message.text.replace(marks.closing, f"{marks.closing[0]} {marks.closing[1:]}")
            return f"{marks.opening}{text}{marks.closing}"
        if any(call.arguments is None for call in message.calls):
            return message.text
        return message.text + "".join(self._written(call, by_name) for call in message.calls)

    def _written(self, call: Call, by_name: dict[str, ToolSpec]) -> str:
        tool = by_name.get(call.name) or ToolSpec(call.name, "", {})
        marks, single = self.marks(tool), _single(tool)
        arguments = dict(call.arguments or {})
        bare = str(arguments[single]) if single is not None and arguments.keys() == {single} else ""
        taken = bare.strip() and _object(tool, bare) is None  # else it would be read as something else
        built = bare if taken else json.dumps(arguments, ensure_ascii=False)
        return f"{marks.opening}{call.raw or built}{marks.closing}"

    def instruction(self, tools: Tools) -> str:
        lines = [f"{self._usage(tool)} {tool.description.strip()}" for tool in tools]
        given = f"{self._observation.opening}..{self._observation.closing}"
        return "To use a tool, write one of these:\n" + "\n".join(lines) + f"\nWhat it gives comes back in {given}."

    def _usage(self, tool: ToolSpec) -> str:
        single = _single(tool)
        given = single or json.dumps(dict.fromkeys(tool.parameters.get("properties", {}), "..."))
        return f"{self.marks(tool).opening}{given}{self.marks(tool).closing}"


def _single(tool: ToolSpec) -> str | None:
    """The one parameter that a tool needs, where that is text: it may stand bare."""
    properties, required = tool.parameters.get("properties", {}), list(tool.parameters.get("required", ()))
    names = required or list(properties)
    return names[0] if len(names) == 1 and properties.get(names[0], {}).get("type") == "string" else None


def _object(tool: ToolSpec, text: str) -> dict[str, Any] | None:
    """The arguments that a text gives as a JSON object; None where it is none."""
    try:
        data = read_json(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) and data.keys() <= tool.parameters.get("properties", {}).keys() else None


def _call(tool: ToolSpec, inside: str, end: int) -> Written:
    single, given = _single(tool), _object(tool, inside)
    if given is not None:
        return Written(tool.name, given, inside, end)
    if single is None:
        return arguments_of(tool.name, inside, inside, end)
    if not inside.strip():
        return broken(inside, end, f"nothing is given for {single}", tool.name)
    return Written(tool.name, {single: inside}, inside, end)
