"""Every attack and every forged verdict is blocked, and gets through without the sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_r1.sandbox.isolation import ALL_LAYERS, Confinement, IsolationLayer
from agent_r1.sandbox.sandbox import Sandbox
from tests.sandbox import escapes


@pytest.fixture(scope="module")
def rows(sandbox: Sandbox) -> dict[str, escapes.Row]:
    return {row.name: row for row in asyncio.run(escapes.measure(short=True))}


def test_no_attack_gets_through(rows: dict[str, escapes.Row]) -> None:
    assert set(rows["default"].hits) == escapes.known_gaps()  # docs/sandbox.md: "What is not stopped"
    assert rows["default"].tried == 51


def test_most_attacks_get_through_without_the_sandbox(rows: dict[str, escapes.Row]) -> None:
    assert len(rows["no sandbox"].hits) >= 0.5 * rows["no sandbox"].tried  # root reaches more than others do


def test_no_forged_verdict_passes_the_grader(rows: dict[str, escapes.Row]) -> None:
    assert rows["verdicts: grader"].hits == ()


def test_all_forged_verdicts_pass_a_harness_in_the_candidates_process(rows: dict[str, escapes.Row]) -> None:
    assert len(rows["verdicts: tests in the candidate's process"].hits) == 10


@pytest.mark.parametrize(
    ("layer", "attack"),
    [
        (IsolationLayer.FILES, "read_secret"),
        (IsolationLayer.SYSCALLS, "use_key_ring"),
        (IsolationLayer.LIMITS, "descriptor_bomb"),
    ],
)
def test_an_attack_gets_through_without_the_layer_that_blocks_it(
    sandbox: Sandbox, layer: IsolationLayer, attack: str
) -> None:
    def succeeds(layers: frozenset[IsolationLayer], targets: dict[str, Any]) -> bool:
        return asyncio.run(escapes.run_attack(Confinement(layers, escapes.LIMITS), targets, attack))

    with escapes.make_targets() as targets:
        assert succeeds(ALL_LAYERS - {layer}, targets)
        assert not succeeds(ALL_LAYERS, targets)
