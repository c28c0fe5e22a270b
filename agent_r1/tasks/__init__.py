"""Ready worlds, by name. A world is imported only when it is built."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.world import World


@dataclass(frozen=True, slots=True)
class Entry:
    """A world that can be named: one line on what it is, and how it is built from (data, corpus, seed).

    ``corpus`` is a file, or the address of a retrieval server.
    """

    description: str
    build: Callable[[Path | None, str | Path | None, int], World]


def build(name: str, data: Path | None, corpus: str | Path | None, seed: int) -> World:
    """Build the world called ``name``. Raises InvalidInput where there is none, or its files cannot be used."""
    if name not in WORLDS:
        nearest = difflib.get_close_matches(name, WORLDS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise InvalidInput("task", got=repr(name), do=f"{hint}use one of: {', '.join(WORLDS)}")
    return WORLDS[name].build(data, corpus, seed)


def _tinywiki(data: Path | None, corpus: str | Path | None, seed: int) -> World:
    from agent_r1.tasks import tinywiki

    return tinywiki.build(data, corpus, seed)


def _multihop(name: str) -> Callable[[Path | None, str | Path | None, int], World]:
    def build(data: Path | None, corpus: str | Path | None, seed: int) -> World:
        from agent_r1.tasks import multihop

        return multihop.build(name, data, corpus, seed)

    return build


WORLDS: Mapping[str, Entry] = {
    "tinywiki": Entry("a generated encyclopedia with 1-, 2- and 3-hop questions; needs no files", _tinywiki),
    "hotpotqa": Entry("HotpotQA: 2-hop questions over Wikipedia; needs --data", _multihop("hotpotqa")),
    "2wiki": Entry(
        "2WikiMultihopQA: 2- to 4-hop questions over Wikipedia; needs --data and --corpus", _multihop("2wiki")
    ),
    "musique": Entry("MuSiQue: 2- to 4-hop questions over Wikipedia; needs --data and --corpus", _multihop("musique")),
    "multihop": Entry("several of these, mixed as the TOML file that --data names says", _multihop("multihop")),
}
