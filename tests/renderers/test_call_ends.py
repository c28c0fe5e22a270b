"""The index in the sampled tokens at which each call ends."""

from functools import cache

import pytest
from hypothesis import example, given, settings, strategies as st
from tests_tokenizer import TEMPLATE, hermes_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_r1.model.load import load_tokenizer
from agent_r1.renderers.formats.json_formats import CLOSE, OPEN
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER

CALL = OPEN + '{"name": "search", "arguments": {"query": "%s"}}' + CLOSE


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer(hermes_tokenizer())


@cache
def merging_renderer(*merges):
    """Return a renderer whose tokens are bytes and merges such as ('>', 'Ċ'), a '>' with a line break."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [first + second for first, second in merges]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    return TemplateRenderer(fast)


words = st.text("aé日😀 \n{}", max_size=6)
closed = words.map(lambda word: (CALL % word, True))
unclosed = words.map(lambda word: (OPEN + word, False))
between = words.map(lambda word: (word, None))


def byte_places(pieces):
    """Return the index of each call's last byte; an unclosed call ends before the next call or at the end."""
    places, count, waiting = [], 0, False
    for text, is_closed in pieces:
        if waiting and is_closed is not None:
            places.append(count - 1)
        waiting = is_closed is False or (waiting and is_closed is None)
        count += len(text.encode())
        if is_closed:
            places.append(count - 1)
    return (*places, count - 1) if waiting else tuple(places)


@given(st.lists(closed | unclosed | between, max_size=6), st.booleans())
@example([("é", None), (CALL % "日", True), (CALL % "日", True), ("\n日本", None)], True)
@example([(OPEN + "日", False)], False)
def test_each_call_ends_at_its_last_byte(renderer, pieces, stopped):
    ids = renderer.encode("".join(text for text, _ in pieces)) + (renderer.end_token_id,) * stopped
    assert renderer.call_ends(ids) == byte_places(pieces)
    assert len(renderer.call_ends(ids)) == len(renderer.parse(ids).message.calls)


def test_a_call_cut_inside_a_character_ends_at_the_last_token(renderer):
    whole = renderer.encode(OPEN + "日")
    for cut in (whole[:-1], whole[:-2]):
        assert renderer.call_ends(cut) == (len(cut) - 1,)


def test_without_calls_there_are_no_call_ends(renderer):
    assert (
        renderer.call_ends(())
        == renderer.call_ends((renderer.end_token_id,))
        == renderer.call_ends(renderer.encode("An answer."))
        == ()
    )


@settings(max_examples=25)
@given(st.lists(st.integers(0, 5), max_size=12), st.sampled_from([(">", "Ċ"), (">", "<"), ("l", ">")]))
def test_a_token_with_text_beyond_the_call_still_ends_it(numbers, merge):
    renderer = merging_renderer(merge)
    text = "".join(["\n", OPEN, CLOSE, "é", CALL % "é", "{"][number] for number in numbers)
    for ids in (renderer.encode(text), tuple(renderer.tokenizer.convert_tokens_to_ids(list(bytes_of(text))))):
        ends = renderer.call_ends(ids)
        calls = renderer.parse(ids).message.calls
        first = [place for place in range(len(ids)) if completes(renderer, ids, place)]
        assert [end for end, call in zip(ends, calls, strict=True) if "not closed" not in (call.error or "")] == first


def bytes_of(text):
    """Return the text in the characters that stand for bytes."""
    return "".join(piece for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))


def completes(renderer, ids, place):
    """Return whether this token adds a closed call to the text."""
    closed = [
        sum("not closed" not in (call.error or "") for call in renderer.parse(ids[:count]).message.calls)
        for count in (place, place + 1)
    ]
    return closed[1] > closed[0]


def test_call_ends_do_not_depend_on_tokenizing_the_text_again():
    renderer = merging_renderer(("a", "a"))
    text = CALL % "aaaa"
    sampled = tuple(renderer.tokenizer.convert_tokens_to_ids(list(bytes_of(text))))
    assert renderer.call_ends(sampled) == (len(sampled) - 1,)
    assert len(renderer.encode(text)) < len(sampled)


def test_a_call_inside_reasoning_is_not_a_call():
    tokenizer = hermes_tokenizer()
    thought = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    tokenizer.chat_template = TEMPLATE.replace("{{ message.content }}", thought + "{{ message.content }}")
    renderer = TemplateRenderer(tokenizer)
    text = f"<think>\n{CALL % 'é'}\n</think>\n\n{CALL % 'é'} done"
    action = renderer.parse(renderer.encode(text))
    assert action.message.reasoning == CALL % "é" and len(action.message.calls) == 1
    assert renderer.call_ends(renderer.encode(text)) == (len(text.encode()) - len(" done") - 1,)


def test_tiny_base_closes_its_calls_with_one_token():
    renderer = TemplateRenderer(load_tokenizer(str(TINY_BASE_FOLDER)))
    (close,) = renderer.encode(CLOSE)
    ids = (*renderer.encode(f"I look. {CALL % 'Alba'} and {CALL % 'Alba'} so"), renderer.end_token_id)
    places = tuple(place for place, token in enumerate(ids) if token == close)
    assert len(places) == 2 and renderer.call_ends(ids) == places
