"""Recorded runs and a viewer that serves them; a headless Chromium for tests of behavior in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from viewed_runs import write_hostile_run, write_run

from agent_r1.store.folder import reopen_run
from agent_r1.store.writer import RunWriter
from agent_r1.viewer.app import create_app
from agent_r1.viewer.catalog import Catalog
from agent_r1.viewer.server import ViewerServer

DEFAULTS = {"steps": 200, "trainer.learning_rate": 1e-6, "reward_weights": {}, "taskset": "tinywiki", "model": ""}


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewed")
    write_run(folder / "alba", steps=6)
    write_run(folder / "bruno", steps=3, learning_rate=3e-4, complete=False)
    write_hostile_run(folder)
    return folder


@pytest.fixture(scope="session")
def server(recorded: Path) -> Iterator[ViewerServer]:
    with ViewerServer(create_app(Catalog([recorded]), DEFAULTS, lambda name: None)) as server:
        yield server


@pytest.fixture
def client(server: ViewerServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url.split("/?")[0]) as client:
        client.get(server.url, follow_redirects=True).raise_for_status()
        yield client


@pytest.fixture
def growing(recorded: Path, tmp_path: Path) -> Iterator[tuple[Path, RunWriter]]:
    folder = Path(shutil.copytree(recorded / "bruno", tmp_path / "runs" / "bruno"))
    with closing(reopen_run(folder)) as writer:
        yield folder, writer
