"""Settings of a search and of the retrieval server."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.errors import InvalidInput

DENSE_ONLY = (
    "pooling",
    "query_prefix",
    "passage_prefix",
    "max_tokens",
    "batch",
    "device",
    "cache",
    "faiss",
    "probes",
    "threads",
)
"""The settings that have an effect only with a sentence encoder."""


class IndexConfig(BaseModel):
    """The settings of an index of passages: the encoder, the cache of vectors, and the search."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    encoder: str = ""
    """The sentence encoder: all-minilm, a folder, or a Hugging Face name. Empty: search with BM25."""

    pooling: Literal["auto", "mean", "cls"] = "auto"
    """How the token vectors of a text become one vector: mean, or cls (the vector of the first token). auto: the
    pooling in the settings of the encoder, or mean if there are none."""

    query_prefix: str = ""
    """Text before every query. Some encoders are trained with an instruction before each query."""

    passage_prefix: str = ""
    """Text before every passage."""

    max_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens that the encoder reads of a text."""

    batch: int = Field(default=64, ge=1)
    """Texts per batch of the encoder."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the encoder: auto (a GPU if there is one), cpu, cuda, cuda:N."""

    cache: Path = Path("~/.cache/agent-r1/vectors")
    """Folder that caches the vectors of passages."""

    faiss: str = ""
    """The factory string of a faiss index, such as IVF16384,PQ64. Empty: exact search in torch."""

    probes: int = Field(default=64, ge=1)
    """Number of cells (clusters of vectors) that an IVF index of faiss searches per query."""


class SearchConfig(IndexConfig):
    """The settings of an index, and the file of its passages."""

    corpus: Path
    """The file of passages. Each row has the fields ``title`` and ``text``."""


class RetrieverConfig(SearchConfig):
    """The settings of the retrieval server."""

    host: str = "127.0.0.1"
    """Address on which the server listens. The server has no password: open the address only to machines that you
    trust."""

    port: int = Field(default=8800, ge=0, le=65535)
    """Port on which the server listens. 0: any free port."""

    allowed_hosts: tuple[str, ...] = ()
    """Host names that the server accepts in requests. Empty: if ``host`` is a
    loopback address, only loopback names are accepted; otherwise all names."""

    threads: int = Field(default=1, ge=1, le=256)
    """Number of torch threads. More threads help only if as many CPU cores are idle."""


def check(config: IndexConfig) -> None:
    """Raise InvalidInput if the user gave a setting that has no effect.

    For example, ``probes`` has no effect without a faiss index of the type IVF.
    """
    idle = [name for name in DENSE_ONLY if name in config.model_fields_set] if not config.encoder else []
    if idle:
        raise InvalidInput(
            idle[0], got="it without an encoder", do="set encoder, or leave it out: BM25 does not use it"
        )
    if "probes" in config.model_fields_set and not config.faiss.startswith("IVF"):
        raise InvalidInput(
            "probes", got=config.probes, do="leave it out: only faiss indexes that begin with IVF use it"
        )
