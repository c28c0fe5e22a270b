"""What the retrieval server and its clients say to each other, as JSON.

    GET  /health         -> {"status": "ok", "passages": 6119, "search": "bm25"}
    POST /search         {"query": "Who rules Alba?", "k": 5}      -> {"passages": [{"title": "Alba", "text": ".."}]}
    POST /search/batch   {"queries": ["Alba", "Bruno"], "k": 5}    -> {"results": [[{"title": ..}], ..]}

Whatever is refused is answered with {"error": "one line"} and a status of 4xx; a search that fails, with 500.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.retrieval.retriever import TOP_K

MAX_QUERIES = 256
"""Queries of one request."""

MAX_BODY = 4 * 2**20
"""Bytes of one request."""

MAX_K = 100

Count = Annotated[int, Field(ge=1, le=MAX_K)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Query(_Message):
    query: str
    k: Count = TOP_K


class Batch(_Message):
    queries: Annotated[tuple[str, ...], Field(max_length=MAX_QUERIES)]
    k: Count = TOP_K


class Shown(_Message):
    title: str
    text: str


class Reply(_Message):
    passages: tuple[Shown, ...]


class BatchReply(_Message):
    results: tuple[tuple[Shown, ...], ...]


class Health(_Message):
    status: Literal["ok"]
    passages: int
    search: str


class Refusal(_Message):
    error: str
