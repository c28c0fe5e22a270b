"""The command ``algorithms``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group, RenderableType
from rich.text import Text

from agent_r1.commands.command import SettingsCommand, bounds_of, columns, first_line, json_option, show, type_text
from agent_r1.config import Layer, resolve
from agent_r1.training.config import TrainConfig

if TYPE_CHECKING:
    from agent_r1.algorithms.algorithm import Algorithm
    from agent_r1.algorithms.types import Component


@click.command(cls=SettingsCommand, config=TrainConfig, keys=())
@click.argument("name", required=False)
@json_option
def algorithms(name: str | None, settings: Layer, as_json: bool) -> None:
    """List the algorithms, or show the objective and the parameters of one algorithm.

    Parameters can be given as in 'agent-r1 train', such as --algorithm.loss cispo.
    """
    from agent_r1.algorithms.algorithm import objective
    from agent_r1.algorithms.presets import ALGORITHMS
    from agent_r1.algorithms.registry import parameters

    listed = [_with_settings(known, settings) for known in (ALGORITHMS if name is None else (name,))]
    data = {
        algorithm.name: {
            "objective": objective(algorithm),
            "paper": algorithm.paper,
            "deviations": algorithm.deviations,
            "parameters": parameters(algorithm),
        }
        for algorithm in listed
    }
    summary = {known.name: f"{known.advantage.formula} {_source(known.paper)}" for known in listed}
    show(as_json, {"algorithms": data}, columns(summary) if name is None else _describe(listed[0]))


def _with_settings(name: str, settings: Layer) -> Algorithm:
    return resolve(TrainConfig, [settings, Layer("NAME", {"algorithm": name})]).algorithm


def _describe(algorithm: Algorithm) -> RenderableType:
    from agent_r1.algorithms.algorithm import clauses

    notes = {"from": _source(algorithm.paper) or "-", "deviations": algorithm.deviations or "-"}
    formatter = click.HelpFormatter(width=Console().width)
    formatter.write_dl(list(_rows(algorithm, "--algorithm.", is_on=True)))
    return Group(Text(";\n".join(clauses(algorithm))), Text(), columns(notes), Text(), Text(formatter.getvalue()))


def _rows(component: Component, prefix: str, is_on: bool) -> Iterator[tuple[str, str]]:
    from agent_r1.algorithms.registry import DESCRIPTIVE, choices
    from agent_r1.algorithms.types import Component

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
