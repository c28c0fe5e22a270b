"""Task sets by name. A task set's module is imported when the task set is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import InvalidInput, suggest
from agent_r1.core.taskset import TaskSet
from agent_r1.sandbox.config import DEFAULT_LEVEL, SandboxLevel

__all__ = ["TASKSETS", "build"]


@dataclass(frozen=True, slots=True)
class TaskSetEntry:
    """An entry in ``TASKSETS``, for a task set that a user can select by name.

    The field ``build`` is the function that builds the task set: (data, corpus, seed) -> task set.
    """

    description: str
    build: Callable[[Path | None, str | Path | None, int], TaskSet]


@dataclass(frozen=True, slots=True)
class SearchEntry:
    """An entry in ``TASKSETS``, for a task set with a search of passages.

    The field ``build`` is the function that builds the task set: (data, corpus, seed, sentence encoder) -> task set.
    """

    description: str
    build: Callable[[Path | None, str | Path | None, int, str], TaskSet]


@dataclass(frozen=True, slots=True)
class SandboxedEntry:
    """An entry in ``TASKSETS``, for a task set that runs code written by the policy.

    The field ``build`` is the function that builds the task set: (data, corpus, seed, sandbox level) -> task set.
    """

    description: str
    build: Callable[[Path | None, str | Path | None, int, SandboxLevel], TaskSet]


def build(
    name: str,
    data: Path | None,
    corpus: str | Path | None,
    seed: int,
    sandbox: SandboxLevel | None = None,
    encoder: str = "",
) -> TaskSet:
    """Build the task set called ``name``.

    Args:
        data: a file, a folder, or the name of a data set on the hub; None for a task set that generates its tasks.
        corpus: a file of passages, or the address of a retrieval server.
        seed: determines the training tasks or their order.
        sandbox: the sandbox level for code that the policy writes; None for the default level.
        encoder: the sentence encoder of the search; "" for BM25.

    Raises:
        InvalidInput: the name is unknown, an argument cannot be used, or the sandbox level is not available.
    """
    if name not in TASKSETS:
        do = f"{suggest(name, TASKSETS)} use one of: {', '.join(TASKSETS)}".strip()
        raise InvalidInput("taskset", got=repr(name), do=do)
    entry = TASKSETS[name]
    if encoder and not isinstance(entry, SearchEntry):
        searching = ", ".join(one for one, other in TASKSETS.items() if isinstance(other, SearchEntry))
        do = f"leave it out: {name} has a search of its own, or none; task sets that use it: {searching}"
        raise InvalidInput("encoder", got=repr(encoder), do=do)
    if isinstance(entry, SandboxedEntry):
        return entry.build(data, corpus, seed, sandbox or DEFAULT_LEVEL)
    if sandbox is not None:
        raise InvalidInput("sandbox", got=repr(sandbox), do=f"leave it out: {name} runs no code of the agent's")
    if isinstance(entry, SearchEntry):
        return entry.build(data, corpus, seed, encoder)
    return entry.build(data, corpus, seed)


def _tinywiki(data: Path | None, corpus: str | Path | None, seed: int) -> TaskSet:
    from agent_r1.tasksets import tinywiki

    return tinywiki.build(data, corpus, seed)


def _people(data: Path | None, corpus: str | Path | None, seed: int) -> TaskSet:
    from agent_r1.tasksets import people

    return people.build(data, corpus, seed)


def _wikifilm(data: Path | None, corpus: str | Path | None, seed: int, encoder: str) -> TaskSet:
    from agent_r1.tasksets import wikifilm

    return wikifilm.build(data, corpus, seed, encoder)


def _memory(data: Path | None, corpus: str | Path | None, seed: int) -> TaskSet:
    from agent_r1.tasksets import memory

    return memory.build(data, corpus, seed)


def _orders(data: Path | None, corpus: str | Path | None, seed: int) -> TaskSet:
    from agent_r1.tasksets import orders

    return orders.build(data, corpus, seed)


def _unreliable(data: Path | None, corpus: str | Path | None, seed: int) -> TaskSet:
    from agent_r1.tasksets import unreliable

    return unreliable.build(data, corpus, seed)


def _shapes(data: Path | None, corpus: str | Path | None, seed: int) -> TaskSet:
    from agent_r1.tasksets import shapes

    return shapes.build(data, corpus, seed)


def _multihop(name: str) -> Callable[[Path | None, str | Path | None, int, str], TaskSet]:
    def build(data: Path | None, corpus: str | Path | None, seed: int, encoder: str) -> TaskSet:
        from agent_r1.tasksets import multihop

        return multihop.build(name, data, corpus, seed, encoder)

    return build


def _math(data: Path | None, corpus: str | Path | None, seed: int, level: SandboxLevel) -> TaskSet:
    from agent_r1.tasksets import math

    return math.build(data, corpus, seed, level)


def _code(data: Path | None, corpus: str | Path | None, seed: int, level: SandboxLevel) -> TaskSet:
    from agent_r1.tasksets import code

    return code.build(data, corpus, seed, level)


def _code_repair(data: Path | None, corpus: str | Path | None, seed: int, level: SandboxLevel) -> TaskSet:
    from agent_r1.tasksets import code_repair

    return code_repair.build(data, corpus, seed, level)


TASKSETS: Mapping[str, TaskSetEntry | SearchEntry | SandboxedEntry] = {
    "tinywiki": TaskSetEntry("a generated encyclopedia with 1-, 2- and 3-hop questions; needs no files", _tinywiki),
    "people": TaskSetEntry("1- to 5-hop questions in plain English about invented people; needs no files", _people),
    "wikifilm": SearchEntry("1-, 2-hop and comparison questions about films, from pages of --data", _wikifilm),
    "unreliable": TaskSetEntry("TinyWiki behind a search that fails and gives old pages; needs no files", _unreliable),
    "memory": TaskSetEntry("a fact told at first and asked for at last; needs no files", _memory),
    "shapes": TaskSetEntry("questions about generated pictures; needs no files, but a model with vision", _shapes),
    "orders": TaskSetEntry("a customer, to be asked and served by tools; needs no files, but a real model", _orders),
    "hotpotqa": SearchEntry("HotpotQA: 2-hop questions over Wikipedia; needs --data", _multihop("hotpotqa")),
    "2wiki": SearchEntry(
        "2WikiMultihopQA: 2- to 4-hop questions over Wikipedia; needs --data and --corpus", _multihop("2wiki")
    ),
    "musique": SearchEntry(
        "MuSiQue: 2- to 4-hop questions over Wikipedia; needs --data and --corpus", _multihop("musique")
    ),
    "multihop": SearchEntry("several of these, mixed as the TOML file that --data names says", _multihop("multihop")),
    "math": SandboxedEntry("mathematics with a Python interpreter: GSM8K, MATH; needs --data", _math),
    "code": SandboxedEntry("functions to write, try and fix: HumanEval, MBPP; needs --data", _code),
    "code-repair": SandboxedEntry("functions of MBPP with one planted bug, to be repaired; needs --data", _code_repair),
}
