"""Find algorithms by name or in a file, and change parameters by dotted keys (``loss.clip_low``)."""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.loss_terms import TokenMask
from agent_r1.algorithms.policy_losses import PolicyLoss
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import Advantage, Component
from agent_r1.algorithms.validation import check_algorithm
from agent_r1.core.errors import InvalidInput, suggest
from agent_r1.core.redaction import flatten

NONE = "none"
"""The value by which a user leaves out an optional component or number."""

DESCRIPTIVE = ("name", "paper", "deviations")
"""Fields that only describe an algorithm. All other fields are parameters."""

NAMED = (Advantage, PolicyLoss, TokenMask)
"""Base classes of the components that settings choose by name, such as ``loss = "cispo"``."""


def as_algorithm(value: object, default: str) -> Algorithm:
    """Return the algorithm that a name, a table of parameters, or an Algorithm describes."""
    if isinstance(value, str):
        return build_algorithm(value, {})
    if isinstance(value, Mapping):
        settings = dict(value)
        return build_algorithm(str(settings.pop("name", default)), settings)
    if isinstance(value, Algorithm):
        _check_names(value)
        check_algorithm(value)
        return value
    got = f"an object of type {type(value).__name__}"
    raise InvalidInput("algorithm", got=got, do="give a name, a table of parameters or an Algorithm")


def build_algorithm(name: str, settings: Mapping[str, object]) -> Algorithm:
    """Return a preset, or an algorithm of a file, changed by ``settings``.

    ``name`` is the name of a preset, or a file and a variable in the file, such as ``my_file.py:MINE``. If ``settings``
    contains all parameters of an algorithm, as those of a stored run do, ``name`` can also be any other name.

    A key of ``settings`` such as ``loss`` names the component to use, and ``loss.clip_high`` changes a parameter:
    ``{"loss": "cispo", "loss.clip_high": 3.0, "kl": {"coefficient": 0.01}}``.
    """
    changes = {key.removesuffix(".name"): value for key, value in flatten(settings)}  # loss.name chooses the loss
    preset = _from_file(name) if ".py:" in name or name.endswith(".py") else ALGORITHMS.get(name)
    base = preset or _stored(name, changes)
    if base is None:
        do = f"{suggest(name, ALGORITHMS)} there are: {', '.join(ALGORITHMS)}, your own as FILE.py:NAME"
        raise InvalidInput("algorithm", got=name, do=do.strip())
    described = dict(base)
    changes = {key: value for key, value in changes.items() if key not in DESCRIPTIVE or value != described[key]}
    algorithm = with_parameters(base, changes)
    _check_names(algorithm)
    check_algorithm(algorithm)
    return algorithm


def parameters(algorithm: Algorithm) -> dict[str, object]:
    """Return the value of each parameter by dotted key, such as "loss.clip_low". That of a component is its name."""
    return {key: value for key, value in _parameters(algorithm, "") if key not in DESCRIPTIVE}


def _parameters(component: Component, prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in component:
        if isinstance(value, Component):
            yield from _parameters(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}".removesuffix(".name"), NONE if value is None else value


def with_parameters(algorithm: Algorithm, settings: Mapping[str, object]) -> Algorithm:
    """Return a copy of the algorithm with new values by dotted key. Raise InvalidInput if a key or value is invalid."""
    changed = _replace(algorithm, settings, "")
    assert isinstance(changed, Algorithm)
    return changed


def _stored(name: str, settings: Mapping[str, object]) -> Algorithm | None:
    # A stand-in for an algorithm that has no preset of its name: if ``settings`` of a stored run hold all parameters,
    # they replace each component of any preset.
    if not Algorithm.model_fields.keys() - DESCRIPTIVE <= {key.partition(".")[0] for key in settings}:
        return None
    described = {key: settings[key] for key in DESCRIPTIVE if key in settings}
    return next(iter(ALGORITHMS.values())).model_copy(update={**described, "name": name})


def _from_file(name: str) -> Algorithm:
    path, _, variable = name.rpartition(":") if ".py:" in name else (name, "", "")
    if not os.path.isfile(path):
        raise InvalidInput("algorithm", got=f"{path}, which is not a file", do="give FILE.py:NAME of an Algorithm")
    sys.path.insert(0, str(Path(path).parent.absolute()))  # so that the file can import the files in its folder
    try:
        values = runpy.run_path(path)
    except (Exception, SystemExit) as error:  # sys.exit in the file must not end the command
        got = f"{path}, which raised {type(error).__name__}: {error}"
        raise InvalidInput("algorithm", got=got, do="fix the file") from error
    algorithm = values.get(variable)
    if not isinstance(algorithm, Algorithm):
        defined = ", ".join(known for known, value in values.items() if isinstance(value, Algorithm))
        do = f"name one of its algorithms: {defined}" if defined else f"define {variable} = Algorithm(..) in it"
        got = f"{variable}, which is no Algorithm of {path}" if variable else f"{path} without :NAME"
        raise InvalidInput("algorithm", got=got, do=do)
    return algorithm.model_copy(update={"name": name})


def _replace(component: Component, settings: Mapping[str, object], prefix: str) -> Component:
    # ``settings`` have dotted keys; error messages put ``prefix`` before them
    by_field: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        if name not in type(component).model_fields or prefix + name in DESCRIPTIVE:
            raise _unknown(component, name, prefix)
        by_field.setdefault(name, {})[rest] = value
    changes = {name: _value(component, name, given, prefix) for name, given in by_field.items()}
    try:
        return type(component).model_validate({**dict(component), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        key = prefix + ".".join(map(str, first["loc"]))
        do = f"give another: {first['msg'].removeprefix('Value error, ')}"
        raise InvalidInput(f"algorithm.{key}", got=first["input"], do=do) from error


def _value(component: Component, name: str, given: Mapping[str, object], prefix: str) -> object:
    # ``given`` holds the new settings of the field ``name``: under "" a plain value or the name of a component, under
    # other keys the parameters of the component, as in {"": "cispo", "clip_high": 3.0} for "loss"
    value: Any = dict(component)[name]
    options = choices(component, name)
    if "" in given:
        is_optional = type(None) in get_args(type(component).model_fields[name].annotation)
        value = _choose(given[""], options, is_optional, prefix + name)
    below = {key: new for key, new in given.items() if key}
    if not below:
        return value
    if not options:
        got = f"{min(below)} below it"
        raise InvalidInput(f"algorithm.{prefix}{name}", got=got, do="give it one value: it has no parameters")
    if value is None:
        value = next(iter(options.values()))()
    return _replace(value, below, f"{prefix}{name}.")


def _choose(value: object, options: Mapping[str, type[Component]], optional: bool, key: str) -> object:
    if optional and value in (None, NONE):
        return None
    if not options:
        return value
    if isinstance(value, str) and value and value in options:
        return options[value]()
    names = [*filter(None, options), *([NONE] if optional else [])]
    if names not in ([], [NONE]):
        do = f"{suggest(str(value), names)} there are: {', '.join(names)}".strip()
        raise InvalidInput(f"algorithm.{key}", got=value, do=do)
    below = ", ".join(f"algorithm.{key}.{name}" for choice in options.values() for name in choice.model_fields)
    do = f"set its parameters: {below}" + (", or give none" if optional else "")
    raise InvalidInput(f"algorithm.{key}", got=value, do=do)


def choices(component: Component, name: str) -> Mapping[str, type[Component]]:
    """Return the classes that the field ``name`` of ``component`` can hold, by name; {} if it holds a plain value.

    ``choices(GRPO, "loss")["cispo"]`` is ``Cispo``. A class without a name has the key "".
    """
    base = next(_component_types(type(component).model_fields[name].annotation), None)
    if base is None:
        return {}
    return {name_of(choice): choice for choice in _subclasses(base) if name_of(choice)} if base in NAMED else {"": base}


def name_of(component: type[Component]) -> str:
    """Return the name that a class of components declares, such as "clip", or ""."""
    return str(component.model_fields["name"].default) if "name" in vars(component).get("__annotations__", {}) else ""


def own_classes(component: Component) -> Iterator[type[Component]]:
    """Yield the classes of the component and of the components in it that are no part of this package."""
    if not type(component).__module__.startswith("agent_r1."):
        yield type(component)
    for _, value in component:
        if isinstance(value, Component):
            yield from own_classes(value)


def own_modules(algorithm: Algorithm) -> tuple[str, ...]:
    """Return the modules that another process must import to find all components of the algorithm by name."""
    # the name of an algorithm in a file (FILE.py:NAME) is enough
    return () if ".py:" in algorithm.name else tuple({cls.__module__: None for cls in own_classes(algorithm)})


def _check_names(algorithm: Algorithm) -> None:
    # stored runs refer to components by name
    for field, component in algorithm:
        if not isinstance(component, NAMED):
            continue
        cls, found = type(component), choices(algorithm, field).get(component.name)
        if found is None or found.__qualname__ != cls.__qualname__:
            got = f"a component of class {cls.__name__}, which declares no name"
            name = cls.__name__.lower()
            do = f"add the line  name: Literal[{name!r}] = {name!r}  to the class"
            raise InvalidInput(f"algorithm.{field}", got=got, do=do)


def _component_types(annotation: Any) -> Iterator[type[Component]]:
    if get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _component_types(option)
    elif isinstance(annotation, type) and issubclass(annotation, Component):
        yield annotation


def _subclasses(base: type[Component]) -> Iterable[type[Component]]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _unknown(component: Component, name: str, prefix: str) -> InvalidInput:
    own = name_of(type(component)) if isinstance(component, NAMED) else ""
    others = [other for base in NAMED for other in _subclasses(base) if name_of(other) and name in other.model_fields]
    if own and others:
        do = f"leave it out: {own} has no {name}; these have it: {', '.join(map(name_of, others))}"
        if all(issubclass(other, WithCritic) for other in others) and not isinstance(component, WithCritic):
            do += f", which have a critic; {own} has none"
        return InvalidInput(f"algorithm.{prefix}{name}", got="no parameter of this name", do=do)
    known = [key for key in type(component).model_fields if key not in DESCRIPTIVE]
    inner = [(key, value) for key, value in component if isinstance(value, Component)]
    nested = [f"{key}.{name}" for key, value in inner for name, _ in value if name != "name"]
    hint = suggest(name, [*known, *nested]).replace("'", f"'algorithm.{prefix}", 1)
    do = f"{hint} there are: {', '.join(known)}".strip()
    return InvalidInput(f"algorithm.{prefix}{name}", got="no parameter of this name", do=do)
