"""The simulation of training against closed forms, and properties that hold for all attempts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from agent_r1.training.simulation import Cluster, EngineCost, GroupLoad, Schedule, TrainerCost, TurnLoad, simulate

ENGINE = EngineCost(step=0.01, sequence=1e-3, context=1e-5, prefill_pass=0.1, prefill_token=1e-3, request=0.02)
TRAINER = TrainerCost(update=0.5, token=1e-3, publish=0.25)


def equal_groups(groups: int, size: int, turns: int = 1, tool_seconds: float = 0.0) -> list[GroupLoad]:
    """Attempts of equal turns: 10 new tokens and 20 sampled tokens each."""
    return [((TurnLoad(10, 20, tool_seconds),) * turns,) * size] * groups


def random_groups(seed: int, groups: int, size: int, slow: bool) -> list[GroupLoad]:
    draw = random.Random(seed)

    def turn() -> TurnLoad:
        return TurnLoad(draw.randint(1, 50), draw.randint(1, 40), draw.expovariate(2.0) if slow else 0.0)

    return [tuple(tuple(turn() for _ in range(draw.randint(1, 4))) for _ in range(size)) for _ in range(groups)]


def test_equal_attempts_without_tools_take_the_sum_of_their_parts() -> None:
    """The prompt of a group is computed once, the results of its second turn for each attempt."""
    engine = replace(ENGINE, context=0.0)
    line = simulate(equal_groups(6, 4, turns=2), Cluster(1, engine, TRAINER), Schedule(2))
    decode = 2 * 20 * engine.decode(8, 0)
    prefill = 2 * (0.1 + 8 * 0.02) + (2 + 8) * 10 * 1e-3
    update = 0.5 + 8 * 60 * 1e-3
    assert line.step_ends == pytest.approx([step * (decode + prefill + update + 0.25) for step in (1, 2, 3)])
    assert line.engine_utilization == pytest.approx((decode + prefill) / line.step_seconds)
    assert line.trainer_utilization == pytest.approx(update / line.step_seconds)


def test_a_tool_delays_its_attempt_by_its_duration() -> None:
    cluster = Cluster(1, ENGINE, TRAINER)
    fast, slow = (simulate(equal_groups(2, 3, 2, seconds), cluster, Schedule(1)) for seconds in (0.0, 7.0))
    # one tool between the two turns, and one after the last turn
    assert slow.step_seconds == pytest.approx(fast.step_seconds + 14.0)


def test_sequences_that_do_not_fit_wait() -> None:
    alone = simulate(equal_groups(1, 1), Cluster(1, ENGINE, TrainerCost()), Schedule(1)).step_seconds
    one_by_one = Cluster(1, replace(ENGINE, slots=1), TrainerCost())
    no_prompt = 10 * ENGINE.prefill_token  # the second attempt has the prompt of the first
    assert simulate(equal_groups(1, 2), one_by_one, Schedule(1)).step_seconds == pytest.approx(2 * alone - no_prompt)
    small_cache = Cluster(1, replace(ENGINE, kv_tokens=59), TrainerCost())  # two sequences have 60 tokens
    assert simulate(equal_groups(1, 2), small_cache, Schedule(1)).step_seconds == pytest.approx(2 * alone - no_prompt)
    assert simulate(equal_groups(1, 2), one_by_one, Schedule(1, concurrency=1)).step_seconds == pytest.approx(
        2 * alone - no_prompt
    )


cases = st.tuples(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 4), st.booleans())


@settings(max_examples=40)
@given(cases)
def test_all_work_is_done_and_a_synchronous_step_is_the_sum_of_its_phases(case: tuple[int, int, int, bool]) -> None:
    seed, per_step, size, slow = case
    groups = random_groups(seed, 3 * per_step, size, slow)
    line = simulate(groups, Cluster(1, ENGINE, TRAINER), Schedule(per_step))
    turns = [turn for group in groups for attempt in group for turn in attempt]
    assert line.work.tokens == sum(turn.action_tokens for turn in turns)
    assert line.work.requests == len(turns) and len(line.step_ends) == 3
    computed = line.engine_seconds + line.update_seconds + 3 * TRAINER.publish
    if slow:
        assert line.step_ends[-1] >= computed - 1e-9
    else:
        assert line.step_ends[-1] == pytest.approx(computed)


@settings(max_examples=40)
@given(cases)
def test_asynchronous_training_and_more_engines_are_not_slower(case: tuple[int, int, int, bool]) -> None:
    """Up to the tenth by which another order of requests can change the batches."""
    seed, per_step, size, slow = case
    groups = random_groups(seed, 4 * per_step, size, slow)
    cluster = Cluster(1, ENGINE, TRAINER)
    one = simulate(groups, cluster, Schedule(per_step)).step_ends[-1]
    for staleness in (1, 2):
        assert simulate(groups, cluster, Schedule(per_step, staleness)).step_ends[-1] <= 1.1 * one
    for engines in (2, 4):
        assert simulate(groups, replace(cluster, engines=engines), Schedule(per_step)).step_ends[-1] <= 1.1 * one


def test_updates_overlap_with_sampling_if_they_have_a_device_of_their_own() -> None:
    groups = equal_groups(8, 4)
    apart = Cluster(1, ENGINE, TRAINER)
    synchronous = simulate(groups, apart, Schedule(1))
    asynchronous = simulate(groups, apart, Schedule(1, 1))
    shared = simulate(groups, replace(apart, is_shared=True), Schedule(1, 1))
    assert asynchronous.step_ends[-1] < 0.8 * synchronous.step_ends[-1]
    assert asynchronous.step_ends[-1] < shared.step_ends[-1] <= synchronous.step_ends[-1]
