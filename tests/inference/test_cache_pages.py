"""The size of the KV cache, and the count of its pages."""

from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given, strategies as st

from agent_r1.inference.config import EngineConfig
from agent_r1.inference.kv_cache import PAGE_TOKENS, CachePages, CacheSlot, cache_size, pages_for

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIB = 2**20


@given(st.integers(0, 10_000))
def test_a_sequence_fits_into_its_pages_and_not_into_fewer(tokens: int) -> None:
    assert (pages_for(tokens) - 1) * PAGE_TOKENS < tokens <= pages_for(tokens) * PAGE_TOKENS or tokens == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12))))
def test_slots_never_hold_more_pages_than_there_are(wishes: list[tuple[int, int]]) -> None:
    pages, expected = CachePages(10), dict.fromkeys(range(4), 0)
    for row, wish in wishes:
        slot = CacheSlot(0, row)
        if wish == 0:
            pages.drop(slot)
            expected[row] = 0
        elif pages.take(slot, wish):
            expected[row] = max(expected[row], wish)
        else:
            assert sum(expected.values()) - expected[row] + wish > 10
        assert [pages.held[CacheSlot(0, row)] for row in range(4)] == list(expected.values())
        assert pages.free == 10 - sum(expected.values()) >= 0


def test_sequences_of_the_native_decoder_share_all_pages() -> None:
    config = EngineConfig(max_sequences=8, kv_cache_gib=64 * MIB / 2**30)
    size = cache_size(config, 1000, 4096, CPU, is_native=True)  # 256 KiB for a page, 16 pages for the context
    assert (size.rows, size.blocks, size.pages, size.session_pages, size.capacity) == (8, 32, 256, 1, 1024)


def test_a_session_of_another_decoder_takes_the_pages_of_a_context() -> None:
    config = EngineConfig(max_sequences=8, kv_cache_gib=20 * MIB / 2**30)
    size = cache_size(config, 1000, 4096, CPU, is_native=False)
    assert (size.rows, size.blocks, size.pages, size.session_pages) == (5, 1, 85, 16)


@pytest.mark.parametrize("is_native", [True, False])
def test_one_sequence_always_fits(is_native: bool) -> None:
    size = cache_size(EngineConfig(kv_cache_gib=1e-9), 1000, 4096, CPU, is_native=is_native)
    assert size.pages >= 16 and size.blocks == 1


def test_slots_begin_small_if_the_addresses_of_a_process_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(kv_cache_gib=1.0)
    assert cache_size(config, 100_000, 4096, CPU, is_native=True).capacity == 100_032
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**33, 2**33))
    assert cache_size(config, 100_000, 4096, CPU, is_native=True).capacity == 2 * PAGE_TOKENS


def test_a_slot_on_a_gpu_begins_small_because_all_of_it_takes_memory() -> None:
    config = EngineConfig(kv_cache_gib=1.0)
    assert cache_size(config, 100_000, 4096, GPU, is_native=False).capacity == 2 * PAGE_TOKENS
