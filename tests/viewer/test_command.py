"""The command: one line for bad input, an address with a token, a clean end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from agent_r1.cli import main


@pytest.fixture(autouse=True)
def in_a_folder_with_runs(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink(recorded, tmp_path / "runs")
    (tmp_path / "empty").mkdir()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["albe"], ["run: got albe", "'alba'"]),
        (["empty"], ["run: got empty, but empty holds no run; give the name of a run in runs/"]),
        (["runs/alba/run.db"], ["there is no folder runs/alba/run.db"]),
        (["a\x00b"], ["there is no folder"]),
        (["x" * 5000], [" characters)"]),
        (["--port", "70000"], ["70000"]),
        (["--post", "1"], ["--port"]),
    ],
)
def test_bad_input_is_one_line(
    arguments: Sequence[str], words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 1
    assert all(word in output.err for word in words), output.err


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["view", "--port", str(other.getsockname()[1])]) == 2
    error = capsys.readouterr().err
    assert "choose another --port" in error and "in use" in error and len(error.splitlines()) == 1


@contextmanager
def killed_after_a_failure(process: subprocess.Popen[str]) -> Iterator[None]:
    """Otherwise the end of the ``with`` block around the process would wait for ever."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


@pytest.mark.parametrize(
    ("number", "runs", "count", "page", "title"),
    [
        (signal.SIGINT, ["runs", "alba"], "3 runs", "/", "Runs"),
        (signal.SIGTERM, ["alba"], "1 run", "/run/alba", "alba"),
    ],
)
def test_the_viewer_prints_the_address_of_the_run_or_of_the_list_and_a_signal_ends_it(
    number: signal.Signals, runs: Sequence[str], count: str, page: str, title: str
) -> None:
    command = [sys.executable, "-m", "agent_r1.cli", "view", "--port", "0", *runs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.fullmatch(rf"{count} at (http://127\.0\.0\.1:\d+{page}\?token=[\w-]{{32}})\n", line)
        assert found is not None, line
        with killed_after_a_failure(process), httpx.Client() as client:
            assert f"<title>{title} · agent-r1</title>" in client.get(found[1], follow_redirects=True).text
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_the_browser_gets_a_private_file_and_no_token_on_its_command_line(tmp_path: Path) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(
        f'#!/bin/sh\nfile="${{1#file://}}"\n(echo "$@"; ls -l "$file" | cut -c 1-10; cat "$file") > {opened}\n',
        "utf-8",
    )
    browser.chmod(0o755)
    command = [sys.executable, "-m", "agent_r1.cli", "view", "--port", "0", "--open", "alba"]
    environment = {**os.environ, "BROWSER": str(browser), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", env=environment
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with killed_after_a_failure(process):
            assert httpx.get(address, timeout=60).status_code == 303  # the server runs, so the browser was started
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    url, mode, page = opened.read_text("utf-8").splitlines()
    assert re.fullmatch(rf"file://{tmp_path}/agent-r1-view-[^/]+\.html", url) and mode == "-rw-------"
    assert f'content="0; url={address}"' in page and not list(tmp_path.glob("*.html"))


def test_the_viewer_does_not_load_torch() -> None:
    code = "import sys, agent_r1.cli, agent_r1.viewer.app, agent_r1.commands.recorded_run as v; v.default_settings(); "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
