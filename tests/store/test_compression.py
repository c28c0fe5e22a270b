"""Arrays and documents come back as they went in."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.store.compression import Tokens, pack_document, unpack_document

ids = st.lists(st.integers(0, 2**31 - 1)).map(tuple)
logprobs = st.lists(st.floats(allow_nan=False)).map(tuple)


@given(ids, ids, logprobs)
def test_tokens_come_back_bit_for_bit(new: tuple[int, ...], acted: tuple[int, ...], numbers: tuple[float, ...]) -> None:
    back = Tokens.unpack(Tokens(new, acted, numbers).pack())
    assert back == Tokens(new, acted, numbers)
    assert [number.hex() for number in back.logprobs] == [number.hex() for number in numbers]


def test_a_float32_column_would_lose_what_float64_keeps() -> None:
    number = -0.1 / 3
    assert struct.unpack("<f", struct.pack("<f", number))[0] != number
    assert Tokens.unpack(Tokens((), (), (number,)).pack()).logprobs == (number,)


def test_an_id_that_is_no_int32_is_refused() -> None:
    with pytest.raises(struct.error):
        Tokens((2**31,), (), ()).pack()


@given(st.text(st.characters(codec=None)))
def test_documents_keep_any_text(text: str) -> None:
    assert unpack_document(pack_document({"text": text})) == {"text": text}


def test_documents_keep_a_lone_surrogate() -> None:
    assert unpack_document(pack_document("\ud800 \0 é")) == "\ud800 \0 é"
