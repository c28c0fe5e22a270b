"""The JSON messages between the retrieval server and its clients.

    GET  /health         -> {"status": "ok", "passages": 6119, "search": "bm25"}
    POST /search         {"query": "Who rules Alba?", "k": 5}      -> {"passages": [{"title": "Alba", "text": ".."}]}
    POST /search/batch   {"queries": ["Alba", "Bruno"], "k": 5}    -> {"results": [[{"title": ..}], ..]}

Errors: {"error": "one line"} with a 4xx status if the request is refused, and status 500 if the search fails.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.retrieval.retriever import TOP_K

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


class Health(_Message):
    status: Literal["ok"]
    passages: int
    search: str


class ErrorResponse(_Message):
    error: str
