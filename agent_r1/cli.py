"""The command line. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted (143 by SIGTERM).

A line on stderr says why; a screen of them where a run was stopped because it could only go wrong.

Modules that load torch are imported inside the commands, after everything that can be checked without it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from pydantic import BaseModel

from agent_r1.commands.algorithms import ALGORITHMS
from agent_r1.commands.command import Command, Invocation
from agent_r1.commands.tasks import CHECK, PLAY, RETRIEVER, TASKS
from agent_r1.commands.training import EVAL, PAPER, TRAIN
from agent_r1.commands.verify import VERIFY
from agent_r1.config import fields, keys, knows, nearest
from agent_r1.core.errors import AgentR1Error, Interrupted, InvalidInput, RunStopped, UnsupportedChat

DONE, FAILED, BAD_INPUT, SIGNALLED, INTERRUPTED = 0, 1, 2, 128, 130

MAIN_SETTINGS = (
    *("task", "data", "corpus", "sandbox", "model", "algorithm", "steps", "seed", "run", "methods", "n"),
    *("splits", "split", "number", "encoder", "host", "port"),
)
PAPER_SETTINGS = ("seeds", "jobs", "cell", "out")

POSITIONAL = {"command", "file", "name", "folder"}

COMMANDS: Mapping[str, Command] = {
    "train": TRAIN,
    "eval": EVAL,
    "paper": PAPER,
    "retriever": RETRIEVER,
    "check": CHECK,
    "play": PLAY,
    "verify": VERIFY,
    "tasks": TASKS,
    "algorithms": ALGORITHMS,
}


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
    except RunStopped as error:
        print(f"agent-r1: {error}", file=sys.stderr)
        return FAILED
    except AgentR1Error as error:
        return _complain(error, FAILED)
    except Interrupted as stopped:
        file = [str(invocation.options["file"])] if invocation.options["file"] else []
        again = shlex.join(["agent-r1", "train", *file, "--run", str(stopped.folder), "--resume"])
        return _complain(f"{stopped}; to go on: {again}", SIGNALLED + stopped.number)
    except KeyboardInterrupt:
        return _complain("interrupted; a run that had begun stays where it said, and can be resumed", INTERRUPTED)
    return DONE


def enter() -> NoReturn:
    """The program. A signal leaves at once: a long forward pass in another thread is not waited for."""
    code = main()
    sys.stdout.flush()
    if code > SIGNALLED:
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


if __name__ == "__main__":
    enter()
