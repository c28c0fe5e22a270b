"""A client of a retrieval server, over HTTP."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from weakref import WeakValueDictionary

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_r1.config import read_toml, resolve
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.redaction import has_redacted, redact_url
from agent_r1.retrieval.config import IndexConfig, SearchConfig, check
from agent_r1.retrieval.retriever import TOP_K, BM25Index, Found, Passage, RetrievalError, Retriever, read_corpus

MAX_QUERIES = 256
"""The maximum number of queries in one request."""

MAX_BODY = 4 * 2**20
"""The largest body of a request, in bytes."""

MAX_K = 100

Count = Annotated[int, Field(ge=1, le=MAX_K)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SearchRequest(_Message):
    query: str
    k: Count = TOP_K


class BatchRequest(_Message):
    queries: Annotated[tuple[str, ...], Field(max_length=MAX_QUERIES)]
    k: Count = TOP_K


class PassageText(_Message):
    title: str
    text: str


class SearchResponse(_Message):
    passages: tuple[PassageText, ...]


class BatchResponse(_Message):
    results: tuple[tuple[PassageText, ...], ...]


class RetrieveRequest(_Message):
    """A request to a server of Search-R1 (``POST /retrieve``)."""

    # the queries of all episodes of a step
    queries: Annotated[tuple[str, ...], Field(max_length=16 * MAX_QUERIES)]
    topk: Count | None = None
    return_scores: bool = False


class Document(BaseModel):
    """A passage of a server of Search-R1. ``contents`` is the title in quotes, a line break and the text."""

    contents: str
    title: str | None = None
    text: str | None = None


class ScoredDocument(BaseModel):
    document: Document
    score: float


class RetrieveResponse(BaseModel):
    result: tuple[tuple[ScoredDocument, ...] | tuple[Document, ...], ...]


class Health(_Message):
    status: Literal["ok"]
    passages: int
    search: str


class ErrorResponse(_Message):
    error: str


SECONDS = 10.0
"""The time limit of one request, in seconds."""

TRIES = 3
BACKOFF = 0.25
"""Seconds before the second try. The time doubles before each later try."""


class RemoteRetriever:
    """A client of the retrieval server (``agent-r1 retriever``). One request carries many queries.

    A request is tried again after a failed connection, a time-out or a status 5xx. If the last try fails,
    RetrievalError is raised. After a status 4xx, AgentR1Error is raised at once.
    """

    def __init__(self, address: str, seconds: float = SECONDS, tries: int = TRIES, backoff: float = BACKOFF) -> None:
        url = httpx.URL(address)
        credentials = (url.username, url.password) if url.userinfo else None
        # Remove the user and the password from the address, because httpx logs the address. trust_env=False: requests
        # to a machine in the same network must not go through a proxy.
        address = str(url.copy_with(userinfo=b""))
        self._client = httpx.Client(base_url=address, auth=credentials, timeout=seconds, trust_env=False)
        self._address, self._tries, self._backoff = redact_url(address), tries, backoff

    def search(self, queries: Sequence[str], k: int = TOP_K) -> Found:
        found: Found = []
        for start in range(0, len(queries), MAX_QUERIES):
            # with "?" for lone surrogates, which a model can write but UTF-8 cannot encode
            some = [query.encode("utf-8", "replace").decode() for query in queries[start : start + MAX_QUERIES]]
            try:
                results = self._ask(some, k)
            except ValidationError as error:
                raise RetrievalError(f"{self._address} returned something other than passages") from error
            if len(results) != len(some):
                raise RetrievalError(f"{self._address} answered {len(results)} of {len(some)} queries")
            found += results
        return found

    def _ask(self, queries: Sequence[str], k: int) -> Found:
        response = self._request("POST", "/search/batch", {"queries": queries, "k": k})
        results = BatchResponse.model_validate_json(response.content).results
        return [tuple(Passage(each.title, each.text) for each in result) for result in results]

    def health(self) -> Health:
        """Return the number of passages on the server, and the server's kind of search."""
        try:
            return Health.model_validate_json(self._request("GET", "/health", None).content)
        except ValidationError as error:
            raise RetrievalError(f"{self._address} is not a retrieval server") from error

    def _request(self, method: str, path: str, payload: Any) -> httpx.Response:
        body = None if payload is None else json.dumps(payload).encode()
        reason = ""
        for attempt in range(self._tries):
            if attempt:
                time.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                response = self._client.request(method, path, content=body)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return response
            reason = f"status {response.status_code}: {response.text[:200]}"
            if response.is_client_error:
                raise AgentR1Error(f"the retrieval server at {self._address} refused the request ({reason})")
        raise RetrievalError(f"the retrieval server at {self._address} did not answer ({reason})")


RETRIEVE = "/retrieve"
"""The path of a server of Search-R1."""


class SearchR1Retriever(RemoteRetriever):
    """A client of a server of Search-R1."""

    def _ask(self, queries: Sequence[str], k: int) -> Found:
        response = self._request("POST", RETRIEVE, {"queries": queries, "topk": k, "return_scores": True})
        results = RetrieveResponse.model_validate_json(response.content).result
        return [tuple(map(_passage, result)) for result in results]


def _passage(found: ScoredDocument | Document) -> Passage:
    document = found.document if isinstance(found, ScoredDocument) else found
    title, _, text = document.contents.partition("\n")
    if document.title is not None and document.text is not None:
        return Passage(document.title, document.text)
    return Passage(title.removeprefix('"').removesuffix('"'), text)


def open_remote(address: str) -> RemoteRetriever:
    """Return a retriever for the server at ``address``.

    Raises InvalidInput if the address is invalid, or if no retrieval server answers there.
    """
    try:
        if address.endswith(RETRIEVE):
            remote: RemoteRetriever = SearchR1Retriever(address.removesuffix(RETRIEVE))
            remote.search(["test"], 1)
        else:
            remote = RemoteRetriever(address)
            remote.health()
    except (AgentR1Error, httpx.InvalidURL) as error:
        do = f"start one there with agent-r1 retriever ({error})"
        raise InvalidInput("retrieval server", got=address, do=do) from error
    return remote


ADDRESSES = ("http://", "https://")


def open_retriever(corpus: str | Path, encoder: str = "") -> Retriever:
    """Return the retriever that ``corpus`` names.

    ``corpus`` is one of:

    - the address of a retrieval server, ``http://host:port``, or ``https://user:password@host`` behind a proxy; of a
      server of Search-R1 with its path ``/retrieve``
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
