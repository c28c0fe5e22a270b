"""Settings of a search: the passages, and the sentence encoder of a dense index."""

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
"""Settings that have an effect only with an encoder."""


class SearchConfig(BaseModel):
    """A search in this process. As a file (``--corpus search.toml``) and as options of ``agent-r1 retriever``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    corpus: Path
    """The file of passages: rows of ``title`` and ``text``."""

    encoder: str = ""
    """A sentence encoder, by its name on the Hugging Face hub or its folder; empty: BM25."""

    pooling: Literal["auto", "mean", "cls"] = "auto"
    """How token vectors become one vector: mean, or cls (the first); auto: as the encoder's folder says, else the
    mean."""

    query_prefix: str = ""
    """Text put before every query, for encoders trained with an instruction."""

    passage_prefix: str = ""
    """Text put before every passage."""

    max_tokens: int = Field(default=512, ge=1)
    """Tokens of each text that are encoded; the rest is cut off."""

    batch: int = Field(default=64, ge=1)
    """Texts encoded in one batch."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the encoder: auto (a GPU if there is one), cpu, cuda, cuda:N."""

    cache: Path = Path("~/.cache/agent-r1/vectors")
    """Folder in which the vectors of passages are cached, by a hash of their inputs."""

    faiss: str = ""
    """A faiss index by its factory string, such as IVF16384,PQ64; empty: exact inner products in torch."""

    probes: int = Field(default=64, ge=1)
    """Cells that an IVF index of faiss searches."""


class RetrieverConfig(SearchConfig):
    """The retrieval server."""

    host: str = "127.0.0.1"
    """Address to listen on. There is no password: open it only to machines that you trust."""

    port: int = Field(default=8800, ge=0, le=65535)
    """Port to listen on; 0: any free port."""

    allowed_hosts: tuple[str, ...] = ()
    """Host names that requests may name; empty: loopback names if the server listens on a loopback address, else
    any."""

    threads: int = Field(default=1, ge=1, le=256)
    """Threads of torch; more help only if as many cores are idle."""


def check(config: SearchConfig) -> None:
    """Raise InvalidInput for a setting that would have no effect."""
    idle = [name for name in DENSE_ONLY if name in config.model_fields_set] if not config.encoder else []
    if idle:
        raise InvalidInput(
            idle[0], got="it without an encoder", do="set encoder, or leave it out: BM25 does not use it"
        )
    if "probes" in config.model_fields_set and not config.faiss.startswith("IVF"):
        raise InvalidInput(
            "probes", got=config.probes, do="leave it out: only faiss indexes that begin with IVF use it"
        )
