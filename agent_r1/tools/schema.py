"""The parameters of a tool: a JSON schema for the policy, and the validation of the arguments that the policy sends.

A parameter with the type ``Task``, ``RolloutContext`` or ``Resources`` is not in the schema. Such a parameter receives
the task, the context or the resources of the running episode.
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

MAX_SHOWN_ERRORS = 5
"""The largest number of wrong arguments that an error message explains."""


@dataclass(frozen=True, slots=True)
class InvalidArguments:
    """The result of a validation that failed. ``reason`` explains the problem and lists the expected arguments."""

    reason: str


class Signature(Protocol):
    """An object that validates the arguments that a policy sends to a tool."""

    def bind(
        self, arguments: Mapping[str, Any], task: Task, context: RolloutContext, resources: Resources
    ) -> dict[str, Any] | InvalidArguments:
        """Return all keyword arguments for the tool's function, or InvalidArguments if ``arguments`` are not valid.

        Only ``arguments`` come from the policy. The function can also need ``task``, ``context`` or ``resources``, the
        objects of the running episode. The result contains the objects that the function needs.
        """
        ...


@dataclass(frozen=True, slots=True)
class FunctionSignature:
    """The signature of a typed Python function.

    Attributes:
        model: a pydantic model that validates the arguments. Its fields are named p0, p1, .., because pydantic does not
            accept every name. The alias of a field is the name of the parameter.
        names: the parameters that the policy fills in, in the order of the fields of ``model``.
        injected: the name and the type of each parameter that the policy does not fill in. The type is Task,
            RolloutContext or Resources.
        schema: the JSON schema of the parameters in ``names``.
    """

    model: type[BaseModel]
    names: tuple[str, ...]
    injected: Mapping[str, type]
    schema: Mapping[str, Any]

    def bind(
        self, arguments: Mapping[str, Any], task: Task, context: RolloutContext, resources: Resources
    ) -> dict[str, Any] | InvalidArguments:
        """Return all keyword arguments for the function, or InvalidArguments if ``arguments`` are not valid.

        Missing arguments get their defaults. Safe conversions, such as "3" to 3, are made.
        """
        try:
            fields = self.model.model_validate(dict(arguments))
        except ValidationError as error:
            return InvalidArguments(f"{_describe_errors(error)}. Expected: {describe_parameters(self.schema)}")
        except Exception as error:  # a validator of the user's own types can raise any exception
            return InvalidArguments(f"{type(error).__name__}. Expected: {describe_parameters(self.schema)}")
        keywords = {name: value for name, (_, value) in zip(self.names, fields, strict=True)}
        available: dict[type, Any] = {Task: task, RolloutContext: context, Resources: resources}
        return keywords | {name: available[kind] for name, kind in self.injected.items()}


def describe_parameters(schema: Mapping[str, Any]) -> str:
    """Return a short text that lists the parameters in the JSON schema of an object.

    Example:
        >>> schema = {"properties": {"query": {"type": "string"}, "k": {"type": "integer"}}, "required": ["query"]}
        >>> describe_parameters(schema)
        'query (string), k (integer, optional)'
    """
    required = schema.get("required", ())
    parameters = (
        f"{name} ({_describe_type(kind)}{'' if name in required else ', optional'})"
        for name, kind in schema.get("properties", {}).items()
    )
    return ", ".join(parameters) or "no arguments"


def parse_signature(function: Callable[..., Any], docs: Docstring) -> FunctionSignature:
    """Return the signature of a function, from its annotations, defaults and docstring.

    Raises:
        InvalidInput: if the annotations cannot be read; if a parameter has no type, has no JSON schema or cannot be
            passed by name; or if the docstring describes an argument that does not exist.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        got = f"annotations that cannot be read ({error})"
        raise _invalid_tool(function, got, "define its types at module level") from error
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        _check_parameter(function, parameter, hints)
    unknown = sorted(docs.arguments.keys() - parameters.keys())
    if unknown:
        got = f"a docstring that explains {', '.join(unknown)}"
        raise _invalid_tool(function, got, "explain only arguments that exist")
    injected = {name: hints[name] for name in parameters if hints[name] in (Task, RolloutContext, Resources)}
    names = tuple(name for name in parameters if name not in injected)
    fields: dict[str, Any] = {
        f"p{index}": _make_field(name, hints[name], parameters[name].default, docs.arguments.get(name))
        for index, name in enumerate(names)
    }
    try:
        config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        model = create_model("Arguments", __config__=config, **fields)
        return FunctionSignature(model, names, injected, _json_schema(model))
    except PydanticUserError as error:
        got = f"a parameter without a JSON schema ({str(error).splitlines()[0]})"
        raise _invalid_tool(function, got, "use plain types or pydantic models") from error


def _check_parameter(function: Callable[..., Any], parameter: inspect.Parameter, hints: Mapping[str, Any]) -> None:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise _invalid_tool(function, f"the parameter {parameter}", "use parameters that can be named one by one")
    if parameter.name not in hints:
        got = f"no type for the parameter {parameter.name!r}"
        raise _invalid_tool(function, got, f"annotate it, e.g. {parameter.name}: str")


def _make_field(name: str, annotation: Any, default: Any, description: str | None) -> tuple[Any, Any]:
    field = Field(alias=name, description=description) if description else Field(alias=name)
    return Annotated[annotation, field], ... if default is inspect.Parameter.empty else default


def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = _remove_titles(model.model_json_schema())
    order = ("type", "properties", "required", "$defs")
    return {"type": "object", "properties": {}} | {key: schema[key] for key in order if key in schema}


def _remove_titles(node: Any) -> Any:
    """Return a JSON schema without the titles that pydantic generates. A property named ``title`` is kept."""
    if isinstance(node, dict):
        return {
            key: _remove_titles(value) for key, value in node.items() if key != "title" or not isinstance(value, str)
        }
    return [_remove_titles(item) for item in node] if isinstance(node, list) else node


def _describe_errors(error: ValidationError) -> str:
    """Return the first errors in one line, such as ``k: there is no such argument; query: Field required``."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    texts = []
    for item in errors[:MAX_SHOWN_ERRORS]:
        message = "there is no such argument" if item["type"] == "extra_forbidden" else item["msg"]
        texts.append(f"{'.'.join(map(str, item['loc']))}: {message}")
    return "; ".join([*texts, "and more"] if len(errors) > MAX_SHOWN_ERRORS else texts)


def _describe_type(schema: Mapping[str, Any]) -> str:
    """Return the type of one property as text, such as ``integer``, ``one of 'a', 'b'`` or ``string or null``."""
    if "anyOf" in schema:
        return " or ".join(_describe_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    return str(schema.get("type", "object" if "$ref" in schema else "anything"))


def _invalid_tool(function: Callable[..., Any], got: str, do: str) -> InvalidInput:
    return InvalidInput(f"tool {function.__name__!r}", got=got, do=do)
