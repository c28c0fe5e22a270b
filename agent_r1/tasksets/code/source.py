"""Static analysis of Python source. Invalid Python raises SyntaxError or ValueError."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator


def parse_source(source: str) -> ast.Module:
    """Return the syntax tree of the source, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def defined_names(source: str) -> set[str]:
    """Return the names that the top level of the source defines: functions, classes and variables."""
    named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    body = parse_source(source).body
    values = {name for node in body if not isinstance(node, named) for name in assigned_names(ast.unparse(node))}
    return {node.name for node in body if isinstance(node, named)} | values


def used_names(source: str) -> set[str]:
    """Return the names whose values the source reads. For ``x = y`` the result is {"y"}."""
    return set(_names(source, ast.Load))


def assigned_names(source: str) -> set[str]:
    """Return the names to which the source assigns values. For ``x = y`` the result is {"x"}."""
    return set(_names(source, ast.Store))


def imported_packages(source: str) -> set[str]:
    """Return the top-level packages that the source imports, such as {"numpy", "os"}."""
    nodes = list(ast.walk(parse_source(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in plain | named}


def _names(source: str, context: type[ast.expr_context]) -> Iterator[str]:
    for node in ast.walk(parse_source(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, context):
            yield node.id
