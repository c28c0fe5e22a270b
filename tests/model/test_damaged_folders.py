"""Folders of tiny-base with one damage each, drawn from a seed: they load, or are an error of one line."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from agent_r1.core.errors import AgentR1Error
from agent_r1.model.load import load_model, load_stop_ids, load_tokenizer
from agent_r1.renderers.formats.detect import open_renderer
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER

VALUES = (None, True, -1, 0, 10**30, 1e308, float("nan"), "", "x", [], {}, [[]], {"a": 1})
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")


def damage(folder: Path, rng: random.Random) -> None:
    """Change a value of a JSON file, flip or cut bytes, or replace a file by something else."""
    path = folder / rng.choice(FILES)
    kind = rng.choice(("value", "value", "value", "bytes", "cut", "loop", "folder", "remove", "nesting"))
    if kind == "value" and path.suffix == ".json":
        data = json.loads(path.read_text("utf-8"))
        data[rng.choice(sorted(data))] = rng.choice(VALUES)
        path.write_text(json.dumps(data), "utf-8")
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    elif kind == "nesting":
        path.write_text("[" * 100_000, "utf-8")
    elif kind in ("loop", "folder", "remove"):
        path.unlink()
        if kind == "loop":
            path.symlink_to(path)
        elif kind == "folder":
            path.mkdir()
    else:
        data = bytearray(path.read_bytes())
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(min(len(data), 4000))] = rng.randrange(256)
        path.write_bytes(data)


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_folder_loads_or_is_an_error_of_one_line(seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_BASE_FOLDER, folder)
    damage(folder, random.Random(seed))
    for load in (
        lambda: load_model(str(folder), torch.float32),
        lambda: open_renderer(load_tokenizer(str(folder)), stop_token_ids=load_stop_ids(str(folder))),
    ):
        try:
            load()
        except AgentR1Error as error:
            assert "\n" not in str(error) and len(str(error)) < 1500
