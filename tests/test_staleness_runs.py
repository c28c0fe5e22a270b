"""The benchmark of staleness: which recorded runs it measures, and how sure the seconds of a step are."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import load_benchmark


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_benchmark("staleness_runs")


@pytest.mark.parametrize("changed", [{"groups": 16}, {"steps": 9}, {"seed": 1}, {"staleness": [0, 1, 3]}])
def test_runs_with_other_options_are_not_taken_for_the_same(script: ModuleType, changed: dict[str, Any]) -> None:
    options = {"folder": Path("runs"), "groups": 2, "steps": 12, "seed": 0, "staleness": [0, 1, 2]}
    folders = [script.runs_folder(argparse.Namespace(**each)) for each in (options, {**options, **changed})]
    assert folders[0] != folders[1]
    assert script.runs_folder(argparse.Namespace(**options)) == folders[0]


def test_the_interval_of_two_cycles_is_as_wide_as_students_t_makes_it(script: ModuleType) -> None:
    found = script.mean_step([1.0, 3.0, 2.0, 4.0], 2)  # the cycles take 2 and 3 on average
    assert (found.mean, found.half, found.count) == (2.5, pytest.approx(12.7062 * 0.5, rel=1e-4), 2)
