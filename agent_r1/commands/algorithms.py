"""The command ``algorithms``, which lists the algorithms and explains single algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group, RenderableType
from rich.text import Text

from agent_r1.commands.command import bounds_of, columns, first_line, json_option, show, type_text

if TYPE_CHECKING:
    from agent_r1.algorithms.algorithm import Algorithm
    from agent_r1.algorithms.component import Component


@click.command()
@click.argument("name", required=False)
@click.option("--algorithm.epochs", "epochs", type=click.IntRange(1), help="Passes over a batch.")
@click.option("--trainer.minibatches", "minibatches", type=click.IntRange(1), default=1, help="Minibatches of a pass.")
@click.option("--max_staleness", type=click.IntRange(0), default=0, help="Largest age of a sample in steps.")
@json_option
def algorithms(name: str | None, epochs: int | None, minibatches: int, max_staleness: int, as_json: bool) -> None:
    """List the algorithms, or show the objective, the parameters and the inactive terms of one algorithm.

    An inactive term cannot change an update. Which terms are inactive depends on how often a batch is used, and on how
    old its samples are.
    """
    from agent_r1.algorithms.objective import inactive_terms, objective
    from agent_r1.algorithms.presets import ALGORITHMS
    from agent_r1.algorithms.registry import build_algorithm, parameters

    settings = {} if epochs is None else {"epochs": epochs}
    listed = [build_algorithm(known, settings) for known in (ALGORITHMS if name is None else (name,))]
    data = {
        algorithm.name: {
            "objective": objective(algorithm),
            "paper": algorithm.paper,
            "deviations": algorithm.deviations,
            "inactive": inactive_terms(algorithm, algorithm.epochs * minibatches, max_staleness),
            "parameters": parameters(algorithm),
        }
        for algorithm in listed
    }
    summary = {known.name: f"{known.advantage.formula} {_source(known.paper)}" for known in listed}
    show(
        as_json,
        {"algorithms": data},
        columns(summary) if name is None else _describe(listed[0], data[listed[0].name]["inactive"]),
    )


def _describe(algorithm: Algorithm, inactive: object) -> RenderableType:
    """Return the objective, paper, deviations, inactive terms and parameters of an algorithm, for the terminal."""
    from agent_r1.algorithms.objective import clauses

    notes = {"from": _source(algorithm.paper) or "-", "deviations": algorithm.deviations or "-"}
    notes |= {"inactive": str(inactive)} if inactive else {}
    formatter = click.HelpFormatter(width=Console().width)
    formatter.write_dl(list(_rows(algorithm, "--algorithm.", is_on=True)))
    return Group(Text(";\n".join(clauses(algorithm))), Text(), columns(notes), Text(), Text(formatter.getvalue()))


def _rows(component: Component, prefix: str, is_on: bool) -> Iterator[tuple[str, str]]:
    """Yield the option and the explanation of each parameter of a component.

    A component that is turned off is included, with its default values.
    """
    from agent_r1.algorithms.component import Component
    from agent_r1.algorithms.registry import DESCRIPTIVE, choices

    for name, value in component:
        field, key = type(component).model_fields[name], f"{prefix}{name}"
        options, meaning = choices(component, name), first_line(field.description)
        if name in DESCRIPTIVE:
            continue
        if not options:
            shown = ["value: " if is_on else "default: ", "none" if value is None else str(value).lower()]
            bounds = f"; {bounds_of(field)}" if bounds_of(field) else ""
            yield f"{key} {type_text(field)}", f"{meaning} [{''.join(shown)}{bounds}]"
        elif isinstance(value, Component):
            if len(options) > 1:
                yield f"{key} NAME", f"{meaning} One of {', '.join(options)}. [value: {vars(value)['name']}]"
            yield from _rows(value, f"{key}.", is_on)
        elif len(options) > 1:
            yield f"{key} NAME", f"{meaning} One of {', '.join(options)}; none turns it off. [value: none]"
        else:
            (absent,) = options.values()
            yield key, f"{first_line(absent.__doc__)} Any parameter of it turns it on, none turns it off. [value: none]"
            yield from _rows(absent(), f"{key}.", is_on=False)


def _source(paper: str) -> str:
    return f"(arXiv {paper})" if paper else ""
