"""What a command is, and what all commands share: their options, what they show, and how they fail."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from agent_r1.config import Layer, from_text, read_toml
from agent_r1.core.errors import AgentR1Error
from agent_r1.training.report import Progress, Silence, progress_on


@dataclass(frozen=True, slots=True)
class Invocation:
    """A command as it was typed: its options, and its settings as text by dotted key."""

    options: Mapping[str, Any]
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Command:
    """One command. ``config`` is the class of the settings it takes, None where it takes none."""

    help: str
    run: Callable[[Invocation], None]
    declare: Callable[[argparse.ArgumentParser], None]
    config: type[BaseModel] | None = None


class Broken(AgentR1Error):
    """What was to be proved does not hold."""


def declare_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of text")


def declare_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def declare_output(parser: argparse.ArgumentParser) -> None:
    declare_json(parser)
    declare_quiet(parser)


def layers(cls: type[BaseModel], invocation: Invocation) -> list[Layer]:
    """The settings that were typed, over those of the file that --config names."""
    toml = invocation.options["config"]
    return [from_text(cls, invocation.settings), *([read_toml(Path(toml))] if toml else ())]


def progress(invocation: Invocation) -> Progress:
    return Silence() if invocation.options["quiet"] else progress_on(Console(stderr=True))


def show(invocation: Invocation, data: Mapping[str, Any], text: RenderableType) -> None:
    if invocation.options["json"]:
        print(json.dumps(data))
    else:
        Console(highlight=False).print(text)


def columns(rows: Mapping[str, str]) -> Table:
    """Names on the left, what they mean on the right, wrapped under itself."""
    grid = Table.grid(padding=(0, 2))
    for name, meaning in rows.items():
        grid.add_row(Text(name), Text(meaning))
    return grid
