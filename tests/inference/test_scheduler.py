"""The plan of a prefill: after its four lists, the slot of every request holds the whole sequence."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from agent_r1.core.inference import SamplingParams
from agent_r1.inference.kv_cache import CacheSlot
from agent_r1.inference.scheduler import PrefillPlan, Request, Scheduler

MULTIPLE = 4


def plan_of(prompts: list[tuple[int, ...]]) -> tuple[PrefillPlan, dict[CacheSlot, tuple[int, ...]]]:
    """Return the plan for new sessions with these prompts, and the tokens that each slot must hold after it."""
    loop = asyncio.new_event_loop()
    scheduler = Scheduler(rows=16, max_blocks=1, add_block=lambda: 0, prefix_multiple=MULTIPLE)
    requests = [
        Request(prompt, SamplingParams(), str(number), loop.create_future(), random.Random(0))
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    needed = {
        CacheSlot(0, row): request.cached_tokens for _, batch in scheduler.decode_batches() for row, request in batch
    }
    plan = scheduler.plan_prefill()
    loop.close()
    return plan, needed


def execute(plan: PrefillPlan) -> dict[CacheSlot, tuple[int, ...]]:
    """Return the tokens that each slot holds after the plan. A copy takes what its source holds at that moment."""
    held: dict[CacheSlot, tuple[int, ...]] = {}
    for chunk in plan.compute:
        held[chunk.slot] = chunk.token_ids
    for copy in plan.prefix_copies:
        held[copy.target] = held.get(copy.source, ())[: copy.tokens]
    for chunk in plan.remainders:
        held[chunk.slot] = (*held.get(chunk.slot, ())[: chunk.cached], *chunk.token_ids)
    for copy in plan.copies:
        held[copy.target] = held.get(copy.source, ())[: copy.tokens]
    return held


def test_a_prefix_is_not_copied_from_a_slot_whose_remainder_is_still_to_be_computed() -> None:
    shared, more = (1, 1, 1, 1), (2, 2, 2, 2)
    prompts = [(*shared, 3, 3, 0), (*shared, *more, 0), (*shared, *more, 4, 0)]
    plan, needed = plan_of(prompts)
    assert execute(plan) == needed


@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=14), min_size=1, max_size=8))
def test_every_slot_holds_its_sequence_after_the_plan(prompts: list[list[int]]) -> None:
    plan, needed = plan_of([(*prompt, 0) for prompt in prompts])
    held = execute(plan)
    assert {slot: held.get(slot, ()) for slot in needed} == needed
