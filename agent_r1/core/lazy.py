"""Import the submodules of a package at the first use of their public names.

A package that uses :func:`lazy_names` loads only the submodules that are needed. For example, ``import
agent_r1.trainer.config`` loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` function for a package.

    At the first use of a public name, the function imports the submodule that defines the name.

    Args:
        package: the package's ``__name__``.
        modules: for each submodule, the public names that the submodule defines.

    Example:
        __getattr__ = lazy_names(__name__, {"torch_engine": ("TorchEngine",)})
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in module_of:
            return vars(import_module(f"{package}.{module_of[name]}"))[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
