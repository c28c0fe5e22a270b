"""Static analysis of Python source. Invalid Python raises SyntaxError or ValueError."""

from __future__ import annotations

import ast
import doctest
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass


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


def imports_of(source: str, names: set[str]) -> str:
    """Return the imports at the top level of the source that bind one of the names, as source."""
    nodes = [node for node in parse_source(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in nodes:
        node.names = [each for each in node.names if (each.asname or each.name).split(".")[0] in names | {"*"}]
    return "\n".join(ast.unparse(node) for node in nodes if node.names)


def _names(source: str, context: type[ast.expr_context]) -> Iterator[str]:
    for node in ast.walk(parse_source(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, context):
            yield node.id


_GIVES = re.compile(r"\s*(?:==|=>|->|➞|→|=|#|(?:should |will )?returns?\b|is\b)\s*(?P<value>.+)")


@dataclass(frozen=True, slots=True)
class Example:
    """A public example of a task: a call, such as "add(2, 3)", and its expected value, both as Python source code."""

    call: str
    wanted: str


def example_from_assertion(source: str) -> Example:
    """Convert an assertion to an example: ``assert f(1) == 2`` becomes the call ``f(1)`` with the value ``2``.

    Raises SyntaxError if ``source`` is not one assertion.

    Example:
        >>> example_from_assertion("assert not odd(2)")
        Example(call='bool(not odd(2))', wanted='True')
    """
    body = parse_source(source.strip()).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise SyntaxError("no assertion")
    test = body[0].test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        return Example(ast.unparse(test.left), ast.unparse(test.comparators[0]))
    return Example(f"bool({ast.unparse(test)})", "True")


def examples_from_docstring(source: str, function: str) -> tuple[Example, ...]:
    """Return the examples in the docstring of ``function``, which ``source`` defines.

    The examples are the doctests. If there are no doctests, the examples are the lines such as ``f(1) ➞ 2``. An
    expected value must be a literal.
    """
    found = [node for node in ast.walk(parse_source(source)) if isinstance(node, ast.FunctionDef)]
    docs = next((ast.get_docstring(node) or "" for node in found if node.name == function), "")
    return tuple(_doctests(docs)) or tuple(example for line in docs.splitlines() for example in _line(line, function))


def _doctests(docs: str) -> Iterator[Example]:
    try:
        examples = doctest.DocTestParser().get_examples(docs)
    except ValueError:  # doctest refuses the indentation of the docstring
        return
    for example in examples:
        if _parses(example.source.strip()) and _is_literal(example.want.strip()):
            yield Example(example.source.strip(), example.want.strip())


def _line(line: str, function: str) -> Iterator[Example]:
    # For a line such as "f(1) ➞ 2". The arguments must be literals. The value is the longest literal after the arrow.
    start = line.find(f"{function}(")
    ends = [match.end() for match in re.finditer(r"\)", line)] if start >= 0 else []
    end = next((end for end in ends if _is_plain_call(line[start:end])), None)
    gives = None if end is None else _GIVES.match(line, end)
    if gives is None:
        return
    told = gives["value"]
    sizes = [size for size in range(len(told), 0, -1) if size == len(told) or told[size] in " \t.,;#)"]
    wanted = next((told[:size].strip() for size in sizes if _is_literal(told[:size].strip())), None)
    if wanted is not None:
        yield Example(line[start:end], ast.unparse(parse_source(wanted)))


def _parses(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return False
    return True


def _is_plain_call(text: str) -> bool:
    """Return whether the text is a call with only literal arguments."""
    if not _parses(text):
        return False
    call = ast.parse(text, mode="eval").body
    return isinstance(call, ast.Call) and all(
        _is_literal(ast.unparse(value)) for value in (*call.args, *(keyword.value for keyword in call.keywords))
    )


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True
