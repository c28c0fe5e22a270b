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


def run(
    module: ModuleType, file: Path, commit: str, ratio: float, patch: pytest.MonkeyPatch, *options: str, on: str = "A"
) -> tuple[object, list[str]]:
    """Run the check on a processor with a measured ratio. Return its exit code or message, and what it measured."""
    measured: list[str] = []

    def measure(name: str, value: float) -> float:
        measured.append(name)
        return value

    ratios = {"update": lambda _: measure("update", ratio), "decode": lambda _: measure("decode", 2.0)}
    patch.setattr(module, "RATIO_OF", ratios)
    patch.setattr(module, "current_commit", lambda: commit)
    patch.setattr(module, "processor_name", lambda: f"Processor {on}")
    patch.setattr(sys, "argv", ["check.py", "--file", str(file), *options])
    try:
        module.main()
    except SystemExit as error:
        return error.code, measured
    return 0, measured


BOTH = ["update", "decode"]


def test_a_loss_of_more_than_a_fifth_fails_and_is_not_recorded(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ratios.json"
    assert run(module, file, "first", 3.0, monkeypatch, "--record") == (0, BOTH)
    assert run(module, file, "slower", 2.41, monkeypatch) == (0, BOTH)
    for _ in range(2):  # the second run fails, too
        message, _ = run(module, file, "broken", 1.9, monkeypatch)
        lines = str(message).splitlines()
        assert lines == ["more than 20% slower than slower on Processor A:", "update: 2.41 before, 1.90 now"]
    assert run(module, file, "faster", 4.0, monkeypatch) == (0, BOTH)
    assert [record.commit for record in module.read_records(file)] == ["first", "slower", "faster"]


def test_a_processor_without_a_record_is_told_how_to_make_one_and_nothing_is_measured(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ratios.json"
    assert run(module, file, "first", 3.0, monkeypatch, "--record") == (0, BOTH)
    before = file.read_bytes()
    assert run(module, file, "second", 3.0, monkeypatch, on="B") == (2, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert "no record of this processor, Processor B" in line and "check.py --record" in line
    assert file.read_bytes() == before


def test_processors_are_recorded_beside_each_other_and_compared_with_themselves(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ratios.json"
    assert run(module, file, "first", 3.0, monkeypatch, "--record", on="A") == (0, BOTH)
    assert run(module, file, "first", 1.5, monkeypatch, "--record", on="B") == (0, BOTH)
    assert run(module, file, "second", 2.9, monkeypatch, on="A") == (0, BOTH)
    assert run(module, file, "second", 1.4, monkeypatch, on="B") == (0, BOTH)  # not compared with 2.9
    assert run(module, file, "third", 1.4, monkeypatch, on="A")[0] != 0
    found = [(record.commit, record.machine.processor) for record in module.read_records(file)]
    assert found == [(commit, f"Processor {on}") for commit in ("first", "second") for on in "AB"]
    machine = module.read_records(file)[0].machine
    assert (machine.cores, machine.torch) == (module.os.cpu_count(), module.torch.__version__)
