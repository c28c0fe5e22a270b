"""Credentials in the address of a retriever are neither stored nor shown, and a run can be resumed nevertheless."""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_r1.cli import main
from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.redaction import redact
from agent_r1.core.task import Task
from agent_r1.retrieval.bm25 import BM25Index
from agent_r1.retrieval.client import RemoteRetriever
from agent_r1.retrieval.passages import Passage
from agent_r1.retrieval.protocol import Health
from agent_r1.retrieval.server import RetrievalServer
from agent_r1.retrieval.tool import search_tool
from agent_r1.store import RunReader
from agent_r1.tools.mcp import HttpServer, StdioServer

SECRET = "correct-horse/battery"
SMALL = ["--groups_per_step", "1", "--group_size", "2", "--max_tokens", "8", "--evaluate_n", "1", "--quiet"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://ann:secret@host:8800/x", "http://***@host:8800/x"),
        (
            "at http://ann:p@ss/word@host, or https://h?token=abc&k=5;",
            "at http://***@host, or https://h?token=***&k=***",
        ),
        ("data/http:/ann:secret@host", "data/http:/***@host"),
        ("mail ann@host, 5 http://host:1/a", "mail ann@host, 5 http://host:1/a"),
    ],
)
def test_credentials_are_removed_from_addresses(text: str, shown: str) -> None:
    assert redact(text).rstrip(";") == shown
    assert redact(redact(text)) == redact(text)


@pytest.fixture
def server() -> Iterator[RetrievalServer]:
    index = BM25Index((Passage("Alba", "Alba is ruled by Bruno."),))
    with RetrievalServer(index, Health(status="ok", passages=1, search="bm25")) as running:
        yield running


def content(folder: Path) -> Iterator[str]:
    """Yield everything in a run's folder as text: its files, its configuration, events and trajectories."""
    for file in folder.rglob("*"):
        if file.is_file():
            yield file.read_bytes().decode("latin-1")
    with closing(RunReader(folder)) as reader:
        yield json.dumps(reader.config())
        yield from map(repr, [*reader.events(), *reader.trajectories(), *reader.attempts(), *reader.fates()])


def test_a_run_stores_and_shows_no_credentials_and_resumes_with_the_address_given_again(
    server: RetrievalServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    rows = [{"question": f"Who rules Alba in {number}?", "answer": "Bruno"} for number in range(20)]
    Path("questions.json").write_text(json.dumps(rows))
    address = server.url.replace("//", f"//ann:{SECRET.replace('/', '%2F')}@")
    train = ["train", "--taskset", "hotpotqa", "--data", "questions.json", "--run", "demo", *SMALL]
    assert main([*train, "--corpus", address, "--model", "tiny-base", "--steps", "1", "--json"]) == 0
    assert main(["train", "--run", "demo", "--resume", "--steps", "2", "--quiet"]) == 2
    assert "give --corpus with its user and password" in capfd.readouterr().err.splitlines()[-1]
    assert main(["eval", "--model", "demo", "--n", "1", "--quiet"]) == 2
    assert main(["eval", "--model", "demo", "--n", "1", "--quiet", "--json", "--corpus", address]) == 0
    resume = ["train", "--run", "demo", "--resume", "--steps", "2", "--monitor.idle_steps", "9", "--quiet", "--corpus"]
    assert main([*resume, address]) == 0
    assert main([*resume[:5], "3", *resume[6:], address.replace(str(server.port), "1")]) == 2  # nobody listens there
    printed = capfd.readouterr()
    texts = [printed.out, printed.err, caplog.text, *content(Path("runs/demo"))]
    for word in (SECRET, SECRET.replace("/", "%2F"), "horse", "ann:"):
        assert not [text[:200] for text in texts if word in text]
    assert json.loads(Path("runs/demo/config.json").read_text())["corpus"] == redact(address)


def test_a_failing_search_does_not_show_credentials_to_the_agent() -> None:
    retriever = RemoteRetriever(f"http://ann:{SECRET.replace('/', '%2F')}@127.0.0.1:1", tries=1)
    task, context = Task("t", "Who?"), RolloutContext(AttemptId("run", "t", 0, 0), 0)
    result = asyncio.run(search_tool(retriever).run({"query": "Alba"}, task, context))
    assert "did not answer" in str(result) and "horse" not in str(result)


def test_errors_have_no_credentials() -> None:
    error = InvalidInput("corpus", got=f"http://ann:{SECRET}@host", do="x")
    assert "http://***@host" in str(error) and "horse" not in str(error)


def test_descriptions_of_tool_servers_have_no_credentials() -> None:
    stdio = StdioServer(("python", "s.py", "--api-key", SECRET, f"--token={SECRET}"), {"KEY": SECRET})
    http = HttpServer(f"http://ann:{SECRET}@host/mcp", {"Authorization": f"Bearer {SECRET}"})
    for server in (stdio, http):
        assert SECRET not in f"{server} {server.redact(f'it said {SECRET}')}"
    assert SECRET not in repr(http).replace(http.url, "") and "variables" not in repr(stdio)
