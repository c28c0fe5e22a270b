"""Settings in layers: the command line over a file over a recipe over the defaults of frozen pydantic classes.

Every setting has a dotted key (``trainer.learning_rate``). Whatever is wrong with one is a single line that says
which key, where it stood, and what would be right.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_json

from agent_r1.core.errors import InvalidInput

Config = TypeVar("Config", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one place, by dotted key or nested.

    Example:
        Layer("config.toml", {"steps": 20, "trainer": {"learning_rate": 1e-3}})
        Layer("recipe of tinywiki", {"steps": 20, "trainer.learning_rate": 1e-3})
    """

    where: str
    values: Mapping[str, Any]


def resolve(cls: type[Config], layers: Sequence[Layer]) -> Config:
    """One configuration from layers, the strongest first; what no layer says is the class's default.

    Raises InvalidInput for the first thing that is wrong: a key nobody knows (with the nearest), or a
    value of a wrong type or out of range. Values are taken strictly: text is not a number.
    """
    settings: dict[str, Any] = {}
    places: dict[str, str] = {}
    for layer in reversed(layers):
        for key, value in _flat(cls, layer.values):
            _check(cls, key, value, layer.where)
            settings[key], places[key] = value, layer.where
    try:
        return cls.model_validate_json(to_json(_nested(cls, settings), inf_nan_mode="constants"), strict=True)
    except ValidationError as error:
        raise _explained(error, places) from None


def restrict(layer: Layer, cls: type[BaseModel], whole: type[BaseModel]) -> Layer:
    """Of a layer written for ``whole`` the settings that ``cls`` knows too: a recipe speaks to more than one door.

    Raises InvalidInput for a key that ``whole`` does not know.
    """
    settings = dict(_flat(whole, layer.values))
    for key in settings:
        if not knows(whole, key):
            raise unknown_key(key, layer.where, keys(whole))
    return Layer(layer.where, {key: value for key, value in settings.items() if knows(cls, key)})


def read_toml(path: Path) -> Layer:
    """A TOML file as a layer. Raises InvalidInput where it is missing or broken."""
    try:
        with path.open("rb") as file:
            return Layer(str(path), tomllib.load(file))
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise InvalidInput("configuration file", got=f"{path}: {reason}", do="give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput("configuration file", got=f"{path}: {error}", do="mend its TOML") from None


def from_text(cls: type[BaseModel], texts: Mapping[str, str], where: str = "command line") -> Layer:
    """Settings given as text, each read as its field's type: ``{"steps": "20"}``, ``{"betas": "0.9,0.95"}``."""
    return Layer(where, {key: _value(cls, key, text) for key, text in texts.items()})


def fields(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key of a class with its field; a table of free keys stands as itself.

    Example:
        [key for key, _ in fields(TrainConfig)] == ["task", ..., "reward_weights", "trainer.learning_rate", ...]
    """
    for name, field in cls.model_fields.items():
        inner = _model(field)
        if inner is None:
            yield prefix + name, field
        else:
            yield from fields(inner, f"{prefix}{name}.")


def keys(cls: type[BaseModel]) -> list[str]:
    """Every dotted key of a class."""
    return [key for key, _ in fields(cls)]


def knows(cls: type[BaseModel], key: str) -> bool:
    """Whether a dotted key sets something in a class."""
    return _owner(cls, key) is not None


def nearest(key: str, known: Iterable[str]) -> str:
    """The known key that most resembles ``key``, by the whole, by the last word, or by initials (``lr``)."""
    return max(known, key=lambda candidate: _likeness(key, candidate))


def unknown_key(key: str, where: str, known: Iterable[str]) -> InvalidInput:
    """The error for a key that nothing knows."""
    return InvalidInput(
        f"unknown setting ({where})", got=repr(key), do=f"the nearest that exists is {nearest(key, known)!r}"
    )


def _likeness(key: str, candidate: str) -> float:
    last, name = key.rpartition(".")[2], candidate.rpartition(".")[2]
    initials = "".join(word[:1] for word in name.split("_"))
    whole = difflib.SequenceMatcher(None, key, candidate).ratio()
    return max(whole, 0.9 * difflib.SequenceMatcher(None, last, name).ratio(), 0.9 * (last == initials))


def _check(cls: type[BaseModel], key: str, value: Any, where: str) -> None:
    if not knows(cls, key):
        raise unknown_key(key, where, keys(cls))
    try:
        to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:
        got = f"an object of type {type(value).__name__}"
        raise InvalidInput(f"{key} ({where})", got=got, do="give text, a number, or a list or table of them") from None


def _owner(cls: type[BaseModel], key: str) -> FieldInfo | None:
    """The field that a dotted key sets, or sets an entry of; None where there is none."""
    name, _, rest = key.partition(".")
    field = cls.model_fields.get(name)
    if field is None:
        return None
    inner = _model(field)
    if inner is not None:
        return _owner(inner, rest)
    return field if not rest or _is_table(field) else None


def _model(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _is_table(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


def _flat(cls: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted key; the entries of tables too, so that layers add up entry by entry."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if not isinstance(value, Mapping):
            yield key, value
        elif value:
            yield from _flat(cls, value, f"{key}.")
        elif not any(known == key or known.startswith(f"{key}.") for known in keys(cls)):
            yield key, value  # an empty table sets nothing, but its name must be right


def _nested(cls: type[BaseModel], settings: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        if rest:
            nested.setdefault(name, {})[rest] = value
        else:
            nested[name] = value
    for name, field in cls.model_fields.items():
        inner = _model(field)
        if inner is not None and name in nested:
            nested[name] = _nested(inner, nested[name])
    return nested


def _value(cls: type[BaseModel], key: str, text: str) -> Any:
    field = _owner(cls, key)
    if field is None or _takes_text(field.annotation):
        return text
    return _literal(text) if get_origin(field.annotation) is not tuple else _items(field, text)


def _takes_text(kind: Any) -> bool:
    kinds = {kind} if get_origin(kind) in (None, dict, tuple) else set(get_args(kind))
    return not kinds.isdisjoint((str, Path))


def _items(field: FieldInfo, text: str) -> list[Any]:
    items = text.removeprefix("[").removesuffix("]").split(",")
    return [item.strip() if str in get_args(field.annotation) else _literal(item.strip()) for item in items if item]


def _literal(text: str) -> Any:
    """A number, true, false, null or a JSON value; text where it is none of these, for the field to refuse."""
    for read in (int, float, json.loads):
        try:
            return read(text)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(text, text)


def _explained(error: ValidationError, places: Mapping[str, str]) -> InvalidInput:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    # An item of a list stands under the list's key; what is wrong with several settings together, above them.
    below = (known for known in places if known.startswith(f"{key}."))
    where = next((places[known] for known in (key, key.rpartition(".")[0], *below) if known in places), None)
    if first["type"] == "missing" and where is None:
        return InvalidInput(key, got="nothing", do=f"give it, as --{key} or in a configuration file")
    if first["type"] == "missing":
        return InvalidInput(f"{key} ({where})", got="nothing", do="the list should be longer")
    do = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return InvalidInput(f"{key} ({where})", got=repr(first["input"]), do=do)
