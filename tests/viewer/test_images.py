"""Images of a run: stored once, shown by the viewer and by show, and counted by verify."""

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import httpx
import pytest
from PIL import Image as Pillow
from viewed_runs import make_trajectory

from agent_r1.commands.show_attempt import attempt_json
from agent_r1.core.events import AttemptFinished, AttemptStarted
from agent_r1.core.inference import PromptMedia
from agent_r1.core.messages import Image, Message, Text
from agent_r1.export.config import ExportConfig
from agent_r1.export.trajectories import openai_messages, read_attempts
from agent_r1.store.folder import create_run
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.viewer.app import create_app
from agent_r1.viewer.catalog import Catalog
from agent_r1.viewer.conversation import make_conversation
from agent_r1.viewer.server import ViewerServer

RED, BLUE = (Image.from_pil(Pillow.new("RGB", (6, 4), color)) for color in ("red", "blue"))


def with_images(index):
    """An attempt with a picture in its prompt, and another one in the result of its first call."""
    made = make_trajectory("seen", 1, index)
    turn = made.turns[0]
    answer = replace(turn.observation[0], parts=(BLUE, Text("a crop")))
    result = replace(turn.results[0], parts=answer.parts)
    turn = replace(turn, observation=(answer,), results=(result,), media=(PromptMedia(RED, (range(1, 3),)),))
    start = (Message("user", (Text("Look:"), RED, Text("What is it?"))),)
    return replace(made, turns=(turn, *made.turns[1:]), start=start)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "seen"
    trajectories = [with_images(0), with_images(1)]
    with closing(create_run(folder, {"model": "", "group_size": 2})) as writer:
        events = [AttemptStarted(one.attempt, "train", 0) for one in trajectories]
        asyncio.run(writer.record(*events, *map(AttemptFinished, trajectories)))
    return folder


@pytest.fixture(scope="module")
def server(run):
    with ViewerServer(create_app(Catalog([run.parent]), {}, lambda name: None)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url.split("/?")[0]) as client:
        client.get(server.url, follow_redirects=True).raise_for_status()
        yield client


def test_each_image_is_stored_once_and_comes_back(run):
    with closing(sqlite3.connect(run / "run.db")) as database:
        assert sorted(database.execute("SELECT sha256, mime, data FROM images")) == sorted(
            (image.sha256, "image/png", image.data) for image in (RED, BLUE)
        )
    with closing(RunReader(run)) as reader:
        (first, _) = reader.trajectories()
        assert first == with_images(0)
        assert [(image.width, image.height, image.data) for image in first.start[0].images] == [(6, 4, b"")]
        assert reader.image(RED.sha256).data == RED.data and reader.image("00") is None


def test_exports_hold_the_images_themselves(run):
    with closing(RunReader(run)) as reader:
        (first, _) = read_attempts(reader, ExportConfig(format="openai"))
    (content,) = [message["content"] for message in openai_messages(first.trajectory.start, arguments_as_text=True)]
    assert content[1]["image_url"]["url"] == RED.to_data_url()


def test_verify_finds_a_changed_image(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    with closing(sqlite3.connect(copy / "run.db")) as database, database:
        database.execute("UPDATE images SET data = x'00' WHERE sha256 = ?", (RED.sha256,))
    assert any("table images differs" in line for line in verify(copy).violations)


def test_the_page_of_an_attempt_shows_its_images(client):
    page = client.get("/run/seen/attempt/0.0.0:style-a/0").text
    for image in (RED, BLUE):
        assert f'src="/run/seen/image/{image.sha256}"' in page


def test_an_image_is_served_with_its_type_and_only_with_the_token(client, server):
    path = f"/run/seen/image/{RED.sha256}"
    answer = client.get(path)
    assert (answer.status_code, answer.content) == (200, RED.data)
    assert answer.headers["content-type"] == "image/png" and answer.headers["x-content-type-options"] == "nosniff"
    assert "img-src 'self'" in answer.headers["content-security-policy"]
    assert httpx.get(server.url.split("/?")[0] + path).status_code == 403
    assert client.get("/run/seen/image/" + "0" * 64).status_code == 404


def test_show_prints_a_line_for_each_image(run):
    with closing(RunReader(run)) as reader:
        summary = reader.find_attempt("0.0.0:style-a/0")
        conversation = make_conversation(reader.trajectory(summary.attempt), (), None, 0)
    data = attempt_json(summary, conversation, ())
    assert f"Look:\n[image/png 6x4 {RED.sha256[:12]}]\nWhat" in data["start"][0]["text"]
    assert f"[image/png 6x4 {BLUE.sha256[:12]}]\na crop" in data["turns"][0]["calls"][0]["result"]
    assert json.loads(json.dumps(data))["start"][0]["images"][0]["sha256"] == RED.sha256
