"""Hostile values for every option and argument of every command."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import click

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import parameters
from agent_r1.cli import cli
from agent_r1.commands.command import SettingOption

AGENT = '''
from agent_r1 import Task, ToolEnv, exact_match, tool
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, script
@tool
def search(query: str) -> str:
    """Search."""
    return query
tasks = [Task(f"{split}/{i}", f"Who rules Alba in {i}?", {"answers": ("Bruno",)}, split)
         for split in ("train", "validation", "test") for i in range(2)]
env = ToolEnv([search], [exact_match])
def solutions(task):
    right, wrong = (ReferenceSolution(text, script(f"<answer>{text}</answer>")) for text in ("Bruno", "Caro"))
    return ReferenceSolutions((right,), (wrong,), {"exact_match": 1.0})
'''

VALUES: tuple[str, ...] = (
    *("", " ", "-1", "0", "1", "2.5", "1e-320", "1e5", "1e30", "1e999", "nan", "-Infinity", "1" + "0" * 30),
    *("9" * 5000, "1_000", "true", "none", "null", "\u6f22\u5b57 \U0001f389", "\ud800", "a\0b", "a\nb\x1b[31m"),
    *(
        "x" * 5000,
        "[" * 2000,
        '{"a": {"b": [1, null]}}',
        "1,2",
        ",",
        "0.9,1e400",
        "..",
        "/",
        "/dev/null",
        "--",
        "%s{0}",
    ),
    *("hf:", "http://[", "http://user:secret@127.0.0.1:1/", "agent.py", "agent.py:NAME", "[bold]x[/nothing]"),
)
"""Wrong types, numbers out of range, text that is no text, and names of what is no file."""

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "train": ("agent.py", "--steps", "1", "--run", "new"),
    "eval": ("agent.py", "--evaluate_n", "1"),
    "check": ("agent.py", "--n", "1"),
    "play": ("agent.py", "--number", "0"),
    "verify": ("finished",),
    "tasksets": (),
    "algorithms": ("grpo",),
    "retriever": ("--corpus", "corpus.jsonl", "--port", "0"),
    "serve": ("tiny-base", "--port", "0"),
    "serve-env": ("agent.py", "--port", "0"),
    "init": ("new",),
    "train-critic": ("--run", "finished", "--out", "new"),
    "train-reward": ("finished", "--out", "new", "--loss", "regression"),
    "chat": ("finished", "agent.py"),
    "show": ("finished",),
    "view": ("finished", "--port", "0"),
    "export": ("finished", "new"),
    "smoke": ("agent.py",),
    "sft": ("--from_solutions", "--taskset", "tinywiki", "--n", "2", "--steps", "1", "--run", "new"),
}
"""Arguments with which each command works."""

SAME_SETTINGS = ("smoke", "sft")
"""Commands that have almost all settings of ``train``. Only the whole form tries them."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of the command line.

    Attributes:
        name: what is hostile about it.
        must_be_refused: whether to accept it is wrong.
    """

    name: str
    arguments: tuple[str, ...]
    must_be_refused: bool = False


def option_invocations(per_option: int | None, generator: random.Random) -> Iterator[Invocation]:
    """Yield every option of every command with every value, or with some that ``generator`` draws."""
    assert ARGUMENTS.keys() == cli.commands.keys(), "a command is missing here"
    for command, working in ARGUMENTS.items():
        if per_option is not None and command in SAME_SETTINGS:
            continue
        for key, flag in _options(command):
            values: Sequence[str] = VALUES
            if per_option is not None:
                values = generator.sample(VALUES, per_option)
            for value in values:
                given = (command, *working, f"--{key}") if flag else (command, *working, f"--{key}={value}")
                yield Invocation(f"{command} --{key} {value[:60]!r}", given)
                if flag:
                    break
        for value in VALUES if per_option is None else generator.sample(VALUES, 3):
            rest = working[1:] if working and not working[0].startswith("--") else working
            yield Invocation(f"{command} {value[:60]!r}", (command, value, *rest))
    for value in VALUES:
        yield Invocation(f"agent-r1 {value[:60]!r}", (value,))


def _options(command: str) -> Iterator[tuple[str, bool]]:
    """Yield each option's name and whether it takes no value; of a table, every known and one unknown entry."""
    for option in cli.commands[command].params:
        if isinstance(option, click.Argument):
            continue
        assert isinstance(option, click.Option)
        if isinstance(option, SettingOption) and option.key == "reward_weights":
            yield from ((f"reward_weights.{name}", False) for name in ("exact_match", "typo", ""))
        else:
            yield option.opts[-1].removeprefix("--"), bool(option.is_flag)
    if command == "train":
        entries = {key for algorithm in ALGORITHMS.values() for key in parameters(algorithm)}
        yield from ((f"algorithm.{key}", False) for key in sorted({*entries, "kl.coefficient", "typo", ""}))
