"""Settings in layers: the command line over a TOML file over a task set's defaults over the defaults of the classes.

Every setting has a dotted key (``trainer.learning_rate``). Each error is one line that names the key, the layer that
it came from, and the remedy.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import open_regular
from agent_r1.core.suggest import suggest

COMMAND_LINE = "command line"

LARGEST_INTEGER, LARGEST_NUMBER = 2**32 - 1, 1e9
"""No setting needs a larger integer or floating-point number, and libraries that get one raise OverflowError."""

RENAMED: Mapping[str, str] = {
    "task": "taskset",
    "row": "algorithm",
    "view": "context_policy",
    "learner": "trainer",
    "doctor": "monitor",
}
"""Settings and tables of the first version, and their names now."""

MAX_FILE, MAX_DEPTH = 1_000_000, 20
"""Bytes of a TOML file, and how deep its tables and lists may be nested."""

Config = TypeVar("Config", bound=BaseModel)


class NestedByName:
    """Annotation of a setting that is chosen by name and has settings below it, which its own validator checks.

    Such a field gets one flat table: ``{"name": "grpo", "loss": "cispo", "loss.clip_high": 0.28}``.
    """


NESTED_BY_NAME: Final = NestedByName()


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one source, by dotted key or nested.

    Example:
        Layer("config.toml", {"steps": 20, "trainer": {"learning_rate": 1e-3}})
        Layer("defaults of tinywiki", {"steps": 20, "trainer.learning_rate": 1e-3})
    """

    source: str
    values: Mapping[str, Any]


def resolve(cls: type[Config], layers: Sequence[Layer]) -> Config:
    """Return one configuration made of layers, the strongest first. Settings in no layer keep the class's default.

    Values are validated strictly: text is not a number.

    Raises:
        InvalidInput: for the first unknown key, and for the first value of a wrong type or out of range.
    """
    settings, sources = _merge(cls, layers)
    try:
        return cls.model_validate_json(to_json(_nest(cls, settings), inf_nan_mode="constants"), strict=True)
    except ValidationError as error:
        raise _explain(cls, error, sources) from None
    except InvalidInput as error:  # of the validator of a setting that is chosen by name
        source = _source(error.what, sources)
        raise InvalidInput(f"{error.what} ({source})" if source else error.what, got=error.got, do=error.do) from None


def settings_of(cls: type[BaseModel], layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the settings of the layers by dotted key, without validating the values."""
    return _merge(cls, layers)[0]


def restrict(layer: Layer, cls: type[BaseModel], whole: type[BaseModel]) -> Layer:
    """Return the settings of a layer that ``cls`` has, if the others are settings of ``whole``.

    This lets one file or one task set configure several commands. Raises InvalidInput for a key that neither has.
    """
    settings = dict(_flatten(whole, layer.values))
    for key in settings:
        if not has_setting(whole, key) and not has_setting(cls, key):
            raise unknown_setting(key, layer.source, [*setting_keys(cls), *setting_keys(whole)])
    return Layer(layer.source, {key: value for key, value in settings.items() if has_setting(cls, key)})


def read_toml(path: Path) -> Layer:
    """Read a TOML file as a layer. Raises InvalidInput if it cannot be read or parsed, or is too long or too deep."""
    try:
        with open_regular(path) as file:
            text = file.read(MAX_FILE + 1)
        if len(text) > MAX_FILE:
            raise ValueError(f"more than {MAX_FILE} bytes")
        values = tomllib.loads(text.decode())
        if _is_too_deep(values):
            raise RecursionError
        return Layer(str(path), values)
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise InvalidInput("configuration file", got=f"{path}: {reason}", do="give a TOML file") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of 5,000 digits, deep brackets
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput("configuration file", got=f"{path}: {reason}", do="fix its TOML") from None


def _is_too_deep(values: Mapping[str, Any]) -> bool:
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        inner = chain.from_iterable(one.values() if isinstance(one, Mapping) else one for one in level)
        level = [one for one in inner if isinstance(one, Mapping | list)]
    return bool(level)


def from_text(cls: type[BaseModel], texts: Mapping[str, str], source: str = COMMAND_LINE) -> Layer:
    """Return settings given as text, converted to their types: ``{"steps": "20"}``, ``{"betas": "0.9,0.95"}``.

    A text that cannot be converted stays text, so that :func:`resolve` reports it like any other wrong value.
    """
    return Layer(source, {key: _convert(_value_type(cls, key), text) for key, text in texts.items()})


def iter_fields(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key of a class with its field. A table with free keys counts as one field.

    Example:
        [key for key, _ in iter_fields(TrainConfig)] == ["data", ..., "trainer.learning_rate", ...]
    """
    for name, field in cls.model_fields.items():
        inner = nested_model(field)
        if inner is None:
            yield prefix + name, field
        else:
            yield from iter_fields(inner, f"{prefix}{name}.")


def setting_keys(cls: type[BaseModel]) -> list[str]:
    """Return every dotted key of a class."""
    return [key for key, _ in iter_fields(cls)]


def has_setting(cls: type[BaseModel], key: str) -> bool:
    """Return whether a dotted key is a setting of a class, or an entry of one of its tables."""
    return find_field(cls, key) is not None


def find_field(cls: type[BaseModel], key: str) -> FieldInfo | None:
    """Return the field that a dotted key sets, or sets an entry of; None if there is none."""
    name, _, rest = key.partition(".")
    field = cls.model_fields.get(name)
    if field is None:
        return None
    inner = nested_model(field)
    if inner is not None:
        return find_field(inner, rest)
    return field if not rest or is_table(field) else None


def nested_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a field's settings, None if the field is a single setting."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def is_table(field: FieldInfo) -> bool:
    """Return whether a field has entries whose keys its class does not list."""
    return get_origin(field.annotation) is dict or NESTED_BY_NAME in field.metadata


def unknown_setting(key: str, source: str, known: Iterable[str]) -> InvalidInput:
    """Return the error for a key that is no setting."""
    known = list(known)
    table, _, _ = key.partition(".")
    if table in RENAMED and any(name.partition(".")[0] == RENAMED[table] for name in known):
        do = f"{table} is now {RENAMED[table]}: CHANGELOG.md lists the new name of every setting (Renamed)"
    elif below := [name for name in known if name.startswith(f"{key}.")]:
        do = f"it is a table: give its settings, such as {below[0]}"
    else:
        do = suggest(key, known) or "leave it out: no setting has a similar name"
    return InvalidInput(f"unknown setting ({source})", got=repr(key), do=do)


def _merge(cls: type[BaseModel], layers: Sequence[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the value of every dotted key that a layer sets, and the source of each."""
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in reversed(layers):
        for key, value in _flatten(cls, layer.values):
            _check(cls, key, value, layer.source)
            settings[key], sources[key] = value, layer.source
    return settings, sources


def _check(cls: type[BaseModel], key: str, value: Any, source: str) -> None:
    if not has_setting(cls, key):
        raise unknown_setting(key, source, setting_keys(cls))
    largest = LARGEST_INTEGER if isinstance(value, int) else LARGEST_NUMBER
    if isinstance(value, int | float) and largest < abs(value) != math.inf:  # infinity has its own message
        raise InvalidInput(f"{key} ({source})", got=value, do=f"give at most {largest:.10g}")
    try:
        to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:
        got = f"an object of type {type(value).__name__}"
        do = "give text, a number, or a list or table of them"
        raise InvalidInput(f"{key} ({source})", got=got, do=do) from None


def _flatten(cls: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by dotted key, the entries of tables too, so that layers are merged entry by entry."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, BaseModel):  # such as an Algorithm, given in Python: it sets everything that it holds
            value = to_jsonable_python(value)
        if not isinstance(value, Mapping):
            yield _without_name(cls, key), value
        elif value:
            yield from _flatten(cls, value, f"{key}.")
        elif not any(known == key or known.startswith(f"{key}.") for known in setting_keys(cls)):
            yield key, value  # an empty table sets nothing, but its key must exist


def _without_name(cls: type[BaseModel], key: str) -> str:
    """Return the key of a component for the key of its name: ``algorithm.loss`` for ``algorithm.loss.name``."""
    parent, _, last = key.rpartition(".")
    field = find_field(cls, key)
    return parent if last == "name" and field is not None and NESTED_BY_NAME in field.metadata else key


def _nest(cls: type[BaseModel], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nest settings with dotted keys: one dictionary per settings class. The entries of a table stay flat."""
    nested: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        below = {key.partition(".")[2]: value for key, value in settings.items() if key.partition(".")[0] == name}
        inner = nested_model(field)
        if inner is not None and below and "" not in below:
            nested[name] = _nest(inner, below)
        elif "" in below and len(below) == 1:
            nested[name] = below[""]
        elif below:
            nested[name] = {key or "name": value for key, value in below.items()}
    return nested


def _value_type(cls: type[BaseModel], key: str) -> Any:
    """Return the type of a setting; ``str`` if the key is unknown or its own validator converts text."""
    field = find_field(cls, key)
    if field is None or NESTED_BY_NAME in field.metadata:
        return str
    if get_origin(field.annotation) is dict:
        return get_args(field.annotation)[1]
    return field.annotation


def _convert(annotation: Any, text: str) -> Any:
    """Return a text as a value of a type, items of a tuple between commas; the text itself if that fails."""
    if get_origin(annotation) is Annotated:  # without its bounds: resolve() reports a value beyond them
        return _convert(get_args(annotation)[0], text)
    if get_origin(annotation) is tuple:
        items = text.removeprefix("[").removesuffix("]").split(",")
        return [_convert(get_args(annotation)[0], item.strip()) for item in items if item]
    try:
        return TypeAdapter(annotation).validate_strings(text)
    except ValidationError:
        return text


def _explain(cls: type[BaseModel], error: ValidationError, sources: Mapping[str, str]) -> InvalidInput:
    """Return the first problem of a validation as one line."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    source = _source(key, sources)
    if first["type"] == "missing" and source is None:
        return InvalidInput(key, got="nothing", do=f"give it, as --{key} or in a configuration file")
    if first["type"] == "missing":
        return InvalidInput(f"{key} ({source})", got="nothing", do="the list should be longer")
    do = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    field = find_field(cls, key)
    if first["type"] == "string_pattern_mismatch" and field is not None and field.description:
        do = f"give another: {' '.join(field.description.split())}"  # not the regular expression
    return InvalidInput(f"{key} ({source})", got=repr(first["input"]), do=do)


def _source(key: str, sources: Mapping[str, str]) -> str | None:
    """Return the source of a setting; of a list's item the list's, of several settings together one of them."""
    below = (known for known in sources if known.startswith(f"{key}."))
    above = (known for known in sources if key.startswith(f"{known}."))
    return next((sources[known] for known in (key, *above, *below) if known in sources), None)
