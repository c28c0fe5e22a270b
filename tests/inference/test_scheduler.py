"""The plan of a prefill: after its lists, the slot of every request holds the whole sequence. Pages are shared."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from types import MappingProxyType

from hypothesis import given, settings, strategies as st

from agent_r1.core.inference import SamplingParams
from agent_r1.inference.kv_cache import CacheSize, CacheSlot, pages_for
from agent_r1.inference.torch_engine import PrefillPlan, Request, Scheduler

MULTIPLE = 4
Held = dict[CacheSlot, tuple[int, ...]]


def plan_of(prompts: list[tuple[int, ...]]) -> tuple[PrefillPlan, dict[CacheSlot, tuple[int, ...]]]:
    """Return the plan for new sessions with these prompts, and the tokens that each slot must hold after it."""
    loop = asyncio.new_event_loop()
    scheduler = Scheduler(CacheSize(16, 1, 100, 1, 0), lambda: 0, MULTIPLE)
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


def execute(plan: PrefillPlan, before: Mapping[CacheSlot, tuple[int, ...]] = MappingProxyType({})) -> Held:
    """Return the tokens that each slot holds after the plan. A copy takes what its source holds at that moment.

    ``before`` are the tokens that slots hold before the plan.
    """
    held = {slot: tokens for slot, tokens in before.items() if slot not in plan.emptied}
    for chunk in plan.compute:
        held[chunk.slot] = (*held.get(chunk.slot, ())[: chunk.cached], *chunk.token_ids)
    for copy in plan.prefix_copies:
        held[copy.target] = held.get(copy.source, ())[: copy.tokens]
    for chunk in plan.remainders:
        held[chunk.slot] = (*held.get(chunk.slot, ())[: chunk.cached], *chunk.token_ids)
    for copy in plan.copies:
        kept = held.get(copy.target, ())[: copy.start]
        held[copy.target] = kept + held.get(copy.source, ())[copy.start : copy.tokens]
    return held


@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=14), min_size=1, max_size=8))
def test_every_slot_holds_its_sequence_after_the_plan(prompts: list[list[int]]) -> None:
    plan, needed = plan_of([(*prompt, 0) for prompt in prompts])
    held = execute(plan)
    assert {slot: held.get(slot, ()) for slot in needed} == needed


class Simulation:
    """An engine without a model: it decodes the tokens 1, 2, 3, .., and checks what the slots hold."""

    def __init__(self, rows: int, pages: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.scheduler = Scheduler(CacheSize(rows, 2, pages, 1, 0), self._add_block, MULTIPLE)
        self.pages, self.num_blocks = pages, 0
        self.held: Held = {}
        self.most_running = 0
        self.num_emptied = 0

    def _add_block(self) -> int:
        self.num_blocks += 1
        return self.num_blocks - 1

    def add(self, session: str, prompt: tuple[int, ...], length: int) -> Request:
        sampling = SamplingParams(max_tokens=length)
        request = Request(prompt, sampling, session, self.loop.create_future(), random.Random(0))
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        """Run one decode step, and check that no page too many is held, and that all slots hold their sequences."""
        assert self.scheduler.schedule()
        plan = self.scheduler.plan_prefill()
        self.num_emptied += sum(slot in self.held for slot in plan.emptied)
        self.held = execute(plan, {slot: held for slot, held in self.held.items() if slot not in plan.emptied})
        running = [
            (CacheSlot(block, row), one) for block, batch in self.scheduler.decode_batches() for row, one in batch
        ]
        self.most_running = max(self.most_running, len(running))
        for slot, request in running:
            assert self.held.get(slot, ()) == request.cached_tokens
            self.held[slot] = (*request.cached_tokens, request.last_token)
            request.token_ids.append(len(request.token_ids) + 1)
            if len(request.token_ids) == request.params.max_tokens:
                request.finish_reason = "length"
        assert sum(pages_for(len(held)) for held in self.held.values()) <= self.pages
        self.scheduler.take_finished()


TURNS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 150), st.integers(1, 150)), min_size=1, max_size=12)
"""Sessions, tokens that are new in their prompts, and tokens to sample."""


@settings(deadline=None, max_examples=60)
@given(TURNS, st.integers(1, 3), st.integers(0, 9), st.randoms(use_true_random=False))
def test_with_few_pages_all_requests_end_and_each_slot_holds_its_sequence(
    turns: list[tuple[int, int, int]], rows: int, more_pages: int, chance: random.Random
) -> None:
    sequences: dict[int, tuple[int, ...]] = {}
    longest = 0
    planned: list[tuple[int, tuple[int, ...], int]] = []
    for session, new, length in turns:
        prompt = sequences.get(session, ()) + tuple(chance.randrange(3) for _ in range(new))
        sequences[session] = prompt + tuple(range(1, length + 1))
        longest = max(longest, len(sequences[session]))
        planned.append((session, prompt, length))
    engine = Simulation(rows, pages_for(longest) + more_pages)
    open_requests: list[Request] = []
    while planned or open_requests:
        for session, prompt, length in list(planned):  # the next turn of each session without an open request
            if all(request.session_id != str(session) for request in open_requests):
                open_requests.append(engine.add(str(session), prompt, length))
                planned.remove((session, prompt, length))
        engine.step()
        ended = [request for request in open_requests if request.finish_reason]
        open_requests = [request for request in open_requests if not request.finish_reason]
        for request in ended:
            assert request.token_ids == list(range(1, request.params.max_tokens + 1))
            if all(str(session) != request.session_id for session, _, _ in planned):
                engine.scheduler.release(request.session_id)
    engine.loop.close()


def test_sequences_share_pages_and_the_last_one_waits_if_none_is_left() -> None:
    engine = Simulation(rows=4, pages=7)
    requests = [engine.add(str(number), (number,) * 10, 100) for number in range(4)]
    while not requests[0].finish_reason:
        engine.step()
    assert engine.most_running == 4  # with the pages of the longest sequence for each, only three would run
    assert engine.num_emptied == 1  # each needs two pages after 54 tokens: the last one was stopped
    for request in requests[:3]:
        engine.scheduler.release(request.session_id)
    while not all(request.finish_reason for request in requests):
        engine.step()
    assert requests[0].prefilled_tokens == 9 and requests[3].prefilled_tokens > 9 + 55
    engine.loop.close()


def test_a_session_between_its_turns_gives_its_pages_to_running_sequences_and_not_to_new_ones() -> None:
    engine = Simulation(rows=4, pages=2)
    first = engine.add("first", (7,) * 10, 1)
    engine.step()
    assert first.finish_reason
    running, new = engine.add("second", (8,) * 10, 60), engine.add("third", (9,) * 10, 1)
    engine.step()
    assert running.token_ids == [1] and not new.token_ids and engine.num_emptied == 0
    while not running.finish_reason:
        engine.step()
    assert engine.num_emptied == 1 and not new.token_ids  # the page of the first session
    engine.scheduler.release("second")
    again = engine.add("first", (7,) * 10 + (1,), 2)
    while not (again.finish_reason and new.finish_reason):
        engine.step()
    assert again.prefilled_tokens == 10
    engine.loop.close()


def test_a_sequence_that_waits_for_pages_records_the_weights_that_it_continues_with() -> None:
    engine = Simulation(rows=2, pages=2)
    first, second = engine.add("first", (7,) * 10, 80), engine.add("second", (8,) * 10, 60)
    while not engine.num_emptied:
        engine.step()
    sampled = len(second.token_ids)
    engine.scheduler.on_new_weights(1)
    while not second.finish_reason:
        engine.step()
        if first.finish_reason:
            engine.scheduler.release("first")
    assert [(span.start, span.version) for span in second.version_spans] == [(0, 0), (sampled, 1)]
    engine.loop.close()


def test_a_short_new_sequence_does_not_overtake_a_longer_one_that_waits_for_pages() -> None:
    engine = Simulation(rows=4, pages=4)
    running = engine.add("running", (1,) * 150, 5)
    engine.step()
    longer, shorter = engine.add("longer", (2,) * 100, 1), engine.add("shorter", (3,) * 10, 1)
    while not running.finish_reason:
        engine.step()
        assert not longer.token_ids and not shorter.token_ids
    engine.scheduler.release("running")
    engine.step()
    assert longer.finish_reason and shorter.finish_reason
    engine.loop.close()


def test_the_next_turn_of_a_session_starts_although_new_sessions_never_end() -> None:
    engine = Simulation(rows=8, pages=12)
    engine.add("long", (1,) * 500, 1)
    engine.step()
    second = engine.add("long", (1,) * 505, 1)
    requests = [engine.add(f"{number}", (number,) * 100, 30) for number in range(4)]
    for number in range(4, 200):
        engine.step()
        for request in [request for request in requests if request.finish_reason]:
            requests.remove(request)
            engine.scheduler.release(request.session_id)
            requests.append(engine.add(f"{number}", (number % 3,) * 100, 30))
    assert second.finish_reason
    engine.loop.close()
