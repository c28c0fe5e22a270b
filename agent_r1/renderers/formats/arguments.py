"""Arguments that a format writes as bare text, made what the tool's schema says they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent_r1.renderers.formats.tool_format import Tools, parse_json

WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None, "none": None}
"""What templates write for values that have no text of their own; some spell them as Python does."""


def argument_schema(tools: Tools, tool: str, argument: str) -> Mapping[str, Any]:
    """The JSON schema of an argument; {} where nothing is said of it."""
    found = next((spec.parameters for spec in tools if spec.name == tool), {})
    return found.get("properties", {}).get(argument, {})


def convert_value(text: str, schema: Mapping[str, Any]) -> object:
    """The value that ``text`` is. Text stays text where the schema takes text; what does not fit it stays text too,
    for the tool's own check to explain.

    Example:
        >>> convert_value("7", {"type": "integer"}), convert_value("7", {"type": "string"}), convert_value("7", {})
        (7, '7', 7)
    """
    kinds = set(_kinds(schema))
    if "string" in kinds:
        return None if "null" in kinds and text.strip().lower() in ("null", "none") else text
    word = text.strip().lower()
    if word in WORDS:
        return WORDS[word]
    try:
        return parse_json(text)
    except ValueError:
        return text


def _kinds(schema: Mapping[str, Any]) -> Iterator[str]:
    kind = schema.get("type", ())
    yield from (kind,) if isinstance(kind, str) else kind
    if any(isinstance(value, str) for value in schema.get("enum", ())):
        yield "string"
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _kinds(choice)
