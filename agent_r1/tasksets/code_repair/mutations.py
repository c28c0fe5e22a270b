"""Mutations: changes of one place in a Python function, such as ``<`` to ``<=``. Mutations plant bugs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass

from agent_r1.tasksets.code.source import parse_source

COMPARISONS: Mapping[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}

OPERATORS: Mapping[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add, ast.Pow),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Div, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitOr,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}

ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
"""The operators whose operands a mutation swaps. With other operators, a swap rarely changes the value."""

NAMES: Mapping[str, str] = {"min": "max", "max": "min", "any": "all", "all": "any", "upper": "lower", "lower": "upper"}


@dataclass(frozen=True, slots=True)
class Mutation:
    """A copy of a function with one changed line. ``line`` is the index of this line, from 0.

    Example:
        Mutation(kind="operator", line=1, source="def double(x):\\n    return 2 + x")
    """

    kind: str
    line: int
    source: str


def mutations(source: str) -> tuple[Mutation, ...]:
    """Return all mutations of a function, without repetitions, in the order of the syntax tree.

    Each mutation differs from the function in exactly one line. ``source`` must be a text from :func:`plain_source`.

    Example:
        >>> [mutation.source.splitlines()[1].strip() for mutation in mutations("def f(x):\\n    return x < 2")]
        ['return x <= 2', 'return x > 2', 'return x < 3', 'return x < 1']
    """
    tree, lines = parse_source(source), source.splitlines()
    found: dict[str, Mutation] = {}
    for kind, changed in _changed_sources(tree):
        others = changed.splitlines()
        if len(others) != len(lines):
            continue
        different = [index for index, (old, new) in enumerate(zip(lines, others, strict=True)) if old != new]
        if len(different) == 1:
            found.setdefault(changed, Mutation(kind, different[0], changed))
    return tuple(found.values())


def plain_source(source: str) -> str:
    """Return the source as ``ast.unparse`` writes it: no comments, one statement per line."""
    return ast.unparse(parse_source(source))


def _changed_sources(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (kind of the change, source of the changed function) for each change of one node.

    Each change is made in ``tree`` itself, and is undone afterwards.
    """
    for parent in list(ast.walk(tree)):
        for name, value in list(ast.iter_fields(parent)):
            if isinstance(value, list):
                for index, node in enumerate(list(value)):
                    for kind, other in _alternatives(node):
                        value[index] = other
                        yield kind, ast.unparse(ast.fix_missing_locations(tree))
                        value[index] = node
            else:
                for kind, other in _alternatives(value):
                    setattr(parent, name, other)
                    yield kind, ast.unparse(ast.fix_missing_locations(tree))
                    setattr(parent, name, value)


def _alternatives(node: object) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind of the change, replacement) for each node that can replace ``node``."""
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield "comparison", _with(node, ops=[*ops[:index], other(), *ops[index + 1 :]])
        case ast.BinOp(op=op, left=left, right=right):
            yield from (("operator", _with(node, op=other())) for other in OPERATORS.get(type(op), ()))
            if isinstance(op, ORDERED):
                yield "swap", _with(node, left=right, right=left)
        case ast.AugAssign(op=op):
            yield from (("operator", _with(node, op=other())) for other in OPERATORS.get(type(op), ()))
        case ast.BoolOp(op=op):
            yield "boolean", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "negation", operand
        case ast.If(test=test) | ast.While(test=test) if not _is_negated(test):
            yield "negation", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (("constant", ast.Constant(other)) for other in (value + 1, value - 1) if other >= 0)
        case ast.Call(args=[first, second]) if not isinstance(first, ast.Starred) and not isinstance(
            second, ast.Starred
        ):
            yield "swap", _with(node, args=[second, first])
        case ast.Slice(lower=lower, upper=upper):
            yield from (("slice", _with(node, **{end: None})) for end in ("lower", "upper") if _end(node, end))
            if lower is None and upper is not None:
                yield "slice", _with(node, lower=ast.Constant(1))
        case ast.Name(id=name) if name in NAMES:
            yield "name", _with(node, id=NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield "name", _with(node, attr=NAMES[name])


def _end(node: ast.Slice, name: str) -> ast.expr | None:
    return node.lower if name == "lower" else node.upper


def _is_negated(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    other = copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other
