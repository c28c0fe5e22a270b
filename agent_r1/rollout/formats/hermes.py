"""Tool calls as Hermes, Qwen2.5 and Qwen3 write them: ``<tool_call>`` JSON ``</tool_call>`` inside the text."""

from __future__ import annotations

from typing import ClassVar

from agent_r1.rollout.formats.format import Block, Format, Reading, Tools, Written, before, blocks, broken, call_of
from agent_r1.rollout.formats.format import read_json as read

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(Format):
    """Example: <tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>"""

    name: ClassVar[str] = "hermes"

    def read(self, said: str, tools: Tools) -> Reading:
        return Reading(before(said, OPEN), tuple(_call(block) for block in blocks(said, OPEN, CLOSE)))


def _call(block: Block) -> Written:
    if not block.closed:
        return broken(block.text, block.end, f"the call is not closed by {CLOSE}")
    try:
        return call_of(read(block.text), block.text, block.end)
    except ValueError as error:
        return broken(block.text, block.end, f"the call is not valid JSON: {error}")
