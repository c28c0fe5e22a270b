"""The base models from which the experiments start: tiny-base, and bases that were pretrained with other seeds."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import AgentR1Error
from agent_r1.tasksets.tinywiki.model import TINY_BASE, TINY_BASE_FOLDER
from agent_r1.training.progress import Progress

PRETRAIN = ("-m", "research.tiny_base")
"""The arguments of Python that pretrain a base; the folder and ``--seed`` follow."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base model: the seed of its pretraining, its name or folder, and a hash of its weights.

    Example:
        Base(seed=1, model="runs/paper/base-1", digest="5d41402a")
    """

    seed: int
    model: str
    digest: str


def prepare_base(seed: int, folder: Path, progress: Progress) -> Base:
    """Return the base that was pretrained with ``seed``. Pretrain it in ``folder`` if it is not there.

    The base of seed 0 is tiny-base, which is part of the package.

    Raises:
        AgentR1Error: if the pretraining fails.
    """
    if seed == 0:
        return Base(0, TINY_BASE, _digest(TINY_BASE_FOLDER))
    base = folder / f"base-{seed}"
    if not (base / "recipe.json").exists():  # the file that is written last
        arguments = (*PRETRAIN, str(base), "--seed", str(seed))
        progress.print_line(f"base {seed}: python {' '.join(arguments)}")
        process = subprocess.run([sys.executable, *arguments], stdin=subprocess.DEVNULL, capture_output=True)
        if process.returncode != 0:
            last = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise AgentR1Error(f"the pretraining of base {seed} failed: {' '.join(last)}")
    return Base(seed, str(base), _digest(base))


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:8]
