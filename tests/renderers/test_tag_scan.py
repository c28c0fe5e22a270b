"""Ends of actions in tags are found in time proportional to the action, and are those that the parser finds."""

import random
import re

import pytest
from chat_templates import SEARCH, tokenizer_of

from agent_r1.core.messages import ToolSpec
from agent_r1.renderers.formats.detect import open_renderer
from agent_r1.renderers.formats.tags import Delimiters, Tags, TagScan, TagsConfig
from agent_r1.renderers.template_renderer import TemplateRenderer

PYTHON = ToolSpec(
    "python", "Run.", {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
)
TOOLS = (SEARCH, PYTHON)
PIECES = (
    "<search>", "</search>", "<answer>", "</answer>", "<think>", "</think>", "```python\n", "```py \n", "\n```\n",
    "```", "``` ", "\n", " ", "a", "é", "<", "```\t\n", "```json\n", "\n```",
)  # fmt: skip


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("thoughts", [0, 1])
def test_the_scan_finds_the_end_that_the_parser_finds(opened, thoughts):
    rng, tags = random.Random(3), Tags(TagsConfig())
    for _ in range(600):
        check = tags.completion_check(TOOLS, is_opened=opened, thoughts=thoughts)
        text = "<think>" if opened and thoughts == 0 else ""
        check(text)
        for piece in rng.choices(PIECES, k=rng.randrange(1, 14)):
            text += piece
            rest = text
            if thoughts:
                _, rest = tags.split_reasoning(text, opened)
            assert check(piece) == tags.is_complete(rest, TOOLS), text


@pytest.mark.parametrize("piece", ["</search>", "</search> </answer>", "```\n", "<answer>", "``` "])
@pytest.mark.parametrize("start", ["<think>", "", "<search>a</answer>", "```python\n</search>"])
def test_decoding_grows_with_the_length_of_the_action(piece, start, monkeypatch):
    decode = TemplateRenderer.decode

    def work(times):
        renderer, decoded, ids = open_renderer(tokenizer_of(None), "tags"), [], []
        monkeypatch.setattr(TemplateRenderer, "decode", lambda self, ids: decoded.append(len(ids)) or decode(self, ids))
        condition = renderer.stop_condition(TOOLS)
        for token in renderer.encode(start + piece * times):
            ids.append(token)
            if condition.is_met(ids):
                break
        return sum(decoded)

    assert work(60) <= 2.5 * work(30) + 1000


class CountedPattern:
    """A pattern that counts the characters that are searched."""

    def __init__(self, source):
        self._pattern, self.characters = re.compile(source), 0

    def search(self, text, start):
        self.characters += len(text) - start
        return self._pattern.search(text, start)


@pytest.mark.parametrize("piece", ["<answer>", "</search>", "</search></answer>", "a"])
@pytest.mark.parametrize("start", ["", "<search>"])
def test_each_part_of_an_action_is_searched_a_few_times(piece, start):
    def work(times):
        opening, closing = CountedPattern("<search>"), CountedPattern("</python>")
        delimiters = Delimiters("<search>", "", opening, closing, closing, ())
        check = TagScan([(delimiters, False)], is_opened=False, thoughts=1)
        check(start)
        assert not any(check(piece) for _ in range(times))
        return opening.characters + closing.characters

    assert work(200) <= 2.5 * work(100)


def test_a_condition_may_be_used_for_several_generations_at_once():
    renderer = open_renderer(tokenizer_of(None), "tags")
    condition = renderer.stop_condition(TOOLS)
    texts = (
        "<think></search></think><search>x</search>y",
        "<search>no</answer></search>y",
        "a</search>b<answer>c</answer>",
    )
    ids = [renderer.encode(text) for text in texts]
    ends = [{count for count in range(1, len(own) + 1) if condition.is_met(own[:count])} for own in ids]
    mixed = [set(), set(), set()]
    for count in range(1, max(map(len, ids)) + 1):
        for index, own in enumerate(ids):
            if count <= len(own) and condition.is_met(own[:count]):
                mixed[index].add(count)
    assert mixed == ends and all(ends)
