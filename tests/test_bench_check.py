"""``benchmarks/check.py``: ratios of speed are compared with the last recorded ones; the measuring is not tested."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("check", "decode", "prefixes"):  # modules of the benchmarks, whose names others may have
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("check")


def run(module: ModuleType, file: Path, commit: str, ratio: float, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the check with a measured ratio, and return the message with which it fails, or an empty string."""
    monkeypatch.setattr(module, "RATIO_OF", {"update": lambda _: ratio, "decode": lambda _: 2.0})
    monkeypatch.setattr(module, "current_commit", lambda: commit)
    monkeypatch.setattr(sys, "argv", ["check.py", "--file", str(file)])
    try:
        module.main()
    except SystemExit as error:
        return str(error.code)
    return ""


def test_a_loss_of_more_than_a_fifth_fails_and_is_not_recorded(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ratios.json"
    assert run(module, file, "first", 3.0, monkeypatch) == ""
    assert run(module, file, "slower", 2.41, monkeypatch) == ""
    for _ in range(2):  # the second run fails, too
        message = run(module, file, "broken", 1.9, monkeypatch)
        assert message.splitlines() == ["more than 20% slower than slower:", "update: 2.41 before, 1.90 now"]
    assert run(module, file, "faster", 4.0, monkeypatch) == ""
    assert [record.commit for record in module.read_records(file)] == ["first", "slower", "faster"]


def test_a_second_run_of_a_commit_replaces_its_record(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ratios.json"
    for commit, ratio in (("first", 3.0), ("second", 2.5), ("second", 2.6)):
        assert run(module, file, commit, ratio, monkeypatch) == ""
    assert [record.ratios["update"] for record in module.read_records(file)] == [3.0, 2.6]
    assert run(module, file, "second", 2.3, monkeypatch) != ""  # slower than the first commit, not than itself


def test_a_ratio_that_is_no_longer_measured_is_a_loss(module: ModuleType) -> None:
    assert module.find_losses({"update": 3.0}, {"decode": 2.0}) == ["update: 3.00 before, not measured now"]
    assert module.find_losses({}, {"decode": 2.0}) == []


def test_the_recorded_ratios_can_be_read(module: ModuleType) -> None:
    records = module.read_records(module.RATIOS)
    assert records and all(set(record.ratios) == set(module.RATIO_OF) for record in records[-1:])
