"""Conversion of arguments that a format writes as bare text to the types of the tool's schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent_r1.renderers.formats.tool_format import Tools, parse_json

_WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None, "none": None}
"""Values that templates write as words; some templates spell them as Python does."""


def argument_schema(tools: Tools, tool: str, argument: str) -> Mapping[str, Any]:
    """Return the JSON schema of an argument; {} if the tool declares none."""
    parameters = next((spec.parameters for spec in tools if spec.name == tool), {})
    return parameters.get("properties", {}).get(argument, {})


def convert_value(text: str, schema: Mapping[str, Any]) -> object:
    """Return the value that ``text`` stands for.

    Text stays text if the schema accepts text. A text that does not fit the schema also stays text, so that the
    validation of the call can explain it.

    Example:
        >>> convert_value("7", {"type": "integer"}), convert_value("7", {"type": "string"}), convert_value("7", {})
        (7, '7', 7)
    """
    types = set(_schema_types(schema))
    word = text.strip().lower()
    if "string" in types:
        return None if "null" in types and word in ("null", "none") else text
    if word in _WORDS:
        return _WORDS[word]
    try:
        return parse_json(text)
    except ValueError:
        return text


def _schema_types(schema: Mapping[str, Any]) -> Iterator[str]:
    declared = schema.get("type", ())
    yield from (declared,) if isinstance(declared, str) else declared
    if any(isinstance(value, str) for value in schema.get("enum", ())):
        yield "string"
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _schema_types(choice)
