"""The parameters of a tool's function: as a JSON schema for the policy, and as a check of what it sends.

Parameters annotated with ``Task``, ``RolloutContext`` or ``Resources`` are filled in from the running episode and are not in
the schema.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.tools.docstring import Docstring
from agent_r1.tools.resources import Resources

_FAULTS_TOLD = 5  # of many wrong arguments, so many are explained


@dataclass(frozen=True, slots=True)
class InvalidArguments:
    """Arguments that cannot be used: what is wrong, and what is expected."""

    reason: str


class Signature(Protocol):
    """What a tool takes: a check of the arguments that a policy sends."""

    def bind(
        self, arguments: Mapping[str, Any], task: Task, context: RolloutContext, resources: Resources
    ) -> dict[str, Any] | InvalidArguments:
        """The keywords to call the tool's function with."""
        ...


@dataclass(frozen=True, slots=True)
class FunctionSignature:
    """What a typed function takes.

    ``model`` has one field per parameter of the schema, in order: its alias is the parameter's name,
    so that a parameter may have any name. ``names`` are those names, ``injected`` the other parameters.
    """

    model: type[BaseModel]
    names: tuple[str, ...]
    injected: Mapping[str, type]
    schema: Mapping[str, Any]

    def bind(
        self, arguments: Mapping[str, Any], task: Task, context: RolloutContext, resources: Resources
    ) -> dict[str, Any] | InvalidArguments:
        """The keywords to call the function with: checked, converted where that is safe ("3" to 3), with defaults."""
        try:
            fields = self.model.model_validate(dict(arguments))
        except ValidationError as error:
            return InvalidArguments(f"{_faults(error)}. Expected: {describe_parameters(self.schema)}")
        except Exception as error:  # a validator of the user's own types may raise anything
            return InvalidArguments(f"{type(error).__name__}. Expected: {describe_parameters(self.schema)}")
        keywords = {name: value for name, (_, value) in zip(self.names, fields, strict=True)}
        given: dict[type, Any] = {Task: task, RolloutContext: context, Resources: resources}
        return keywords | {name: given[kind] for name, kind in self.injected.items()}


def describe_parameters(schema: Mapping[str, Any]) -> str:
    """The parameters of an object's JSON schema in words.

    Example:
        >>> describe_parameters({"properties": {"query": {"type": "string"}, "k": {"type": "integer"}}, "required": ["query"]})
        'query (string), k (integer, optional)'
    """
    required = schema.get("required", ())
    described = (
        f"{name} ({_kind(kind)}{'' if name in required else ', optional'})"
        for name, kind in schema.get("properties", {}).items()
    )
    return ", ".join(described) or "no arguments"


def parse_signature(function: Callable[..., Any], docs: Docstring) -> FunctionSignature:
    """Derive the signature from annotations, defaults and the docstring. Raises InvalidInput where that cannot be."""
    hints = _hints(function)
    parameters = {
        name: _checked(function, value, hints) for name, value in inspect.signature(function).parameters.items()
    }
    unknown = sorted(docs.arguments.keys() - parameters.keys())
    if unknown:
        raise _bad(function, f"a docstring that explains {', '.join(unknown)}", "explain only arguments that exist")
    injected = {name: hints[name] for name in parameters if hints[name] in (Task, RolloutContext, Resources)}
    names = tuple(name for name in parameters if name not in injected)
    fields: dict[str, Any] = {
        f"p{index}": _field(name, hints[name], parameters[name].default, docs.arguments.get(name))
        for index, name in enumerate(names)
    }
    try:
        config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        model = create_model("Arguments", __config__=config, **fields)
        return FunctionSignature(model, names, injected, _schema(model))
    except PydanticUserError as error:
        reason = str(error).splitlines()[0]
        raise _bad(
            function, f"a parameter without a JSON schema ({reason})", "use plain types or pydantic models"
        ) from error


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise _bad(
            function, f"annotations that cannot be read ({error})", "define its types at module level"
        ) from error


def _checked(function: Callable[..., Any], parameter: inspect.Parameter, hints: Mapping[str, Any]) -> inspect.Parameter:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise _bad(function, f"the parameter {parameter}", "use parameters that can be named one by one")
    if parameter.name not in hints:
        raise _bad(
            function, f"no type for the parameter {parameter.name!r}", f"annotate it, e.g. {parameter.name}: str"
        )
    return parameter


def _field(name: str, annotation: Any, default: Any, description: str | None) -> tuple[Any, Any]:
    field = Field(alias=name, description=description) if description else Field(alias=name)
    return Annotated[annotation, field], ... if default is inspect.Parameter.empty else default


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = _untitled(model.model_json_schema())
    order = ("type", "properties", "required", "$defs")
    return {"type": "object", "properties": {}} | {key: schema[key] for key in order if key in schema}


def _untitled(node: Any) -> Any:
    """The schema without the titles pydantic makes up. A property called title is a mapping, and stays."""
    if isinstance(node, dict):
        return {key: _untitled(value) for key, value in node.items() if key != "title" or not isinstance(value, str)}
    return [_untitled(item) for item in node] if isinstance(node, list) else node


def _faults(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    told = [_fault(fault["type"], ".".join(map(str, fault["loc"])), fault["msg"]) for fault in faults[:_FAULTS_TOLD]]
    return "; ".join([*told, "and more"] if len(faults) > _FAULTS_TOLD else told)


def _fault(kind: str, where: str, message: str) -> str:
    return f"{where}: there is no such argument" if kind == "extra_forbidden" else f"{where}: {message}"


def _kind(schema: Mapping[str, Any]) -> str:
    """The type of one property in words: ``integer``, ``one of "a", "b"``, ``string or null``."""
    if "anyOf" in schema:
        return " or ".join(_kind(option) for option in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    return str(schema.get("type", "object" if "$ref" in schema else "anything"))


def _bad(function: Callable[..., Any], got: str, do: str) -> InvalidInput:
    return InvalidInput(f"tool {function.__name__!r}", got=got, do=do)
