"""Arrays and documents survive compression unchanged."""

import struct

import pytest
from hypothesis import given, strategies as st

from agent_r1.store.rows import TurnTokens, pack_document, unpack_document

ids = st.lists(st.integers(0, 2**31 - 1)).map(tuple)
logprobs = st.lists(st.floats(allow_nan=False)).map(tuple)


@given(ids, ids, logprobs)
def test_tokens_round_trip_bit_for_bit(
    new: tuple[int, ...], acted: tuple[int, ...], numbers: tuple[float, ...]
) -> None:
    back = TurnTokens.unpack(TurnTokens(new, acted, numbers).pack())
    assert back == TurnTokens(new, acted, numbers)
    assert [number.hex() for number in back.logprobs] == [number.hex() for number in numbers]


def test_an_id_beyond_int32_is_refused() -> None:
    with pytest.raises(struct.error):
        TurnTokens((2**31,), (), ()).pack()


@given(st.text(st.characters(codec=None)))
def test_documents_keep_any_text(text: str) -> None:
    assert unpack_document(pack_document({"text": text})) == {"text": text}
