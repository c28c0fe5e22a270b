"""The notebooks run from the first cell to the last, one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

NOTEBOOKS = Path(__file__).parents[1] / "examples"


def cells(name: str) -> list[str]:
    """Return the code of a notebook, which was saved without outputs."""
    notebook = json.loads((NOTEBOOKS / name).read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    return ["".join(cell["source"]) for cell in code]


def run(name: str) -> dict[str, Any]:
    values: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(name)):
        exec(compile(cell, f"{name}, cell {number}", "exec", dont_inherit=True), values)
    return values


def test_the_notebooks_run_and_the_first_agent_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    state = torch.random.get_rng_state()
    try:
        first = run("first_agent.ipynb")
    finally:
        torch.random.set_rng_state(state)
    pages, search, report = first["PAGES"], first["search"], first["report"]
    assert [search(f"the page {title}").split(":")[0] for title in pages] == list(pages) and len(pages) > 1
    assert search("Corimis") == "No page."
    cell = report.table.cells["trained"]["train"]
    assert cell is not None and cell.em >= 0.8 > report.table.cells["base-tool-call"]["train"].em
    values = run("reading_a_run.ipynb")
    assert list(values["metrics"].index) == list(range(1, 9)) and len(values["attempts"]) == 8 * 5 * 8
    assert values["name"] in capsys.readouterr().out
    assert values["attempt"].rewards["exact_match"] == values["attempts"]["reward"].min() == 0
