"""The examples in docstrings give the results that they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import agent_r1

ROOMS = ("core", "envs", "sandbox", "tools", "rewards")


def test_examples_in_docstrings() -> None:
    attempted = 0
    for room in ROOMS:
        for module in pkgutil.iter_modules([f"{agent_r1.__path__[0]}/{room}"], f"agent_r1.{room}."):
            results = doctest.testmod(importlib.import_module(module.name), optionflags=doctest.ELLIPSIS)
            assert results.failed == 0, module.name
            attempted += results.attempted
    assert attempted >= 8
