"""algorithms: the rows, with their numbers."""

from __future__ import annotations

import argparse

from rich.console import Group, RenderableType
from rich.text import Text

from agent_r1.commands.command import Command, Invocation, columns, declare_json, show


def _declare_algorithms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this one with its terms")
    declare_json(parser)


def _algorithms(invocation: Invocation) -> None:
    from agent_r1.algorithms.objective import clauses, objective
    from agent_r1.algorithms.presets import ALGORITHMS
    from agent_r1.algorithms.registry import build_row, terms

    name = invocation.options["name"]
    rows = [build_row(known, {}) for known in (ALGORITHMS if name is None else (name,))]
    data = {
        row.name: {"objective": objective(row), "paper": row.paper, "differs": row.differs, "terms": dict(terms(row))}
        for row in rows
    }
    if name is None:
        shown: RenderableType = columns({row.name: f"{row.advantage.formula} {_source(row.paper)}" for row in rows})
    else:
        numbers = {f"--row.{key}": str(value) for key, value in terms(rows[0])}
        formula = Text(";\n".join(clauses(rows[0])))
        notes = {"from": _source(rows[0].paper), "differs": rows[0].differs or "-"}
        shown = Group(formula, Text(), columns(notes), Text(), columns(numbers))
    show(invocation, {"algorithms": data}, shown)


def _source(paper: str) -> str:
    return f"(arXiv {paper})" if paper else ""


ALGORITHMS = Command("list the algorithms, or show one with its numbers", _algorithms, _declare_algorithms)
