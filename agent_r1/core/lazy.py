"""Import the submodules of a package at the first use of their public names.

For example, ``import agent_r1.trainer.config`` loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` function for a package.

    The function imports a submodule when one of its public names is first used. ``modules`` maps each submodule to its
    public names.

    Example:
        __getattr__ = lazy_names(__name__, {"torch_engine": ("TorchEngine",)})
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in module_of:
            return vars(import_module(f"{package}.{module_of[name]}"))[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
