"""What can be set of a search: the passages, and the sentence encoder that makes them vectors."""

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
"""Settings that mean something with an encoder only."""


class SearchConfig(BaseModel):
    """A search in this process. As a file (``--corpus search.toml``) and as options of ``agent-r1 retriever``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    corpus: Path
    """The file of passages: rows of ``title`` and ``text``."""

    encoder: str = ""
    """A sentence encoder, by its name on the Hugging Face hub or its folder; empty: BM25."""

    pooling: Literal["auto", "mean", "cls"] = "auto"
    """How token vectors become one: their mean, or the first; auto: what the encoder's folder says, else the mean."""

    query_prefix: str = ""
    """Stands before every query, for encoders that were trained with an instruction."""

    passage_prefix: str = ""
    """Stands before every passage."""

    max_tokens: int = Field(default=512, ge=1)
    """Tokens of a text that are read; the rest is cut."""

    batch: int = Field(default=64, ge=1)
    """Texts that are encoded together."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Where the encoder computes: auto (a GPU where there is one), cpu, cuda, cuda:N."""

    cache: Path = Path("~/.cache/agent-r1/vectors")
    """Folder where the passages' vectors are kept, by what they were made from."""

    faiss: str = ""
    """An index of faiss by its factory string, such as IVF16384,PQ64; empty: exact inner products in torch."""

    probes: int = Field(default=64, ge=1)
    """Cells that an IVF index of faiss looks into."""


class RetrieverConfig(SearchConfig):
    """The retrieval server."""

    host: str = "127.0.0.1"
    """The address to listen on. It asks for no password: open it to machines you trust."""

    port: int = Field(default=8800, ge=0, le=65535)
    """The port to listen on; 0: any that is free."""

    threads: int = Field(default=1, ge=1)
    """Threads of torch; more are faster only where as many cores have nothing else to do."""


def check(config: SearchConfig) -> None:
    """Raise InvalidInput for a setting that would do nothing."""
    idle = [name for name in DENSE_ONLY if name in config.model_fields_set] if not config.encoder else []
    if idle:
        raise InvalidInput(idle[0], got="it without an encoder", do="name an encoder, or leave it out: BM25 has none")
    if "probes" in config.model_fields_set and not config.faiss.startswith("IVF"):
        raise InvalidInput("probes", got=config.probes, do="leave it out: it is for faiss indices that begin with IVF")
