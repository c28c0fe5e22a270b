"""Open the retriever that ``--corpus`` names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from agent_r1.config import read_toml, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.core.redaction import has_redacted, redact_url
from agent_r1.retrieval.client import open_remote
from agent_r1.retrieval.config import IndexConfig, SearchConfig, check
from agent_r1.retrieval.retriever import BM25Index, Passage, Retriever, read_corpus

ADDRESSES = ("http://", "https://")


def open_retriever(corpus: str | Path, encoder: str = "") -> Retriever:
    """Return the retriever that ``corpus`` names.

    ``corpus`` is one of:

    - the address of a retrieval server, ``http://host:port``, or ``https://user:password@host`` behind a proxy
    - a TOML file with settings of :class:`SearchConfig`; paths are relative to the folder of the file
    - a file of passages, which is searched with ``encoder``, or with BM25 if ``encoder`` is empty

    Raises InvalidInput if the retriever cannot be opened, or if ``encoder`` is given with an address or a TOML file.
    """
    name = str(corpus)
    if encoder and (name.startswith(ADDRESSES) or name.endswith(".toml")):
        do = f"leave it out, and name the encoder where {redact_url(name)} is defined"
        raise InvalidInput("encoder", got=f"{encoder} for a search with settings of its own", do=do)
    if name.startswith(ADDRESSES):
        if has_redacted(name):
            do = "give --corpus with its user and password: a run does not store them"
            raise InvalidInput("corpus", got=name, do=do)
        return open_remote(name)
    if name.endswith(".toml"):
        return open_search(_read_config(Path(name)))
    return build_index(IndexConfig(encoder=encoder), read_corpus(Path(name))) if encoder else _indexed(Path(name))


_INDEXED: WeakValueDictionary[tuple[Path, int, int, int, int], BM25Index] = WeakValueDictionary()
"""The BM25 indexes in use, by (path, size, times, inode) of the file. Task sets with the same file share an index."""


def _indexed(corpus: Path) -> BM25Index:
    if not os.path.isfile(corpus):
        return BM25Index(read_corpus(corpus))  # raises InvalidInput with the reason
    stat = corpus.stat()
    # A copy can have the modification time of the original. The inode and its change time distinguish the two files.
    key = (corpus.resolve(), stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)
    if (index := _INDEXED.get(key)) is None:
        index = _INDEXED[key] = BM25Index(read_corpus(corpus))
    return index


def open_search(config: SearchConfig) -> Retriever:
    """Return an index with the settings ``config``. Raises InvalidInput if the settings or the files cannot be used."""
    check(config)
    return build_index(config, read_corpus(config.corpus)) if config.encoder else _indexed(config.corpus)


def build_index(config: IndexConfig, passages: Sequence[Passage]) -> Retriever:
    """Return a dense index of ``passages`` if ``config`` names a sentence encoder, else a BM25 index."""
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
