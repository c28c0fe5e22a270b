"""The parts that an incremental decoder returns are together the text of all tokens, wherever the parts end."""

import random

import pytest
from tests_tokenizer import hermes_tokenizer
from tokenizers import Tokenizer, decoders, models

from agent_r1.renderers.text_decoding import IncrementalDecoder

TEXT = "Ärger in Zürich: 很好 😀😀, says  Bruno.\n\n\ufffd<|im_start|> 1,5 €"


def decode_bytes(ids):
    return bytes(ids).decode(errors="replace")


def byte_fallback():
    """A tokenizer as SentencePiece's: words with a mark for the space before them, and single bytes for the rest."""
    words = ["<unk>", "▁", "▁in", "▁says", "a", "n", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def tokens_and_decode(name):
    if name == "bytes":
        return list(TEXT.encode()), decode_bytes
    if name == "invalid bytes":
        return [0xFF, 0xC3, *"é".encode(), 0xE2, 0x82, *"€".encode(), 0xA9, 0x41, 0xF0, 0x9F, 0x42], decode_bytes
    if name == "byte fallback":
        tokenizer = byte_fallback()
        return tokenizer.encode(TEXT.replace(" ", "▁")).ids, lambda ids: tokenizer.decode(list(ids))
    tokenizer = hermes_tokenizer()
    return tokenizer.encode(TEXT), tokenizer.decode


@pytest.mark.parametrize("name", ["bytes", "invalid bytes", "byte fallback", "merged bytes"])
@pytest.mark.parametrize("largest", [1, 2, 5, 200])
def test_the_parts_are_the_whole_text(name, largest):
    ids, decode = tokens_and_decode(name)
    for seed in range(20):
        generator, decoder, parts, start = random.Random(seed), IncrementalDecoder(decode), [], 0
        while start < len(ids):
            end = start + generator.randint(1, largest)
            parts.append(decoder.add(ids[start:end]))
            assert decode(ids).startswith("".join(parts))
            start = end
        assert "".join(parts) + decoder.flush() == decode(ids) and decoder.num_pending == 0


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("invalid", ["ff", "c3", "e282", "f09f98", "e282ac80"])
def test_invalid_characters_are_returned_soon_and_each_token_is_decoded_a_few_times(invalid, size):
    ids = [*bytes.fromhex(invalid) * 100, *"é".encode()]
    num_decoded, parts, largest = 0, [], 0

    def decode(tokens):
        nonlocal num_decoded
        num_decoded += len(tokens)
        return decode_bytes(tokens)

    decoder = IncrementalDecoder(decode)
    for start in range(0, len(ids), size):
        parts.append(decoder.add(ids[start : start + size]))
        largest = max(largest, decoder.num_pending)
        assert decode_bytes(ids).startswith("".join(parts))
    assert "".join(parts) + decoder.flush() == decode_bytes(ids) and largest <= 8
    assert num_decoded < 40 * len(ids)


def test_tokens_without_text_do_not_collect_and_keep_the_space_after_them():
    decoder = IncrementalDecoder(lambda ids: "".join(" a" for token in ids if token).removeprefix(" "))
    parts, largest = [], 0
    for token in (1, *[0] * 100, 1):
        parts.append(decoder.add((token,)))
        largest = max(largest, decoder.num_pending)
    assert "".join(parts) == "a a" and largest <= 8
