"""Packages that only some users need."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from agent_r1.core.errors import InvalidInput


def import_extra(name: str, extra: str) -> Any:
    """Import ``name``, a module of the import_extra that the extra ``extra`` installs.

    Raises InvalidInput, naming the extra, where the import_extra is missing.
    """
    require_extra(name, extra)
    return import_module(name)


def require_extra(name: str, extra: str) -> None:
    """See that a import_extra is there, without importing it here. Raises InvalidInput as :func:`import_extra` does."""
    if find_spec(name.split(".")[0]) is None:
        raise InvalidInput(f"import_extra {extra}", got="it is not installed", do=f"pip install 'agent-r1[{extra}]'")
