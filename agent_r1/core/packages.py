"""Optional packages, which the extras of agent-r1 install."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from agent_r1.core.errors import InvalidInput


def import_extra(name: str, extra: str) -> Any:
    """Import and return the module ``name`` of an optional dependency.

    Raise InvalidInput with the command that installs ``extra`` if the module is not installed.
    """
    require_extra(name, extra)
    return import_module(name)


def require_extra(name: str, extra: str) -> None:
    """Raise InvalidInput if the module ``name`` is not installed. The module is not imported."""
    if find_spec(name.split(".")[0]) is None:
        raise InvalidInput(f"extra {extra}", got="an environment without it", do=f"pip install 'agent-r1[{extra}]'")
