"""The public names are those in `__all__` of the package and of its rooms. A new one is added here on purpose."""

import ast
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "agent_r1"
LISTED: Mapping[str, list[str]] = json.loads((Path(__file__).parent / "public_names.json").read_text())
MOST_NAMES = 350


def exported() -> dict[str, list[str]]:
    """The names in each `__all__`, by package, read from the syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("__init__.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
                module = ".".join(path.parent.relative_to(ROOT).parts)
                found[module] = sorted(ast.literal_eval(node.value))
    return found


def test_the_public_names_are_the_listed_ones() -> None:
    assert exported() == LISTED, "add or remove the name in tests/public_names.json, and say so in CHANGELOG.md"


@pytest.mark.parametrize("module", LISTED)
def test_every_public_name_can_be_imported(module: str) -> None:
    for name in LISTED[module]:
        getattr(import_module(module), name)


def test_the_public_surface_stays_small() -> None:
    assert sum(map(len, LISTED.values())) <= MOST_NAMES


def test_every_room_says_which_names_are_public() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert {module.split(".")[1] for module in LISTED if "." in module} == rooms - {"commands"}
