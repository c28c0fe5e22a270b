"""Task sets by name, or by the path of a Python file or folder with a function ``build``."""

from __future__ import annotations

import ast
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from agent_r1.core.errors import AgentR1Error, InvalidInput, suggest
from agent_r1.core.taskset import TaskSet
from agent_r1.sandbox.config import SandboxLevel


class Entry(NamedTuple):
    """A task set of this package. ``target`` is "module:function" of the function that builds it."""

    target: str
    description: str


TRANSCRIPTS = "transcripts"
"""The task set of a run of ``agent-r1 sft``: conversations that others have written, which the run imitates."""

_MULTIHOP = "agent_r1.tasksets.multihop:build"

TASKSETS: Mapping[str, Entry] = {
    "tinywiki": Entry(
        "agent_r1.tasksets.tinywiki:build",
        "a generated encyclopedia with 1-, 2- and 3-hop questions; needs no files",
    ),
    "hotpotqa": Entry(_MULTIHOP, "HotpotQA: 2-hop questions over Wikipedia; needs --data"),
    "2wiki": Entry(_MULTIHOP, "2WikiMultihopQA: 2- to 4-hop questions over Wikipedia; needs --data and --corpus"),
    "musique": Entry(_MULTIHOP, "MuSiQue: 2- to 4-hop questions over Wikipedia; needs --data and --corpus"),
    "multihop": Entry(_MULTIHOP, "several of these, mixed as the TOML file that --data names says"),
    "math": Entry("agent_r1.tasksets.math:build", "mathematics with a Python interpreter: GSM8K, MATH; needs --data"),
    "code": Entry("agent_r1.tasksets.code:build", "functions to write, try and fix: HumanEval, MBPP; needs --data"),
}


def build(
    name: str,
    data: Path | None = None,
    corpus: str | Path | None = None,
    seed: int = 0,
    sandbox: SandboxLevel | None = None,
    encoder: str = "",
) -> TaskSet:
    """Build the task set called ``name``: a key of ``TASKSETS``, or a path such as "environments/people".

    The function that builds the task set declares by its parameters which of these arguments it takes. A parameter
    without a default value must be given.

    Args:
        data: a file, a folder, or the name of a data set on the hub.
        corpus: a file of passages, or the address of a retrieval server.
        seed: determines the training tasks or their order.
        sandbox: the sandbox level for code that the policy writes; None for the default level.
        encoder: the sentence encoder of the search; "" for BM25.

    Raises:
        InvalidInput: the name is unknown, an argument cannot be used, or the sandbox level is not available.
    """
    make = _find(name)
    parameters = signature(make).parameters
    options = {"data": data, "corpus": corpus, "encoder": encoder or None, "sandbox": sandbox}
    given = {option: value for option, value in options.items() if value is not None}
    for option, value in given.items():
        if option not in parameters:
            takes = [f"--{each}" for each in ("seed", *options) if each in parameters]
            do = f"leave it out: {name} takes {', '.join(takes) or 'no options'}"
            raise InvalidInput(option, got=value, do=do)
    for option in options:
        if option in parameters and parameters[option].default is parameters[option].empty and option not in given:
            raise InvalidInput(f"--{option} for {name}", got="nothing", do="give it, as docs/data.md describes")
    fixed = {"name": name, "seed": seed}
    taskset = make(**given, **{option: value for option, value in fixed.items() if option in parameters})
    return replace(taskset, name=name)  # the name with which a run finds the task set again


def is_available(name: str) -> bool:
    """Return whether a run can find the task set by its name: it is built in or has a path."""
    return name in TASKSETS or "/" in name or name.endswith((".py", ".toml"))


def has_build(file: Path) -> bool:
    """Return whether a Python file defines a function ``build``. The file is parsed, not run."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == "build" for node in body)


def _find(name: str) -> Callable[..., TaskSet]:
    if name in TASKSETS:
        module, _, function = TASKSETS[name].target.partition(":")
        found: Callable[..., TaskSet] = vars(import_module(module))[function]
        return found
    if is_available(name):
        values = _import_path(Path(name))
        if not callable(values.get("build")):
            raise InvalidInput(name, got="no function build", do="define build(seed, ..), which returns a TaskSet")
        return values["build"]
    beside = Path("environments", name.replace("-", "_"))
    near = next((path for path in (beside, beside.with_suffix(".py")) if os.path.exists(path)), None)
    hint = f"did you mean {str(near)!r}?" if near else suggest(name, TASKSETS)
    do = f"{hint} use one of: {', '.join(TASKSETS)}, or the path of a task set".strip()
    raise InvalidInput("taskset", got=repr(name), do=do)


def _import_path(path: Path) -> Mapping[str, Any]:
    """Import a Python file or a folder with ``__init__.py``, and return its global names."""
    file = path / "__init__.py" if os.path.isdir(path) else path  # pathlib raises for a long name
    if not os.path.isfile(file):
        raise InvalidInput("taskset", got=str(path), do="give a Python file, or a folder with __init__.py")
    module = path.resolve().with_suffix("")
    root = module.parent
    while (root / "__init__.py").is_file():  # so that modules of one folder can import each other
        root = root.parent
    name = ".".join(module.relative_to(root).parts)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    with import_errors(file):
        imported = import_module(name)
    if Path(imported.__file__ or "").resolve() != file.resolve():
        raise InvalidInput(str(path), got=f"a name that Python already uses for {imported.__file__}", do="rename it")
    return vars(imported)


@contextmanager
def import_errors(file: Path) -> Iterator[None]:
    """Convert the errors of code that a user wrote in ``file`` to InvalidInput with the line of the error."""
    try:
        yield
    except AgentR1Error:
        raise
    except SyntaxError as error:
        got = f"{error.msg} (line {error.lineno})"
        raise InvalidInput(str(file), got=got, do="fix the file") from error
    except (Exception, SystemExit) as error:  # sys.exit in the file must not end the command
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(file)]
        got = f"{type(error).__name__}: {error} (line {lines[-1] if lines else None})"
        raise InvalidInput(str(file), got=got, do="fix the file") from error
