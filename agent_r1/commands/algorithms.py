"""The command ``algorithms``."""

from __future__ import annotations

import click
from rich.console import Group, RenderableType
from rich.text import Text

from agent_r1.commands.command import columns, json_option, show


@click.command()
@click.argument("name", required=False)
@json_option
def algorithms(name: str | None, as_json: bool) -> None:
    """List the algorithms, or show one with its objective and its parameters."""
    from agent_r1.algorithms.objective import clauses, objective
    from agent_r1.algorithms.presets import ALGORITHMS
    from agent_r1.algorithms.registry import build_algorithm, parameters

    listed = [build_algorithm(known, {}) for known in (ALGORITHMS if name is None else (name,))]
    data = {
        algorithm.name: {
            "objective": objective(algorithm),
            "paper": algorithm.paper,
            "deviations": algorithm.deviations,
            "parameters": parameters(algorithm),
        }
        for algorithm in listed
    }
    if name is None:
        rows = {known.name: f"{known.advantage.formula} {_source(known.paper)}" for known in listed}
        shown: RenderableType = columns(rows)
    else:
        (algorithm,) = listed
        options = {f"--algorithm.{key}": str(value) for key, value in parameters(algorithm).items()}
        notes = {"from": _source(algorithm.paper), "deviations": algorithm.deviations or "-"}
        shown = Group(Text(";\n".join(clauses(algorithm))), Text(), columns(notes), Text(), columns(options))
    show(as_json, {"algorithms": data}, shown)


def _source(paper: str) -> str:
    return f"(arXiv {paper})" if paper else ""
