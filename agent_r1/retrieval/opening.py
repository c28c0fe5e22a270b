"""From what ``--corpus`` names to a retriever."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from agent_r1.config import read_toml, resolve
from agent_r1.retrieval.bm25 import BM25Index
from agent_r1.retrieval.client import open_remote
from agent_r1.retrieval.config import SearchConfig, check
from agent_r1.retrieval.passages import Passage, read_corpus
from agent_r1.retrieval.retriever import Retriever

ADDRESSES = ("http://", "https://")


def open_retriever(corpus: str | Path) -> Retriever:
    """The retriever that ``corpus`` names. Raises InvalidInput where it cannot be used.

    - the address of a retrieval server, ``http://host:port``
    - a TOML file with settings of :class:`SearchConfig`; its paths are relative to its own folder
    - a file of passages, for BM25
    """
    name = str(corpus)
    if name.startswith(ADDRESSES):
        return open_remote(name)
    if name.endswith(".toml"):
        return search_of(_read_config(Path(name)))
    return _indexed(Path(name))


_INDEXED: WeakValueDictionary[tuple[Path, int, int, int, int], BM25Index] = WeakValueDictionary()
"""Indexes that somebody holds, by file, as it is: a second world over a large corpus (what a run was trained on, beside
what it is evaluated on) costs no second index."""


def _indexed(corpus: Path) -> BM25Index:
    if not corpus.is_file():
        return BM25Index(read_corpus(corpus))  # which says what is wrong
    there = corpus.stat()
    # a copy that keeps the time of the original is told by its own inode, and by when that was changed
    key = (corpus.resolve(), there.st_size, there.st_mtime_ns, there.st_ino, there.st_ctime_ns)
    if (index := _INDEXED.get(key)) is None:
        index = _INDEXED[key] = BM25Index(read_corpus(corpus))
    return index


def search_of(config: SearchConfig) -> Retriever:
    """A search in this process. Raises InvalidInput."""
    check(config)
    return index_of(config, read_corpus(config.corpus)) if config.encoder else _indexed(config.corpus)


def index_of(config: SearchConfig, passages: Sequence[Passage]) -> Retriever:
    if not config.encoder:
        return BM25Index(passages)
    from agent_r1.retrieval.dense import open_dense  # loads torch

    return open_dense(config, passages)


def _read_config(path: Path) -> SearchConfig:
    config = resolve(SearchConfig, [read_toml(path)])
    beside = path.parent / config.encoder
    places: dict[str, object] = {"corpus": path.parent / config.corpus}
    if config.encoder and beside.is_dir():
        places["encoder"] = str(beside)
    return config.model_copy(update=places)
