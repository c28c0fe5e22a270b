"""Sizes that keep the house small and readable. Raised only in a commit that says what a user gets for it."""

import ast
from pathlib import Path

from agent_r1.config import setting_keys
from agent_r1.training.config import TrainConfig

ROOT = Path(__file__).parents[1]
FILE_LINES = 800
FUNCTION_LINES = 80
PACKAGE_LINES, PACKAGE_FILES, SETTINGS = 54_995, 262, 105
FILES = [
    path
    for room in ("agent_r1", "environments", "examples", "benchmarks", "research", "tests")
    for path in sorted((ROOT / room).rglob("*.py"))
]


def body_lines(node):
    """Lines of a function's body, its docstring left out."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def long_functions(source):
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [node.name for node in functions if body_lines(node) > FUNCTION_LINES]


def test_the_house_stays_small():
    package = [path for path in FILES if path.parts[len(ROOT.parts)] in ("agent_r1", "environments")]
    settings = [key for key in setting_keys(TrainConfig) if not key.startswith("algorithm.")]
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in package)
    assert (lines <= PACKAGE_LINES, len(package) <= PACKAGE_FILES, len(settings) <= SETTINGS) == (True, True, True)


def test_files_and_functions_stay_small():
    sources = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in FILES}
    assert [name for name, source in sources.items() if len(source.splitlines()) > FILE_LINES] == []
    assert {name: found for name, source in sources.items() if (found := long_functions(source))} == {}


def test_a_long_function_is_seen():
    source = "def f():\n    '''Doc.'''\n" + "    x = 1\n" * 81
    assert long_functions(source) == ["f"]


ALLOWED = {
    "agent_r1/core/task.py",
    "agent_r1/inference/native_decode.py",
    "agent_r1/model/forward.py",
    "agent_r1/trainer/optimizer.py",
    "agent_r1/training/policy.py",
}
"""Files that read attributes of a library's object (configurations of transformers differ from model to model; a
quantized tensor names the tensors in it), or of the dataclasses in a user's tasks."""


def test_attributes_of_our_own_objects_are_not_read_by_name():
    found = {
        str(path.relative_to(ROOT))
        for path in FILES
        if path.parts[len(ROOT.parts)] == "agent_r1"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
    }
    assert found == ALLOWED
