"""The parts of ``bfcl-eval`` that are used: questions, possible answers, checkers, and the types of functions."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, Text, ToolCall, ToolSpec

INSTALL = "pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath"
"""The commands that install what is needed. The package's other dependencies are clients of models."""

_MODELS = "bfcl_eval.constants.model_config"
_MODEL = "agent-r1"


def require_package() -> Path:
    """Return the folder of the package's data. Raise InvalidInput if the package is not installed."""
    spec = find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise InvalidInput("package bfcl-eval", got="an environment without it", do=INSTALL)
    return Path(spec.submodule_search_locations[0], "data")


@lru_cache(maxsize=32)
def read_lines(file: str) -> tuple[Mapping[str, Any], ...]:
    """Return the JSON lines of a file in the folder of the package's data."""
    return tuple(map(json.loads, (require_package() / file).read_text("utf-8").splitlines()))


def questions(category: str) -> Iterator[tuple[Mapping[str, Any], Sequence[Any]]]:
    """Yield each question of a category with its ground truth."""
    answers = {row["id"]: row["ground_truth"] for row in read_lines(f"possible_answer/BFCL_v4_{category}.json")}
    for row in read_lines(f"BFCL_v4_{category}.json"):
        yield row, answers[row["id"]]


def held_out(ids: Sequence[str], count: int) -> frozenset[str]:
    """Return ``count`` of the ids. The choice depends on the ids alone."""
    return frozenset(sorted(ids, key=lambda each: hashlib.sha256(each.encode()).digest())[:count])


def tool_name(function: str) -> str:
    """Return the name of a function as the policy sees it: without dots, as servers of models demand."""
    return function.replace(".", "_")


def tool_spec(function: Mapping[str, Any]) -> ToolSpec:
    return ToolSpec(tool_name(function["name"]), function["description"], _json_schema(function["parameters"]))


def _json_schema(described: Mapping[str, Any]) -> dict[str, Any]:
    # The package's types are those of several languages, such as "dict" and "tuple".
    types: Mapping[str, str] = import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI
    kept = ("description", "enum", "default", "required")
    schema = {key: described[key] for key in kept if key in described}
    schema["type"] = types.get(described.get("type", "string"), "string")
    if "properties" in described:
        schema["properties"] = {name: _json_schema(each) for name, each in described["properties"].items()}
    if "items" in described:
        schema["items"] = _json_schema(described["items"])
    return schema


def several_calls(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Message:
    """Return an assistant message with calls: names of tools with arguments."""
    made = (ToolCall(f"call_{index}", name, arguments, "") for index, (name, arguments) in enumerate(calls))
    return Message("assistant", (Text(""),), tuple(made))


def calls_are_correct(
    category: str, functions: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]], truth: Sequence[Any]
) -> bool:
    """Return whether the package's checker accepts ``calls``: one mapping from a tool's name to its arguments each."""
    check, language = load_checker()
    try:
        verdict = check(functions, list(calls), truth, language, category, _MODEL)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError):
        # The checker does not expect every value: texts where objects belong, or an integer beyond all floats.
        return False
    return bool(verdict["valid"])


@cache
def load_checker() -> tuple[Callable[..., Any], Any]:
    """Return the package's checker of calls, and its name for Python. Raise InvalidInput without the package."""
    require_package()
    # The checker looks up only one thing about a model: whether dots in the names of functions became underscores. The
    # real table imports the clients of all models, which need not be installed.
    models = {_MODEL: SimpleNamespace(underscore_to_dot=True)}
    stand_in = ModuleType(_MODELS)
    vars(stand_in)["MODEL_CONFIG_MAPPING"] = models
    own = sys.modules.get(_MODELS)
    sys.modules[_MODELS] = stand_in
    try:
        module = import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    finally:
        del sys.modules[_MODELS]
        if own is not None:
            sys.modules[_MODELS] = own
    vars(module)["MODEL_CONFIG_MAPPING"] = models  # if the module was imported before, with the real table
    return module.ast_checker, import_module("bfcl_eval.constants.enums").Language.PYTHON
