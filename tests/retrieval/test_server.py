"""The retrieval server returns the results of a search in process, refuses invalid requests, and stops on request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from agent_r1.cli import main
from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId
from agent_r1.envs.tool_env import NaiveRag, ToolEnv
from agent_r1.retrieval import server as server_module
from agent_r1.retrieval.client import (
    MAX_BODY,
    MAX_QUERIES,
    Health,
    RemoteRetriever,
    SearchR1Retriever,
    SearchRequest,
    open_remote,
    open_retriever,
)
from agent_r1.retrieval.retriever import BM25Index, Passage, RetrievalError, search_tool
from agent_r1.retrieval.server import RetrievalServer
from agent_r1.tools.tool_errors import ToolErrorKind

QUERIES = ["Who rules Alba?", "lake", "quantum", "", "Zoë", 'a "quoted" \n line']


def remote(server: RetrievalServer, **changes: float) -> RemoteRetriever:
    return RemoteRetriever(server.url, **{"seconds": 60, "tries": 2, "backoff": 0.01, **changes})  # type: ignore[arg-type]


def unused_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


# ---- responses


def test_a_search_over_http_equals_one_in_process(server, passages) -> None:
    local, client = BM25Index(passages), remote(server)
    assert client.search(QUERIES) == local.search(QUERIES)
    assert client.search(["lake"], k=1) == local.search(["lake"], k=1) != local.search(["lake"], k=2)
    assert client.search([]) == []


def test_single_queries_and_batches_have_separate_endpoints(server, passages) -> None:
    (found,) = BM25Index(passages).search(["Bruno"], 2)
    shown = [{"title": passage.title, "text": passage.text} for passage in found]
    assert httpx.post(f"{server.url}/search", json={"query": "Bruno", "k": 2}).json() == {"passages": shown}
    batch = httpx.post(f"{server.url}/search/batch", json={"queries": ["Bruno", "quantum"], "k": 2})
    assert batch.json() == {"results": [shown, []]}


# ---- the protocol of Search-R1


def test_a_search_by_the_protocol_of_search_r1_finds_the_same_passages(server) -> None:
    client = open_retriever(f"{server.url}/retrieve")
    assert isinstance(client, SearchR1Retriever)
    assert client.search(QUERIES, 2) == remote(server).search(QUERIES, 2)
    assert client.search(["lake"] * 300) == remote(server).search(["lake"] * 300)


def test_the_retrieval_server_answers_a_client_of_search_r1(server, passages) -> None:
    def retrieve(**asked: object) -> list[list[dict[str, object]]]:
        return httpx.post(f"{server.url}/retrieve", json=asked).json()["result"]  # type: ignore[no-any-return]

    (found,) = BM25Index(passages).search(["lake"], 2)
    scored = retrieve(queries=["lake", "quantum"], topk=2, return_scores=True)
    assert [each["document"]["contents"] for each in scored[0]] == [f'"{p.title}"\n{p.text}' for p in found]  # type: ignore[index]
    assert [each["score"] for each in scored[0]] == [1.0, 0.5] and scored[1] == []
    assert retrieve(queries=["lake"], topk=2)[0] == [each["document"] for each in scored[0]]
    assert len(retrieve(queries=["lake"] * 600)) == 600  # the queries of all its episodes at once
    assert httpx.post(f"{server.url}/retrieve", json={"queries": "lake"}).status_code == 400


class SearchR1(BaseHTTPRequestHandler):
    """Answers as Search-R1's dense retriever does, which returns the rows of its corpus."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        row = {"id": "0", "contents": '"The "Lake""\nIt rains.\nOften.'}
        found = [{"document": row, "score": 0.87}] if asked["return_scores"] else [row]
        is_known = self.path == "/retrieve" and asked.keys() == {"queries", "topk", "return_scores"}
        body = json.dumps({"result": [found] * len(asked["queries"])} if is_known else {"detail": "Not Found"}).encode()
        self.send_response(200 if is_known else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: object) -> None:
        pass


def test_a_server_of_search_r1_is_searched() -> None:
    with HTTPServer(("127.0.0.1", 0), SearchR1) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = open_retriever(f"http://127.0.0.1:{server.server_port}/retrieve")
        assert client.search(["rain", "sun"], 3) == [(Passage('The "Lake"', "It rains.\nOften."),)] * 2
        server.shutdown()


def test_health_reports_the_server(server) -> None:
    assert remote(server).health() == Health(status="ok", passages=5, search="bm25")


def test_text_that_cannot_be_encoded_is_still_searched(server) -> None:
    assert remote(server).search(["lake \ud800"])[0][0].title == "Lake district"


def test_many_queries_are_split_into_several_requests(server, counting) -> None:
    assert len(remote(server).search(["lake"] * (MAX_QUERIES + 1))) == MAX_QUERIES + 1
    assert counting.sizes == [16] * 16 + [1]


def test_concurrent_clients_get_their_own_results(server, passages) -> None:
    answers: dict[int, list[tuple[Passage, ...]]] = {}

    def ask(number: int) -> None:
        answers[number] = remote(server).search([QUERIES[number % 3]] * 3)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    here = BM25Index(passages)
    assert all(answers[number] == here.search([QUERIES[number % 3]] * 3) for number in range(24))


# ---- refused requests


@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [
        ("/search", b"{", 400, "not JSON"),
        ("/search", b"[" * 100_000, 400, "not JSON"),
        ("/search", b'{"query": 3}', 400, "query: Input should be a valid string"),
        ("/search", b'{"query": "x", "k": 0}', 400, "k: "),
        ("/search", b'{"query": "x", "k": 1000}', 400, "k: "),
        ("/search", b'{"query": "x", "kk": 1}', 400, "kk: "),
        ("/search/batch", json.dumps({"queries": ["x"] * (MAX_QUERIES + 1)}).encode(), 400, "queries: "),
        ("/search", b" " * (MAX_BODY + 1), 413, "at most"),
        ("/find", b"{}", 404, "/search"),
    ],
)
def test_an_invalid_request_gets_a_reason_and_the_server_continues(path, body, status, expected, server) -> None:
    response = httpx.post(f"{server.url}{path}", content=body)
    assert response.status_code == status
    assert expected in response.json()["error"]
    assert remote(server).search(["lake"])[0]


def test_a_request_of_unknown_length_is_accepted_and_limited(server) -> None:
    answered = httpx.post(f"{server.url}/search", content=iter([b'{"query": "lake"}']))
    assert answered.status_code == 200 and answered.json()["passages"]
    refused = httpx.post(f"{server.url}/search", content=iter([b" " * 2**20] * 5))
    assert refused.status_code == 413


def test_a_content_length_of_5000_digits_is_refused(server) -> None:
    head = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}"
    assert answer_to(server, head).startswith(b"HTTP/1.1 400")
    assert remote(server).search(["lake"])[0]


def test_a_foreign_host_name_is_refused(server) -> None:
    assert httpx.get(f"{server.url}/health", headers={"Host": "evil.example"}).status_code == 400
    assert httpx.get(f"{server.url}/health", headers={"Host": "localhost"}).status_code == 200


def test_a_connection_without_a_complete_request_is_closed(counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.web.HEADER_SECONDS", 0.2)
    monkeypatch.setattr("agent_r1.retrieval.server.BODY_SECONDS", 0.2)
    with RetrievalServer(counting, Health(status="ok", passages=5, search="bm25")) as small:
        assert answer_to(small, b"POST /search HTTP/1.1\r\nHost: localhost\r\n") == b""
        head = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n{"
        assert answer_to(small, head).startswith(b"HTTP/1.1 408")


def test_a_later_request_without_complete_headers_is_closed_too(server, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_connection((server.host, server.port), timeout=60) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr("agent_r1.web.HEADER_SECONDS", 0.1)
        raw.sendall(b"POST /search HTTP/1.1\r\n")
        while raw.recv(4096):
            pass


def test_a_client_that_does_not_read_its_answer_is_disconnected(counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.web.HEADER_SECONDS", 0.5)
    monkeypatch.setattr("agent_r1.retrieval.server.IDLE_SECONDS", 1)
    page = Passage("long", "x" * 100_000)
    monkeypatch.setattr(counting, "search", lambda queries, k=5: [(page,) * k for _ in queries])
    body = json.dumps({"queries": ["lake"] * 64, "k": 5}).encode()
    head = f"POST /search/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    with RetrievalServer(counting, Health(status="ok", passages=5, search="bm25")) as small, socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((small.host, small.port))
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        assert raw.recv(60).startswith(b"HTTP/1.1 200")
        while small._server.server_state.connections:
            time.sleep(0.01)


def test_a_short_search_is_answered_while_a_large_batch_runs(server, counting, monkeypatch: pytest.MonkeyPatch) -> None:
    began, received = threading.Event(), threading.Event()
    read, in_process = server_module._read, counting.search

    async def reading(kind, request):
        message = await read(kind, request)
        if kind is SearchRequest:
            received.set()  # it waits for the first part of the batch, which waits for this
        return message

    def search(queries: Sequence[str], k: int = 5) -> list[tuple[Passage, ...]]:
        began.set()
        assert received.wait(60)
        return in_process(queries, k)

    monkeypatch.setattr(server_module, "_read", reading)
    counting.search = search
    batch = threading.Thread(target=lambda: remote(server).search(["lake"] * 64))
    batch.start()
    assert began.wait(60)
    assert httpx.post(f"{server.url}/search", json={"query": "lake"}, timeout=60).json()["passages"]
    batch.join()
    assert counting.sizes == [16, 1, 16, 16, 16]


def test_slow_clients_take_no_place_from_others_for_long(counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.retrieval.server.MAX_CONNECTIONS", 10)
    monkeypatch.setattr("agent_r1.web.HEADER_SECONDS", 0.5)
    with RetrievalServer(counting, Health(status="ok", passages=5, search="bm25")) as small, ExitStack() as clients:
        for _ in range(30):
            raw = clients.enter_context(socket.create_connection((small.host, small.port), timeout=60))
            raw.sendall(b"POST /search HTTP/1.1\r\nHost: localhost\r\n")
        while True:  # refused or not, until the time of the slow ones is over; a hang would end the test
            try:
                assert remote(small, tries=1).search(["lake"])[0]
                return
            except RetrievalError:
                continue


def answer_to(server: RetrievalServer, request: bytes) -> bytes:
    """Send bytes and return all bytes until the server closes the connection."""
    with socket.create_connection((server.host, server.port), timeout=30) as raw:
        raw.sendall(request)
        return b"".join(iter(lambda: raw.recv(4096), b""))


def test_a_refused_body_is_not_read_as_the_next_request(server) -> None:
    head = f"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n".encode()
    body = b" " * MAX_BODY + b"  GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = answer_to(server, head + body)
    assert answer.startswith(b"HTTP/1.1 413") and b'"ok"' not in answer


def test_a_refused_request_is_not_retried(server, counting) -> None:
    with pytest.raises(AgentR1Error, match=r"refused the request \(status 400: .*k: ") as caught:
        remote(server).search(["x"], k=1000)
    assert not isinstance(caught.value, RetrievalError)
    assert counting.sizes == []


# ---- failures


def test_a_server_error_is_retried(server, counting) -> None:
    counting.failures = 1
    assert remote(server).search(["lake"])[0]
    assert counting.sizes == [1, 1]


def test_retries_end_if_the_server_keeps_failing(server, counting) -> None:
    counting.failures = 99
    with pytest.raises(RetrievalError, match=r"status 500: .*RuntimeError: the disk is gone"):
        remote(server, tries=3).search(["lake"])
    assert len(counting.sizes) == 3


def test_a_hanging_server_times_out(server, counting) -> None:
    asked_to_end = threading.Event()
    counting.search = lambda queries, k=5: asked_to_end.wait(600) and []
    try:
        with pytest.raises(RetrievalError, match="Timeout"):  # long before the search ends
            remote(server, seconds=0.1).search(["lake"])
    finally:
        asked_to_end.set()


def test_another_kind_of_server_is_detected(server, counting) -> None:
    counting.search = lambda queries, k=5: []
    with pytest.raises(RetrievalError, match="answered 0 of 1"):
        remote(server).search(["lake"])


def test_connections_beyond_the_limit_wait(counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.retrieval.server.MAX_CONNECTIONS", 1)
    with RetrievalServer(counting, Health(status="ok", passages=5, search="bm25")) as small:
        first = remote(small)
        assert first.search(["lake"])  # the client keeps its connection open
        with pytest.raises(RetrievalError):
            remote(small).search(["lake"])
        assert first.search(["lake"])


def test_a_running_request_is_answered_before_the_server_stops(server, counting) -> None:
    started, stopping = threading.Event(), threading.Event()

    def search(queries: Sequence[str], k: int = 5) -> list[tuple[Passage, ...]]:
        started.set()
        assert stopping.wait(60)
        return [(Passage("late", "but whole"),)]

    counting.search = search
    answers: list[object] = []
    client = threading.Thread(target=lambda: answers.append(remote(server, tries=1).search(["x"])))
    client.start()
    assert started.wait(60)
    server.stop()
    assert answers == []
    stopping.set()
    client.join()
    assert answers == [[(Passage("late", "but whole"),)]]


def test_an_unreachable_server_is_reported_in_one_line(server) -> None:
    with pytest.raises(InvalidInput, match="start one there with agent-r1 retriever") as caught:
        open_remote(unused_address())
    assert "\n" not in str(caught.value)
    assert isinstance(open_retriever(server.url), RemoteRetriever)


def test_an_address_in_use_is_reported_in_one_line(server, counting) -> None:
    with pytest.raises(InvalidInput, match="choose another --host or --port"):
        RetrievalServer(counting, Health(status="ok", passages=5, search="bm25"), server.host, server.port)


# ---- the search tool over HTTP


def ask(env: ToolEnv, queries: list[str]) -> list[str]:
    """Search each query in its own episode, concurrently, and return each agent's observation."""

    async def one(number: int, query: str) -> str:
        episode = await env.open(Task("t", ()), RolloutContext(AttemptId("r", "t", 0, number), 0))
        message = Message.assistant("", (ToolCall("c", "search", {"query": query}, ""),))
        step = await episode.step(Action(message, ""))
        assert step.end is None
        return step.messages[0].text

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one(number, query) for number, query in enumerate(queries)))

    return asyncio.run(all_of_them())


def test_calls_of_many_episodes_are_batched_into_one_request(server, counting) -> None:
    observations = ask(ToolEnv([search_tool(remote(server))]), ["lake"] * 30 + ["Bruno"] * 10)
    assert counting.sizes == [16, 16, 8]  # the parts of one batch
    assert all("Lake district" in text for text in observations[:30]) and all(
        "a king" in text for text in observations[30:]
    )


def test_an_unreachable_server_costs_each_agent_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = search_tool(RemoteRetriever(unused_address(), tries=2, backoff=0.01))
    pauses: list[float] = []
    monkeypatch.setattr("agent_r1.retrieval.client.time.sleep", pauses.append)
    observations = ask(ToolEnv([tool]), ["lake"] * 40)
    assert all(text.startswith("search failed: the retrieval server at http://127.0.0.1:") for text in observations)
    assert len(pauses) == 1  # one retry for all of them, not one for each
    result = asyncio.run(tool.run({"query": "x"}, Task("t", ()), RolloutContext(AttemptId("r", "t", 0, 0), 0)))
    assert (result.ok, result.error) == (False, ToolErrorKind.RAISED)


def test_naive_rag_does_not_use_an_error_as_a_passage() -> None:
    rag = NaiveRag(search_tool(RemoteRetriever(unused_address(), tries=1)))
    task = Task("t", (Message.user("Who?"),))
    with pytest.raises(AgentR1Error, match="the retrieval for task t failed"):
        asyncio.run(rag.open(task, RolloutContext(AttemptId("r", "t", 0, 0), 0)))


# ---- the command


def start(corpus: Path) -> tuple[subprocess.Popen[str], dict[str, object]]:
    command = [sys.executable, "-m", "agent_r1.cli", "retriever", "--corpus", str(corpus), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline() or "{}")


@pytest.fixture
def corpus(tmp_path: Path, passages) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"title": p.title, "text": p.text}) for p in passages), "utf-8")
    return path


def test_the_command_serves_until_it_is_terminated(corpus: Path, passages) -> None:
    process, info = start(corpus)
    try:
        assert (info["passages"], info["search"], info["status"]) == (5, "bm25", "ok")
        client = RemoteRetriever(str(info["url"]))
        assert client.search(QUERIES) == BM25Index(passages).search(QUERIES)
    finally:
        os.kill(process.pid, signal.SIGTERM)
    assert process.wait(120) == 0  # while the client's connection is still open
    assert process.communicate()[1] == ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--encoder", "/nothing/there"], "encoder: got /nothing/there"),
        (["--pooling", "cls"], "pooling: got it without an encoder"),
        (["--probes", "3"], "probes: got it without an encoder"),
        (["--port", "70000"], "port (command line): got 70000"),
        (["--corpus", "/nothing/there"], "/nothing/there: got No such file"),
    ],
)
def test_the_command_reports_invalid_settings_in_one_line(
    options: list[str], expected: str, corpus: Path, capsys
) -> None:
    assert main(["retriever", "--corpus", str(corpus), *options]) == 2
    out, error = capsys.readouterr()
    assert out == "" and expected in error and error.count("\n") == 1
