"""Loops: train, evaluate, keep. The package can also be called, to train an agent of one's own."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A function of this package's name would be replaced by the package as soon as any module in it is imported."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return import_module("agent_r1.train.launch").train(*arguments, **settings)


sys.modules[__name__].__class__ = _CallablePackage
