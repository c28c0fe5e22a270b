"""The arguments of tool calls: their JSON text, and the values that a JSON schema accepts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from urllib.parse import unquote

MAX_JSON_DEPTH = 100
"""The largest allowed nesting depth of the JSON text of a call. Recursive code could not handle a very deep value."""

_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
"""Matches a bracket or a whole JSON string, so that a bracket inside a string is not matched alone."""


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raise ValueError for NaN, infinities, a key that is given twice, and more than MAX_JSON_DEPTH levels.
    """
    steps = ({"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0) for token in _BRACKET.findall(text))
    if max(accumulate(steps), default=0) > MAX_JSON_DEPTH:
        raise ValueError(f"it is nested too deeply, more than {MAX_JSON_DEPTH} levels")
    return json.loads(
        text, parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=refuse_duplicates
    )


def refuse_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the object with these keys and values. Raise ValueError if a key is given twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large a number")
    return value


def parse_arguments(value: object) -> Mapping[str, Any]:
    """Return the arguments of a call: an object, or the JSON text of one. None, "" and null mean no arguments.

    Raise ValueError if the value is anything else.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(f'the "arguments" are not valid JSON: {error}') from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f'the "arguments" are a JSON object, got {json_type(value)}')
    return value


_TYPES: Mapping[type, str] = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{type(None): "null", list: "array", tuple: "array", dict: "object"},
}


def json_type(value: object) -> str:
    """Return the JSON type of a value, such as "array"; for a value that JSON does not have, its Python type."""
    return _TYPES.get(type(value), type(value).__name__)


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the alternatives that a schema allows. None stands for every type, and for every value."""

    types: tuple[str, ...] | None = None
    values: tuple[Any, ...] | None = None
    items: Any = None  # the schema of the items of an array

    def allows_type(self, name: str) -> bool:
        """Return whether a value of the JSON type ``name`` could be allowed."""
        is_type = self.types is None or name in self.types or (name == "integer" and "number" in self.types)
        return is_type and (self.values is None or any(json_type(value) == name for value in self.values))

    def fits(self, value: object) -> bool:
        """Return whether the type of a value, and the value itself where the schema lists values, are allowed."""
        name = json_type(value)
        same = (one for one in self.values or () if json_type(one) == name)
        return self.allows_type(name) and (self.values is None or value in same)

    def meet(self, other: Kind) -> Kind:
        """Return the alternative that allows what both allow."""
        types = self.types if other.types is None else other.types
        if self.types is not None and other.types is not None:
            each = (Kind(self.types), Kind(other.types))
            names = dict.fromkeys((*self.types, *other.types))
            types = tuple(name for name in names if all(one.allows_type(name) for one in each))
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = tuple(value for value in self.values if other.fits(value))
        return Kind(types, values, self.items or other.items)


def kinds(schema: Any, root: Mapping[str, Any], above: frozenset[str] = frozenset()) -> tuple[Kind, ...]:
    """Return the alternatives that a schema allows. References point into ``root``.

    Example:
        >>> kinds({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, {"$defs": {"Unit": {"const": "m"}}})
        (Kind(types=None, values=('m',), items=None), Kind(types=('null',), values=None, items=None))
    """
    if not isinstance(schema, Mapping):  # true, which allows every value
        return (Kind(),)
    declared = schema.get("type")
    types = (declared,) if isinstance(declared, str) else None if declared is None else tuple(declared)
    values = (schema["const"],) if "const" in schema else tuple(schema["enum"]) if "enum" in schema else None
    found = [Kind(types, values, schema.get("items"))]
    groups: list[Iterable[Any]] = [schema[key] for key in ("anyOf", "oneOf") if schema.get(key)]
    groups += [[part] for part in schema.get("allOf", ())]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in above:
        groups.append([_resolve(reference, root)])
        above |= {reference}
    for group in groups:
        options = [kind for option in group for kind in kinds(option, root, above)]
        found = [one.meet(other) for one in found for other in options]
    return tuple(found)


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    # A reference to another document allows every value.
    node: Any = root if reference.startswith("#") else {}
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        node = node.get(name, {}) if isinstance(node, Mapping) else {}
    return node


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters in the JSON schema of the arguments of a tool."""

    schemas: Mapping[str, Any]  # by name
    required: tuple[str, ...]
    others: Any  # the schema of arguments with other names
    root: Mapping[str, Any]

    def kinds(self, name: str) -> tuple[Kind, ...]:
        return kinds(self.schemas.get(name, self.others), self.root)

    def is_text(self, name: str) -> bool:
        """Return whether every value of the parameter is a text."""
        found = self.kinds(name)
        texts = (
            kind.types == ("string",) or {json_type(value) for value in kind.values or ()} == {"string"}
            for kind in found
        )
        return name in self.schemas and all(texts)


def parameters_of(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Parameters:
    """Return the parameters in the JSON schema of an object, also those of its references and of ``allOf``."""
    root = schema if root is None else root
    schemas, required = dict(schema.get("properties") or {}), list(schema.get("required") or ())
    parts = [part for part in schema.get("allOf", ()) if isinstance(part, Mapping)]
    if isinstance(reference := schema.get("$ref"), str) and schema != (target := _resolve(reference, root)):
        parts.append(target)
    for part in parts:
        found = parameters_of(part, root)
        schemas, required = {**found.schemas, **schemas}, [*required, *found.required]
    return Parameters(schemas, tuple(dict.fromkeys(required)), schema.get("additionalProperties"), root)


def describe_parameters(schema: Mapping[str, Any]) -> str:
    """Return a short text that lists the parameters in the JSON schema of an object.

    Example:
        >>> schema = {"properties": {"query": {"type": "string"}, "k": {"type": "integer"}}, "required": ["query"]}
        >>> describe_parameters(schema)
        'query (string), k (integer, optional)'
    """
    found = parameters_of(schema)
    texts = (
        f"{name} ({_describe(one, found.root)}{'' if name in found.required else ', optional'})"
        for name, one in found.schemas.items()
    )
    return ", ".join(texts) or "no arguments"


def _describe(schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    texts = []
    for kind in kinds(schema, root):
        if kind.values is not None:
            values = [repr(value) if isinstance(value, str) else json.dumps(value) for value in kind.values]
            texts.append(f"one of {', '.join(values)}" if len(values) != 1 else values[0])
        elif kind.types == ("array",) and kind.items and depth < 2:  # a schema can contain itself
            texts.append(f"array of {_describe(kind.items, root, depth + 1)}")
        else:
            texts.append(" or ".join(kind.types or ("anything",)))
    return " or ".join(dict.fromkeys(texts))
