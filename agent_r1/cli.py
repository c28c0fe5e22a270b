"""The command line. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted (143 by SIGTERM).

Errors are printed on stderr in one line, except RunStopped, whose message has several lines.

Modules that import torch are imported inside the commands, after all checks that do not need torch.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from io import TextIOWrapper
from typing import Any, NoReturn

import click
from click.shell_completion import get_completion_class, shell_complete

from agent_r1.commands.algorithms import algorithms
from agent_r1.commands.chat import chat, serve
from agent_r1.commands.command import underscored
from agent_r1.commands.recorded_run import export, verify, view
from agent_r1.commands.show import show
from agent_r1.commands.tasksets import check, init, play, retriever, serve_env, tasksets
from agent_r1.commands.training import evaluate, sft, smoke, train, train_critic, train_reward
from agent_r1.config import suggest_setting
from agent_r1.core.errors import AgentR1Error, Interrupted, InvalidInput, RunStopped, UnsupportedChat, shorten, suggest
from agent_r1.core.redaction import redact

DONE, FAILED, BAD_INPUT, SIGNALLED, INTERRUPTED = 0, 1, 2, 128, 130

PROGRAM = "agent-r1"
COMPLETION_VARIABLE = "_AGENT_R1_COMPLETE"
CONTEXT_SETTINGS: Mapping[str, Any] = {"token_normalize_func": underscored, "max_content_width": 110}


class Commands(click.Group):
    """The group of all commands. ``--help`` lists the commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            do = f"{suggest(args[0], self.commands)} there are: {', '.join(self.commands)}".strip()
            raise InvalidInput("command", got=repr(args[0]), do=do)
        return super().resolve_command(ctx, args)


def _print_completion(ctx: click.Context, option: click.Parameter, shell: str | None) -> None:
    if shell is None or ctx.resilient_parsing:
        return
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, PROGRAM, COMPLETION_VARIABLE).source())
    ctx.exit()


@click.group(PROGRAM, cls=Commands, no_args_is_help=False)
@click.version_option(version("agent-r1"), prog_name=PROGRAM)
@click.option(
    "--completion",
    type=click.Choice(["bash", "zsh", "fish"]),
    is_eager=True,
    expose_value=False,
    callback=_print_completion,
    help="Print the script that completes commands and options in this shell.",
)
def cli() -> None:
    """Train LLM agents end to end by reinforcement learning."""


for _command in (
    *(init, train, sft, train_reward, evaluate, train_critic, smoke, check, play, chat),
    *(show, verify, view, export, tasksets, algorithms, retriever, serve, serve_env),
):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit code. ``arguments`` are ``sys.argv[1:]`` by default."""
    return run_command(cli, sys.argv[1:] if arguments is None else arguments, PROGRAM)


def parse(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return (name, keyword arguments) of the command in ``arguments``, such as ["verify", "demo", "--digest"].

    The command is not run. Raise click.UsageError if the arguments cannot be parsed.
    """
    name, *rest = arguments
    command = cli.commands.get(name)
    if command is None:
        raise click.UsageError(f"No such command {name!r}.")
    with command.make_context(name, rest, **CONTEXT_SETTINGS) as context:
        return name, context.params


def run_command(command: click.Command, arguments: Sequence[str], program: str) -> int:
    """Run a command and return its exit code. If the command fails, print the error on stderr."""
    try:
        with command.make_context(program, list(arguments), **CONTEXT_SETTINGS) as context:
            command.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.UsageError as error:
        return _print_error(_explain(error), BAD_INPUT)
    except (InvalidInput, UnsupportedChat) as error:
        return _print_error(error, BAD_INPUT)
    except RunStopped as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return FAILED
    except AgentR1Error as error:
        return _print_error(error, FAILED)
    except sqlite3.DatabaseError as error:
        return _print_error(f"the database of the run is damaged: {error}; 'agent-r1 verify RUN' lists why", FAILED)
    except Interrupted as stopped:
        return _print_error(stopped, SIGNALLED + stopped.number)
    except KeyboardInterrupt:
        return _print_error("interrupted; a run that had begun can be resumed from its folder", INTERRUPTED)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the tokenizers library, and no Exception
            raise
        do = "repair tokenizer.json, which is damaged"
        return _print_error(f"tokenizer: got a text on which the tokenizers library panics ({error}); {do}", BAD_INPUT)
    return DONE


def enter() -> NoReturn:
    """Run the program, and exit with its exit code. After a signal, exit without waiting for other threads."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # terminals can lack characters that a model wrote
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        sys.exit(shell_complete(cli, {}, PROGRAM, COMPLETION_VARIABLE, instruction))
    code = main()
    sys.stdout.flush()
    if code > SIGNALLED:
        os._exit(code)
    sys.exit(code)


def _print_error(line: object, code: int) -> int:
    print(f"{PROGRAM}:", " ".join(redact(str(line)).split()), file=sys.stderr)
    return code


def _explain(error: click.UsageError) -> str:
    context = error.ctx
    see = f"see {context.command_path if context else PROGRAM} --help"
    if isinstance(error, click.NoSuchOption) and context is not None:
        name = underscored(error.option_name.lstrip("-"))
        options = {one.lstrip("-") for option in context.command.params for one in option.opts if one.startswith("--")}
        hint = suggest_setting(name, options, prefix="--")
        return f"unknown option: got --{name}; {hint or see}"
    return f"{shorten(error.format_message().rstrip('.'))}; {see}"


if __name__ == "__main__":
    enter()
