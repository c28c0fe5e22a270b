"""Conversion of arguments to the types of a tool's schema, for formats that write arguments as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent_r1.renderers.formats.tool_format import Tools, parse_json

_WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None, "none": None}
"""The value of each word of JSON or Python. Words are looked up in lower case: the word None is found as "none"."""


def argument_schema(tools: Tools, tool: str, argument: str) -> Mapping[str, Any]:
    """Return the JSON schema of an argument of a tool, such as {"type": "integer"}; {} if there is no such argument."""
    parameters = next((spec.parameters for spec in tools if spec.name == tool), {})
    return parameters.get("properties", {}).get(argument, {})


def convert_value(text: str, schema: Mapping[str, Any]) -> object:
    """Convert the text of an argument to the type that the schema of the argument declares.

    If the schema declares the type string, return the text. If the schema declares the types string and null, the texts
    "null" and "none" become None. With any other schema, return the JSON value of the text, or the text itself if the
    text is not JSON.

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
