"""The examples in docstrings give the results that they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import agent_r1

ROOMS = ("core", "envs", "sandbox", "tools", "rewards")
MODULES = [
    module.name
    for room in ROOMS
    for module in pkgutil.iter_modules([f"{agent_r1.__path__[0]}/{room}"], f"agent_r1.{room}.")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_there_are_examples_to_run() -> None:
    finder = doctest.DocTestFinder()
    examples = [
        example
        for name in MODULES
        for found in finder.find(importlib.import_module(name))
        for example in found.examples
    ]
    assert len(examples) >= 8
