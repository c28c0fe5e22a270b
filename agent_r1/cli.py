"""The command line. Exit codes: 0 done, 1 failed, 2 bad input (one line on stderr), 130 interrupted.

Modules that load torch are imported inside the commands, after everything that can be checked without it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

import agent_r1.tasks
from agent_r1.config import Layer, fields, from_text, keys, knows, nearest, read_toml, resolve, restrict
from agent_r1.core.errors import AgentR1Error, InvalidInput, UnsupportedChat
from agent_r1.core.world import World
from agent_r1.retrieval.config import RetrieverConfig
from agent_r1.retrieval.protocol import Health
from agent_r1.store import RunReader, is_run, run_folder
from agent_r1.store.digest import run_digest
from agent_r1.store.verify import Verdict, verify
from agent_r1.train.config import EvalConfig, RunConfig, TrainConfig, settle
from agent_r1.train.custom import load_world
from agent_r1.train.paper.config import PaperConfig, wanted
from agent_r1.train.report import Progress, Silence, progress_on, render, render_report, report_json, table_json

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

MAIN_SETTINGS = (
    *("task", "data", "corpus", "model", "algorithm", "steps", "seed", "run", "methods", "n"),
    *("encoder", "host", "port"),
)
PAPER_SETTINGS = ("seeds", "jobs", "cell", "out")

POSITIONAL = {"command", "file", "name", "folder"}


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


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInput("command line", got=message, do=f"see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name (None: those of the process); the exit code."""
    try:
        name, invocation = parse(sys.argv[1:] if arguments is None else arguments)
        COMMANDS[name].run(invocation)
    except (InvalidInput, UnsupportedChat) as error:
        return _complain(error, BAD_INPUT)
    except AgentR1Error as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted; a run that had begun stays readable in its folder", INTERRUPTED)
    return DONE


def enter() -> NoReturn:
    """The program. An interrupt leaves at once: a long forward pass in another thread is not waited for."""
    code = main()
    sys.stdout.flush()
    if code == INTERRUPTED:
        os._exit(code)
    sys.exit(code)


def _complain(line: object, code: int) -> int:
    print("agent-r1:", " ".join(str(line).split()), file=sys.stderr)
    return code


def parse(arguments: Sequence[str]) -> tuple[str, Invocation]:
    """The command and its options. Raises InvalidInput; ``--help`` prints and exits."""
    # Settings are spelled as in files, with underscores; hyphens are taken for them.
    typed = [_underscored(argument) for argument in arguments]
    if typed and not typed[0].startswith("-") and typed[0] not in COMMANDS:
        raise InvalidInput("command", got=repr(typed[0]), do=f"did you mean {nearest(typed[0], COMMANDS)!r}?")
    parser = Parser(prog="agent-r1", description="Train LLM agents end to end by reinforcement learning.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = subparsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        command.declare(sub)
        if command.config is not None:
            _declare_settings(sub, command.config, typed)
    namespace, unknown = parser.parse_known_args(typed)
    options = vars(namespace)
    name, config = options["command"], COMMANDS[options["command"]].config
    if unknown:
        raise _unknown(unknown[0], [*(options.keys() - POSITIONAL), *(keys(config) if config else ())])
    given = {key: value for key, value in options.items() if config and knows(config, key) and value is not None}
    return name, Invocation(options, given)


def _underscored(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else argument


def _unknown(argument: str, known: Sequence[str]) -> InvalidInput:
    if not argument.startswith("--"):
        return InvalidInput("command line", got=f"{argument!r} too many", do="leave it out")
    name = argument[2:].partition("=")[0]
    return InvalidInput("unknown option", got=f"--{name}", do=f"the nearest that exists is --{nearest(name, known)}")


def _declare_settings(parser: argparse.ArgumentParser, config: type[BaseModel], arguments: Sequence[str]) -> None:
    """An option for every setting, and for every entry of a table that the arguments name (``--row.epochs``)."""
    first = parser.add_argument_group("settings")
    more = parser.add_argument_group("further settings")
    for key, field in fields(config):
        text = " ".join((field.description or "").split()).replace("%", "%%").replace("``", "")
        (first if key in MAIN_SETTINGS + PAPER_SETTINGS else more).add_argument(f"--{key}", metavar="X", help=text)
    names = dict.fromkeys(argument[2:].partition("=")[0] for argument in arguments if argument.startswith("--"))
    for name in names:
        if knows(config, name) and name not in keys(config):
            more.add_argument(f"--{name}", help=argparse.SUPPRESS)


def _declare_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of text")


def _declare_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE.py", help="an agent of your own: defines env and tasks")
    parser.usage = "%(prog)s [FILE.py] [options]"
    _declare_output(parser)


def _declare_output(parser: argparse.ArgumentParser) -> None:
    _declare_json(parser)
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _declare_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE.toml", help="settings from a file; the command line goes first")
    _declare_eval(parser)


def _declare_retriever(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE.toml", help="settings from a file; the command line goes first")
    _declare_json(parser)


def _declare_algorithms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this one with its terms")
    _declare_json(parser)


def _declare_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="a run's name, in runs/, or its folder")
    parser.add_argument("--digest", action="store_true", help="print what is equal for equal runs, and nothing else")
    _declare_json(parser)


def _train(invocation: Invocation) -> None:
    file, layers = invocation.options["file"], _layers(TrainConfig, invocation)
    asked = resolve(TrainConfig, layers)  # what is wrong by itself is said before anything is built
    world = _build(asked) if file is None else _load(Path(file), asked)
    config = settle(TrainConfig, layers, world)
    from agent_r1.train import run

    report = run.train(config, world, _progress(invocation))
    _show(invocation, report_json(report), render_report(report))


def _eval(invocation: Invocation) -> None:
    layers = [from_text(EvalConfig, invocation.settings)]
    folder = run_folder(resolve(EvalConfig, layers).model)
    trained_on = None
    if is_run(folder):
        reader = RunReader(folder)
        trained_on = str(reader.config()["data"])
        layers.append(restrict(Layer(f"configuration of {folder}", reader.config()), EvalConfig, TrainConfig))
        reader.close()
    asked, file = resolve(EvalConfig, layers), invocation.options["file"]
    world = _build(asked) if file is None else load_world(Path(file), asked.model)
    if world.whole is not None and str(asked.data) != trained_on:
        world = replace(world, evaluation=(world.whole,))
    config = settle(EvalConfig, layers, world)
    from agent_r1.train.evaluate import evaluate

    table = evaluate(config, world, _progress(invocation))
    _show(invocation, table_json(table), render(table))


def _paper(invocation: Invocation) -> None:
    config = resolve(PaperConfig, [from_text(PaperConfig, invocation.settings)])
    wanted(config)  # what is wrong by itself is said before torch is loaded
    from agent_r1.train.paper.compare import compare, comparison_json, render_comparison

    comparison = compare(config, _progress(invocation))
    _show(invocation, comparison_json(comparison), render_comparison(comparison))
    comparison.require_all()


def _retriever(invocation: Invocation) -> None:
    layers = _layers(RetrieverConfig, invocation)
    from agent_r1.retrieval.serve import serve

    def started(url: str, health: Health) -> None:
        said = f"{health.passages} passages by {health.search} at {url}; stop with Ctrl-C or SIGTERM"
        _show(invocation, {"url": url, **health.model_dump()}, said)
        sys.stdout.flush()

    serve(resolve(RetrieverConfig, layers), started)


def _layers(cls: type[BaseModel], invocation: Invocation) -> list[Layer]:
    """The settings that were typed, over those of the file that --config names."""
    toml = invocation.options["config"]
    return [from_text(cls, invocation.settings), *([read_toml(Path(toml))] if toml else ())]


def _verify(invocation: Invocation) -> None:
    folder, digest = run_folder(invocation.options["folder"]), None
    verdict = verify(folder)
    if verdict.holds and invocation.options["digest"]:
        with closing(RunReader(folder)) as reader:
            digest = run_digest(reader)
    data = {"run": str(folder), "holds": verdict.holds, **asdict(verdict), "digest": digest}
    _show(invocation, data, digest or _rendered(verdict))
    if not verdict.holds:
        raise Broken(f"{folder} does not hold: {len(verdict.violations)} of the rules are broken")


def _rendered(verdict: Verdict) -> RenderableType:
    if not verdict.holds:
        return Text("\n".join(verdict.violations))
    counts = {fate: str(count) for fate, count in verdict.attempts.items()}
    rest = {"steps": verdict.steps, "lineages": verdict.lineages, "checkpoints": verdict.checkpoints}
    return Group("The run holds.", _columns(counts | {name: str(count) for name, count in rest.items()}))


def _tasks(invocation: Invocation) -> None:
    descriptions = {name: entry.description for name, entry in agent_r1.tasks.WORLDS.items()}
    _show(invocation, {"tasks": descriptions}, _columns(descriptions))


def _algorithms(invocation: Invocation) -> None:
    from agent_r1.learn.choose import build_row, terms
    from agent_r1.learn.objective import clauses, objective
    from agent_r1.learn.rows import ROWS

    name = invocation.options["name"]
    rows = [build_row(known, {}) for known in (ROWS if name is None else (name,))]
    data = {
        row.name: {"objective": objective(row), "paper": row.paper, "differs": row.differs, "terms": dict(terms(row))}
        for row in rows
    }
    if name is None:
        shown: RenderableType = _columns({row.name: f"{row.advantage.formula} {_source(row.paper)}" for row in rows})
    else:
        numbers = {f"--row.{key}": str(value) for key, value in terms(rows[0])}
        formula = Text(";\n".join(clauses(rows[0])))
        notes = {"from": _source(rows[0].paper), "differs": rows[0].differs or "-"}
        shown = Group(formula, Text(), _columns(notes), Text(), _columns(numbers))
    _show(invocation, {"algorithms": data}, shown)


def _source(paper: str) -> str:
    return f"(arXiv {paper})" if paper else ""


def _columns(rows: Mapping[str, str]) -> Table:
    """Names on the left, what they mean on the right, wrapped under itself."""
    grid = Table.grid(padding=(0, 2))
    for name, meaning in rows.items():
        grid.add_row(Text(name), Text(meaning))
    return grid


def _build(config: RunConfig) -> World:
    return agent_r1.tasks.build(config.task, config.data, config.corpus, config.seed)


def _load(file: Path, asked: TrainConfig) -> World:
    for name in ("task", "data", "corpus"):
        if name in asked.model_fields_set:
            raise InvalidInput(f"--{name}", got=f"it and {file}", do="leave one out: the file is the task")
    return load_world(file, asked.model)


def _progress(invocation: Invocation) -> Progress:
    return Silence() if invocation.options["quiet"] else progress_on(Console(stderr=True))


def _show(invocation: Invocation, data: Mapping[str, Any], text: RenderableType) -> None:
    if invocation.options["json"]:
        print(json.dumps(data))
    else:
        Console(highlight=False).print(text)


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        "train an agent; without arguments: TinyWiki, tiny-base, grpo", _train, _declare_train, TrainConfig
    ),
    "eval": Command("print the table of methods", _eval, _declare_eval, EvalConfig),
    "paper": Command("the paper's comparison in miniature, on TinyWiki", _paper, _declare_output, PaperConfig),
    "retriever": Command("serve the search of a corpus over HTTP", _retriever, _declare_retriever, RetrieverConfig),
    "verify": Command("prove that a run is whole and every attempt accounted for", _verify, _declare_verify),
    "tasks": Command("list the worlds there are", _tasks, _declare_json),
    "algorithms": Command("list the algorithms, or show one with its numbers", _algorithms, _declare_algorithms),
}

if __name__ == "__main__":
    enter()
