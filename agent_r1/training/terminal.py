"""The terminal of a chat, or of an episode that a person plays."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text as Line

from agent_r1.core.messages import Message, parts_text


class Terminal:
    """An object that reads lines from standard input (a terminal or a pipe), and prints messages on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def print(self, text: str) -> None:
        """Print a text. Control characters are replaced, so that the text cannot control the terminal."""
        safe = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        self._console.print(Line(safe), soft_wrap=True)

    def show(self, messages: Sequence[Message]) -> None:
        """Print messages with their calls. An image is printed as its type, its size and its hash."""
        for message in messages:
            calls = (f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in message.calls)
            self.print(f"{message.role}: {' '.join(filter(None, (parts_text(message.parts), *calls)))}")

    def read(self, prompt: str = "> ") -> str:
        """Print ``prompt``, and return the text that the person types. After a backslash, the text goes on in the next
        line.

        The call blocks the event loop. Raises EOFError at the end of the input (Ctrl-D), and KeyboardInterrupt after
        Ctrl-C.
        """
        text = self._read_line(prompt)
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self._read_line(". ")
        return text

    def _read_line(self, prompt: str) -> str:
        """Read a line from standard input, and print it if standard input is a pipe.

        Ctrl-C raises KeyboardInterrupt at once. asyncio's own handler would wait for the event loop, which is blocked.
        """
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            line = input(prompt)
        finally:
            signal.signal(signal.SIGINT, handler)
        if not sys.stdin.isatty():
            self.print(line)
        return line.encode("utf-8", "replace").decode("utf-8")
