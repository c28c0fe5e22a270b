"""Tools that return images, and images of tools that cannot be used."""

import asyncio
import struct
import threading
import zlib

from PIL import Image as Pillow

from agent_r1.core import messages
from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Image, Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId
from agent_r1.tools import function_tool
from agent_r1.tools.function_tool import Resources, tool
from agent_r1.tools.tool_errors import ToolErrorKind


def run(value):
    @tool
    def look() -> str:
        """Look."""
        return value

    task, context = Task("t", "?"), RolloutContext(AttemptId("run", "t", 0, 0), 0)
    return asyncio.run(look.run({}, task, context, 60.0, Resources(task, context)))


PICTURE = Pillow.new("RGB", (6, 4), "red")
IMAGE = Image.from_pil(PICTURE)


def test_images_of_all_kinds_become_parts_of_the_result():
    for value in (PICTURE, IMAGE, ToolResult((IMAGE,), ok=True)):
        assert run(value).parts == (IMAGE,)
    assert run(["left:", PICTURE, "right:", IMAGE]).parts == (Text("left:"), IMAGE, Text("right:"), IMAGE)
    assert run([1, "two"]).parts == (Text('[1, "two"]'),)


def test_images_are_encoded_and_decoded_outside_of_the_event_loop(monkeypatch):
    threads = []

    def note(work):
        def noting(*arguments):
            threads.append(threading.current_thread())
            return work(*arguments)

        return noting

    monkeypatch.setattr(messages, "encode_picture", note(messages.encode_picture))
    monkeypatch.setattr(function_tool, "decode_image", note(function_tool.decode_image))
    for value in (Pillow.new("RGB", (6, 4), "blue"), IMAGE, ToolResult((Text("seen:"), IMAGE), ok=True)):
        assert run(value).ok
    assert len(threads) == 4 and threading.main_thread() not in threads


def undecodable():
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"no pixels") + chunk(b"IEND", b"")


def test_an_image_that_cannot_be_used_is_a_failed_result():
    large = Pillow.new("1", (8000, 8000))
    for value, reason in (
        (Image.from_bytes(undecodable()), "cannot be decoded"),
        (Image("00" * 32, "image/png"), "cannot identify"),
        (large, "8000 x 8000 pixels"),
        ([PICTURE, Pillow.new("RGB", (1, 500))], "1 x 500 pixels"),
    ):
        result = run(value)
        assert (result.ok, result.error) == (False, ToolErrorKind.BAD_RESULT)
        assert reason in result.parts[0].text and "\n" not in result.parts[0].text
