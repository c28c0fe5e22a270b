"""The site contains every page once, and the options that the documents name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.types import Component
from agent_r1.cli import cli

ROOT = Path(__file__).parents[1]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "results.md"]
NAVIGATION = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2], re.M)


def test_the_navigation_has_every_page_once_and_a_hook_adds_the_decisions() -> None:
    pages = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    listed = {page.as_posix() for page in pages if page.parts[0] != "decisions"}
    assert sorted(NAVIGATION) == sorted(listed | {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"})


def components(base: type[Component]) -> Iterator[type[Component]]:
    for kind in base.__subclasses__():
        yield kind
        yield from components(kind)


PARAMETERS = {field for kind in (Algorithm, *components(Component)) for field in kind.model_fields}
COMMANDS = cli.commands.values()
OPTIONS = {option for command in COMMANDS for one in command.params for option in one.opts} | {"--help"}
FOREIGN = {
    "--enable-lora",
    "--worker-extension-cls",
    "--index-url",
    "--force-reinstall",
    "--no-deps",
    "--logdir",
    "--smoke",
    "--prompt",
    "--algorithm.loss.strength",
}
"""Options of other programs, and of a component that a page defines."""


def exists(option: str) -> bool:
    """Return whether a command has the option. A parameter of an algorithm exists if a component has its name."""
    first, *rest = option.removeprefix("--").split(".")
    if first == "algorithm":
        return all(part in PARAMETERS or part == "KEY" for part in rest)
    if first in ("extra_rewards", "reward_weights"):
        return True  # the rest is the name of a reward
    return option in OPTIONS or any(name.startswith(f"{option}.") for name in OPTIONS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_options_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`(--[a-z0-9_-]+(?:\.[A-Za-z_]+)*)", page.read_text("utf-8"))
    assert {option for option in named if not exists(option)} <= FOREIGN


def test_an_option_that_does_not_exist_is_found() -> None:
    assert exists("--algorithm.kl.coefficient") and exists("--trainer.lora.rank")
    assert not exists("--algorithm.kl.coef") and not exists("--trainer.lora.size")
