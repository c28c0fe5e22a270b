"""An algorithm by name or from a file, with settings by dotted key laid over it."""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError

from agent_r1.algorithms.advantages.advantage import Advantage
from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.component import Component
from agent_r1.algorithms.policy_losses import PolicyLoss
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.validation import check
from agent_r1.core.errors import InvalidInput

NONE = "none"
"""What takes an optional part away."""

TOLD = ("name", "paper", "differs")
"""What a row tells of itself; it is not set."""


def build_row(name: str, settings: Mapping[str, object]) -> Algorithm:
    """The algorithm ``name`` (or ``my_file.py:ROW``) with ``settings`` over it; InvalidInput where one is not known.

    A part that has kinds is exchanged by naming one; its numbers are set below it.

    Example:
        build_row("grpo", {"surrogate": "cispo", "surrogate.high": 3.0, "kl.coefficient": 0.01})
    """
    row = _from_file(name) if ".py:" in name or name.endswith(".py") else _named(name)
    changed = _changed(row, settings, "")
    assert isinstance(changed, Algorithm)
    check(changed)
    return changed


def terms(row: Algorithm) -> Iterator[tuple[str, object]]:
    """Everything about a row that can be set, by dotted key; a part that has kinds by the name of its kind."""
    return ((key, value) for key, value in _terms(row, "") if key not in TOLD)


def _terms(part: Component, prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in part:
        if not isinstance(value, Component):
            yield prefix + name, NONE if value is None else value
            continue
        if len(_kinds(part, name)) > 1 and value.kind:
            yield prefix + name, value.kind
        yield from _terms(value, f"{prefix}{name}.")


def _named(name: str) -> Algorithm:
    if name not in ALGORITHMS:
        raise InvalidInput("algorithm", got=name, do=_choose(name, [*ALGORITHMS, "a row of yours as FILE.py:NAME"]))
    return ALGORITHMS[name]


def _from_file(name: str) -> Algorithm:
    path, _, variable = name.rpartition(":") if ".py:" in name else (name, "", "")
    if not Path(path).is_file():
        raise InvalidInput("algorithm", got=f"{path}, which is not a file", do="give FILE.py:NAME of a Algorithm")
    sys.path.insert(0, str(Path(path).parent.absolute()))  # like a script's, so that it may import what lies beside it
    try:
        names = runpy.run_path(path)
    except Exception as error:
        raise InvalidInput(
            "algorithm", got=f"{path}, which raised {type(error).__name__}: {error}", do="mend it"
        ) from error
    row = names.get(variable)
    if not isinstance(row, Algorithm):
        rows = [known for known, value in names.items() if isinstance(value, Algorithm)]
        do = f"name one of its rows: {', '.join(rows)}" if rows else f"define {variable} = Algorithm(..) in it"
        raise InvalidInput("algorithm", got=f"{variable}, which is no Algorithm of {path}", do=do)
    return row


def _changed(part: Component, settings: Mapping[str, object], prefix: str) -> Component:
    """The part with settings by dotted key laid over it; ``prefix`` names it to a reader."""
    below: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        if name not in type(part).model_fields or prefix + name in TOLD:
            raise _unknown(part, name, prefix)
        below.setdefault(name, {})[rest] = value
    changes = {name: _value(part, name, given, prefix) for name, given in below.items()}
    try:
        return type(part).model_validate({**dict(part), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        key = prefix + ".".join(map(str, first["loc"]))
        raise InvalidInput(f"row.{key}", got=first["input"], do=f"give another: {first['msg']}") from error


def _value(part: Component, name: str, given: Mapping[str, object], prefix: str) -> object:
    """The new value of a field: what is given for it as a whole, with what is given below it laid over that."""
    present: Any = dict(part)[name]
    kinds = _kinds(part, name)
    if "" in given:
        present = _whole(given[""], kinds, _optional(part, name), prefix + name)
    below = {key: value for key, value in given.items() if key}
    if not below:
        return present
    if not kinds:
        raise InvalidInput(f"row.{prefix}{name}", got=f"{min(below)} below it", do="give it one value: it has no parts")
    if present is None:
        present = next(iter(kinds.values()))()
    return _changed(present, below, f"{prefix}{name}.")


def _whole(value: object, kinds: Mapping[str, type[Component]], optional: bool, key: str) -> object:
    if optional and value in (None, NONE):
        return None
    if not kinds:
        return value
    if isinstance(value, str) and value and value in kinds:
        return kinds[value]()
    named = [*filter(None, kinds), *([NONE] if optional else [])]
    if named not in ([], [NONE]):
        raise InvalidInput(f"row.{key}", got=value, do=_choose(str(value), named))
    below = ", ".join(f"row.{key}.{name}" for kind in kinds.values() for name in kind.model_fields)
    raise InvalidInput(f"row.{key}", got=value, do=f"set what is below it: {below}" + (", or none" if optional else ""))


def _optional(part: Component, name: str) -> bool:
    return type(None) in get_args(type(part).model_fields[name].annotation)


def _kinds(part: Component, name: str) -> Mapping[str, type[Component]]:
    """The parts that can stand in a field, by kind; empty for a plain number."""
    found = next(_parts(type(part).model_fields[name].annotation), None)
    if found is None:
        return {}
    if found in (Advantage, PolicyLoss):
        return {kind.kind: kind for kind in _below(found) if kind.kind}
    return {found.kind: found}


def _parts(annotation: Any) -> Iterator[type[Component]]:
    if get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _parts(option)
    elif isinstance(annotation, type) and issubclass(annotation, Component):
        yield annotation


def _below(base: type[Component]) -> Iterable[type[Component]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)


def _unknown(part: Component, name: str, prefix: str) -> InvalidInput:
    """The error for a key that a part does not have; says where else it exists."""
    owners = [
        kind for base in (Advantage, PolicyLoss) for kind in _below(base) if kind.kind and name in kind.model_fields
    ]
    if prefix and owners:
        said = f"leave it out: {part.kind} has no {name}; there is one in {', '.join(kind.kind for kind in owners)}"
        if all(issubclass(kind, WithCritic) for kind in owners) and not isinstance(part, WithCritic):
            said += f", which have a critic; {part.kind} has none"
        return InvalidInput(f"row.{prefix}{name}", got="a number for it", do=said)
    known = [key for key in type(part).model_fields if key not in TOLD]
    below = [f"{key}.{one}" for key, value in part if isinstance(value, Component) for one in type(value).model_fields]
    nearest = max([*known, *below], key=lambda key: _likeness(name, key.rpartition(".")[2]))
    return InvalidInput(
        f"row.{prefix}{name}", got="no such term", do=f"did you mean {nearest}? there are: {', '.join(known)}"
    )


def _choose(name: str, known: Iterable[str]) -> str:
    names = list(known)
    nearest = max(names, key=lambda one: _likeness(name, one))
    return f"did you mean {nearest}? there are: {', '.join(names)}"


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
