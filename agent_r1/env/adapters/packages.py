"""Packages that only some users need."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from agent_r1.core.errors import InvalidInput


def package(name: str, extra: str) -> Any:
    """Import ``name``, a module of the package that the extra ``extra`` installs.

    Raises InvalidInput, naming the extra, where the package is missing.
    """
    require(name, extra)
    return import_module(name)


def require(name: str, extra: str) -> None:
    """See that a package is there, without importing it here. Raises InvalidInput as :func:`package` does."""
    if find_spec(name.split(".")[0]) is None:
        raise InvalidInput(f"package {extra}", got="it is not installed", do=f"pip install 'agent-r1[{extra}]'")
