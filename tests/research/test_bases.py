"""The bases of the comparison: tiny-base, and others that are pretrained if they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.core.errors import AgentR1Error
from agent_r1.training.progress import SilentProgress
from research.paper import experiments as bases
from research.paper.experiments import Base, prepare_base

PRETRAIN = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir(parents=True)
(folder / "model.safetensors").write_text(" ".join(sys.argv[2:]))
(folder / "recipe.json").write_text("{}")
"""


def test_the_base_of_seed_0_is_tiny_base(tmp_path: Path) -> None:
    base = prepare_base(0, tmp_path, SilentProgress())
    assert (base.seed, base.model, len(base.digest)) == (0, "tiny-base", 8)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_base_is_pretrained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "PRETRAIN", ("-c", PRETRAIN))
    base = prepare_base(2, tmp_path, SilentProgress())
    assert base == Base(2, str(tmp_path / "base-2"), base.digest)
    assert (tmp_path / "base-2" / "model.safetensors").read_text("utf-8") == "--seed 2"
    monkeypatch.setattr(bases, "PRETRAIN", ("-c", "raise SystemExit('not again')"))
    assert prepare_base(2, tmp_path, SilentProgress()) == base
    (tmp_path / "base-2" / "recipe.json").unlink()  # an interrupted pretraining
    with pytest.raises(AgentR1Error, match="the pretraining of base 2 failed: not again"):
        prepare_base(2, tmp_path, SilentProgress())
