"""Common parts of the commands: options for settings, and functions that print results."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click
from annotated_types import Ge, Gt, Le, Lt
from click.shell_completion import CompletionItem
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from agent_r1.config import (
    NESTED_BY_NAME,
    Layer,
    find_field,
    from_text,
    has_setting,
    iter_fields,
    nested_model,
    read_toml,
    setting_keys,
)
from agent_r1.core.errors import InvalidInput, suggest
from agent_r1.core.task import check_text
from agent_r1.store.folder import is_run, run_folder
from agent_r1.training.progress import Progress, SilentProgress, make_progress

TEXTS = f"{__name__}.texts"
ENTRIES = f"{__name__}.entries"
ALL = f"{__name__}.all"


class EncodableText(click.ParamType):
    """The type of an option whose text is looked up in the database of a run."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        check_text("option" if param is None else param.opts[-1], value)
        return value


class FilePath(click.ParamType):
    """The type of an option that is a path. A wrong path raises an error only when the file is opened."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


config_option = click.option(
    "--config", "config_file", type=FilePath(), metavar="FILE.toml", help="Read settings from a file."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
quiet_option = click.option("--quiet", is_flag=True, help="Print no progress.")


class SettingOption(click.Option):
    """The click option for one setting."""

    def __init__(self, key: str, field: FieldInfo, section: str, *, name: str, hidden: bool = False) -> None:
        text = first_line(field.description)
        super().__init__(
            [name, f"--{key}"],
            metavar=type_text(field),
            help=f"{text} {_default_and_bounds(field)}".strip(),
            expose_value=False,
            callback=_collect,
            hidden=hidden,
        )
        self.key, self.section, self.field = key, section, field

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None or get_origin(self.field.annotation) is not dict:
            return record
        return f"--{self.key}.NAME {self.metavar}", record[1]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(choice) for choice in _choices(self.field) if choice.startswith(incomplete)]


class SettingsCommand(click.Command):
    """A command with one option for each setting of ``config`` (in ``keys``), of which ``--help`` shows the ``common``.

    The callback has an argument ``settings``: a :class:`Layer` of what the user typed, with underscores or hyphens.
    """

    def __init__(
        self,
        *args: Any,
        config: type[BaseModel],
        keys: Collection[str] | None = None,
        common: Collection[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.config, self._common = config, common
        fields = [(key, field) for key, field in iter_fields(config) if keys is None or key in keys]
        for key, field in fields:
            self.params.append(SettingOption(key, field, _section(config, key), name=key.replace(".", "__")))
        if common is not None:
            text = f"Show all {len(fields)} settings, of which --help shows the most common."
            options: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "help": text}
            self.params.append(click.Option(["--help_all"], callback=_show_all_help, **options))

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *ctx.meta.get(ENTRIES, ())]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ENTRIES], ctx.meta[TEXTS] = list(self._entry_options(args)), {}
        rest = super().parse_args(ctx, args)
        ctx.params["settings"] = from_text(self.config, ctx.meta[TEXTS])
        return rest

    def _entry_options(self, args: Sequence[str]) -> Iterator[SettingOption]:
        typed = dict.fromkeys(underscored(arg[2:].partition("=")[0]) for arg in args if arg.startswith("--"))
        entries = typed.keys() - set(setting_keys(self.config))
        for number, key in enumerate(sorted(entries)):
            if has_setting(self.config, key):
                field = find_field(self.config, key)
                assert field is not None
                yield SettingOption(key, field, "", name=f"entry_{number}", hidden=True)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = None if ALL in ctx.meta else self._common
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            if isinstance(param, SettingOption) and not (shown is None or param.key in shown):
                continue
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                section = param.section if isinstance(param, SettingOption) else "Options"
                sections.setdefault(section, []).append(record)
            if isinstance(param, SettingOption) and NESTED_BY_NAME in param.field.metadata and not param.hidden:
                text = f"A component or parameter of the {param.key}: 'agent-r1 {param.key}s NAME' lists them."
                sections[param.section].append((f"--{param.key}.KEY VALUE", text))
        for title, records in sorted(sections.items(), key=lambda item: ": " in item[0]):  # nested classes last
            with formatter.section(title):
                formatter.write_dl(records)


def _show_all_help(ctx: click.Context, option: click.Parameter, is_given: bool) -> None:
    if is_given and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def first_line(text: str | None) -> str:
    """Return the first paragraph of a docstring as one line of plain text; "" if ``text`` is None."""
    return " ".join((text or "").partition("\n\n")[0].split()).replace("``", "")


def underscored(option: str) -> str:
    return option.replace("-", "_")


def _collect(ctx: click.Context, option: click.Parameter, text: str | None) -> None:
    assert isinstance(option, SettingOption)
    if text is not None:
        ctx.meta[TEXTS][option.key] = text


def _section(config: type[BaseModel], key: str) -> str:
    """Return the heading of a setting in ``--help``: of its group (``trainer.ranks``), or of the class that declares
    it.
    """
    name, _, below = key.partition(".")
    field = config.model_fields[name]
    if below and nested_model(field):
        return f"{name}: {(field.description or '').rstrip('.')}"
    declaring = (base for base in reversed(config.__mro__) if name in vars(base).get("__annotations__", {}))
    return str(vars(next(declaring)).get("section", "Settings"))


def type_text(field: FieldInfo) -> str:
    """Return the type of a setting as ``--help`` shows it, such as INT or mean|sum."""
    if NESTED_BY_NAME in field.metadata:
        return "NAME"
    return _annotation_text(field.annotation)


def _annotation_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, UnionType):
        return "|".join(_annotation_text(option) for option in arguments if option is not NoneType)
    if origin is tuple:
        return ",".join(".." if item is ... else _annotation_text(item) for item in arguments)
    if origin is dict:
        return _annotation_text(arguments[1])
    if origin is not None:  # Annotated
        return _annotation_text(arguments[0])
    return {int: "INT", float: "FLOAT", bool: "true|false", Path: "PATH"}.get(annotation, "TEXT")


def _default_and_bounds(field: FieldInfo) -> str:
    """Return the default and the bounds of a setting, such as ``[default: 200; >= 1]``; "" if there are none."""
    default = field.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    shown = [] if default in (None, "", PydanticUndefined) else [f"default: {default}"]
    shown += ["required"] if field.is_required() else []
    shown += [bounds_of(field)] if bounds_of(field) else []
    return f"[{'; '.join(shown)}]" if shown else ""


def bounds_of(field: FieldInfo) -> str:
    """Return the bounds of a numeric setting, such as ``>= 1; < 10``; "" if there are none."""
    shown = []
    for bound in field.metadata:
        match bound:
            case Ge(ge=value):
                shown.append(f">= {value}")
            case Gt(gt=value):
                shown.append(f"> {value}")
            case Le(le=value):
                shown.append(f"<= {value}")
            case Lt(lt=value):
                shown.append(f"< {value}")
    return "; ".join(shown)


def _choices(field: FieldInfo) -> tuple[str, ...]:
    options = [field.annotation, *get_args(field.annotation)]
    literals = (get_args(option) for option in options if get_origin(option) is Literal)
    return tuple(str(choice) for choices in literals for choice in choices)


def with_file(settings: Layer, file: Path | None) -> list[Layer]:
    """Return ``settings`` from the command line, followed by those of the TOML file."""
    return [settings] if file is None else [settings, read_toml(file)]


def progress_of(quiet: bool) -> Progress:
    """Return an object that shows progress on stderr. If ``quiet`` is true, the object shows nothing."""
    return SilentProgress() if quiet else make_progress(Console(stderr=True))


def show(as_json: bool, data: Mapping[str, Any], text: RenderableType) -> None:
    """Print the result of a command: ``data`` as JSON if ``as_json``, otherwise ``text``, not wrapped."""
    if as_json:
        print(json.dumps(data))
    else:
        Console(highlight=False).print(text, soft_wrap=isinstance(text, str | Text))


def columns(rows: Mapping[str, str]) -> Table:
    """Return a table for the terminal with two columns: the keys and the values of ``rows``."""
    grid = Table.grid(padding=(0, 2))
    for name, meaning in rows.items():
        grid.add_row(Text(name), Text(meaning))
    return grid


RUNS = Path("runs")


def named_folder(run: str) -> Path:
    """Return the folder of a run: a path with a slash, or a name in runs/ or here."""
    folder = run_folder(run)
    return Path(run) if os.path.isdir(run) and not os.path.isdir(folder) else folder


def find_run(run: str) -> Path:
    """Return the folder of the run that ``run`` names. Raise InvalidInput if there is no such run."""
    folder = named_folder(run)
    if not is_run(folder):
        raise no_run(run, folder)
    return folder


def no_run(run: str, folder: Path) -> InvalidInput:
    """Return the error for a ``run`` that does not exist. The error suggests a similar name in runs/."""
    there = sorted(file.parent.name for file in RUNS.glob("*/run.db"))
    what = f"{folder} holds no run" if os.path.isdir(folder) else f"there is no folder {folder}"
    do = f"{suggest(run, there)} give the name of a run in runs/, or the folder of one".strip()
    return InvalidInput("run", got=f"{run}, but {what}", do=do)
