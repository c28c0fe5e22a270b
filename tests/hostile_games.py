"""Misbehaving games, which tests import into worker processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

from agent_r1.envs.games import Observation


class Hostile:
    """Obeys the commands ``raise``, ``hang``, ``die``, ``flood`` ..; echoes other text; ``end`` ends it."""

    def __init__(self, first: str = "ready") -> None:
        self._first = first
        if first == "raise at start":
            raise ValueError("it does not start")

    def open(self, seed: int, attempt_seed: int) -> Observation:
        random.seed(seed)
        return self.step(self._first)

    def step(self, text: str) -> Observation:
        match text:
            case "raise":
                raise ValueError("the game broke")
            case "exit":
                sys.exit(3)
            case "hang":
                time.sleep(1000)
            case "die":
                os._exit(1)
            case "flood":
                return Observation("x" * (17 * 2**20))
            case "long":
                return Observation("x" * 100_000)
            case "print":
                print("noise " * 10_000, flush=True)
            case "draw":
                return Observation(str(random.random()))
            case "pid":
                return Observation(str(os.getpid()))
            case "child":
                return Observation(str(subprocess.Popen(["sleep", "1000"]).pid))
            case "no json":
                return Observation({1, 2})  # type: ignore[arg-type]
            case "end":
                return Observation("over", 1.0, "terminal")
        return Observation(text, 0.25)

    def close(self) -> None:
        if self._first == "hang at close":
            time.sleep(1000)


def cautious(observation: str, rng: random.Random) -> str:
    """Take one object from the first pile of Nim that has any."""
    piles = [line.split(":") for line in observation.splitlines() if line.strip().startswith("pile ")]
    number = next(name.split()[1] for name, count in piles if int(count) > 0)
    return f"[{number} 1]"


def stubborn(observation: str, rng: random.Random) -> str:
    """Never move."""
    time.sleep(1000)
    return ""
