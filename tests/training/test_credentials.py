"""Credentials in the address of a retriever are neither stored nor shown, and a run can be resumed nevertheless."""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_r1.cli import main
from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.redaction import has_redacted, redact
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId
from agent_r1.retrieval.client import Health, RemoteRetriever
from agent_r1.retrieval.retriever import BM25Index, Passage, search_tool
from agent_r1.retrieval.server import RetrievalServer
from agent_r1.store.reader import RunReader
from agent_r1.tools.mcp import HttpServer, StdioServer, redact_secrets
from agent_r1.training.config import TasksetConfig

SECRET = "correct-horse/battery"
SMALL = ["--groups_per_step", "1", "--group_size", "2", "--max_tokens", "8", "--evaluate_n", "1", "--quiet"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://ann:secret@host:8800/x", "http://***@host:8800/x"),
        (
            "at http://ann:p@ss/word@host, or https://h?token=abc&k=5;",
            "at http://***@host, or https://h?token=***&k=5",
        ),
        ("got ['http://ann:a@h','http://h:1/b@c']", "got ['http://***@h','http://h:1/b@c']"),
        ("http://ann:a/b?c#d@host/x", "http://***@host/x"),
        ("http://ann:secret@host/@wiki18", "http://***@wiki18"),
        ("http://token@host/@wiki18", "http://***@host/@wiki18"),
        ("https://h/x?a=1;token=abc", "https://h/x?a=1;token=***"),
        (
            "https://h/?X-Amz-Signature=a&api_key=b&Password=c&sig=d&auth=e",
            "https://h/?X-Amz-Signature=***&api_key=***&Password=***&sig=***&auth=***",
        ),
        ("http://h/p?u=http://ann:a@h2/", "http://h/p?u=http://***@h2/"),
        ("http://h/p?u=http%3A%2F%2Fann%3Aa%40h2", "http://h/p?u=***"),
        ("http://h/" + "http://h/" * 2000 + "http://ann:a@h", "http://h/http://***"),
        ("http://10.0.0.1:8800/@wiki18", "http://10.0.0.1:8800/@wiki18"),
        ("git+https://github.com/org/repo@v1.2", "git+https://github.com/org/repo@v1.2"),
        ("http://[::1]:8800/a@b", "http://[::1]:8800/a@b"),
        (
            "http://h/?index=wiki18&max_tokens=5&author=b&keyword=c#top",
            "http://h/?index=wiki18&max_tokens=5&author=b&keyword=c#top",
        ),
        ("mail ann@host, 5 http://host:1/a", "mail ann@host, 5 http://host:1/a"),
    ],
)
def test_credentials_are_removed_from_addresses(text: str, shown: str) -> None:
    assert redact(text).rstrip(";") == shown
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize("password", ["it's-secret", "my secret", 'a"b,c', "a', 'b", "<p>", "p@ss/w?rd#x"])
def test_credentials_with_spaces_and_quotes_are_removed_from_settings_and_errors(password: str) -> None:
    address = f"http://ann:{password}@10.0.0.1:8800"
    assert TasksetConfig(corpus=address).model_dump(mode="json")["corpus"] == "http://***@10.0.0.1:8800"
    assert str(InvalidInput("corpus", got=address, do="x")) == "corpus: got http://***@10.0.0.1:8800; x"


def test_an_address_without_credentials_is_stored_as_it_is() -> None:
    for address in ("http://10.0.0.1:8800/@wiki18", "http://10.0.0.1:8800/?index=wiki18"):
        stored = TasksetConfig(corpus=address).model_dump(mode="json")["corpus"]
        assert stored == address and not has_redacted(stored)
    assert has_redacted(redact("http://h/?index=wiki18&token=abc"))


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
    Path("questions.json").write_text(json.dumps(rows), "utf-8")
    address = server.url.replace("//", f"//ann:{SECRET.replace('/', '%2F')}@")
    train = ["train", "--taskset", "hotpotqa", "--data", "questions.json", "--run", "demo", *SMALL]
    assert main([*train, "--corpus", address, "--model", "tiny-base", "--steps", "1", "--json"]) == 0
    assert main(["train", "--run", "demo", "--resume", "--steps", "2", "--quiet"]) == 2
    assert "give --corpus with its user and password" in capfd.readouterr().err.splitlines()[-1]
    assert main(["eval", "--model", "demo", "--evaluate_n", "1", "--quiet"]) == 2
    assert main(["eval", "--model", "demo", "--evaluate_n", "1", "--quiet", "--json", "--corpus", address]) == 0
    resume = ["train", "--run", "demo", "--resume", "--steps", "2", "--quiet", "--corpus"]
    assert main([*resume, address]) == 0
    assert main([*resume[:5], "3", *resume[6:], address.replace(str(server.port), "1")]) == 2  # nobody listens there
    printed = capfd.readouterr()
    texts = [printed.out, printed.err, caplog.text, *content(Path("runs/demo"))]
    for word in (SECRET, SECRET.replace("/", "%2F"), "horse", "ann:"):
        assert not [text[:200] for text in texts if word in text]
    assert json.loads(Path("runs/demo/config.json").read_text("utf-8"))["corpus"] == redact(address)


def test_a_failing_search_does_not_show_credentials_to_the_agent() -> None:
    retriever = RemoteRetriever(f"http://ann:{SECRET.replace('/', '%2F')}@127.0.0.1:1", tries=1)
    task, context = Task("t", "Who?"), RolloutContext(AttemptId("run", "t", 0, 0), 0)
    result = asyncio.run(search_tool(retriever).run({"query": "Alba"}, task, context))
    assert "did not answer" in str(result) and "horse" not in str(result)


def test_descriptions_of_tool_servers_have_no_credentials() -> None:
    stdio = StdioServer(("python", "s.py", "--api-key", SECRET, f"--token={SECRET}"), {"KEY": SECRET})
    http = HttpServer(f"http://ann:{SECRET}@host/mcp", {"Authorization": f"Bearer {SECRET}"})
    for server in (stdio, http):
        assert SECRET not in f"{server} {redact_secrets(f'it said {SECRET}', server)}"
    assert "horse" not in str(StdioServer(("uvx", f"http://ann:it's-{SECRET}@host", f"--url=http://ann:{SECRET}@host")))
    words = ("env", f"OPENAI_API_KEY={SECRET}", "serve", "--header", f"Authorization: Bearer {SECRET}", "-k", SECRET)
    shown = str(StdioServer((*words, "--max_tokens", "5")))
    assert shown == "env OPENAI_API_KEY=*** serve --header *** -k *** --max_tokens 5"
    package = StdioServer(("uvx", "--from", "git+https://github.com/org/repo@v1.2", "server"))
    assert str(package) == "uvx --from git+https://github.com/org/repo@v1.2 server"
    assert SECRET not in repr(http).replace(http.url, "") and "variables" not in repr(stdio)
