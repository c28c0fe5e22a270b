"""A text environment for Gymnasium that echoes, fails or hangs on command. It is registered on import."""

from __future__ import annotations

import string
import time
from typing import Any

import gymnasium
from gymnasium.spaces import Text


class Echo(gymnasium.Env[str, str]):
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as gymnasium declares it

    def __init__(self) -> None:
        self.action_space = self.observation_space = Text(20, charset=string.ascii_letters)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "speak", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "raise":
            raise ValueError("the game broke")
        if action == "hang":
            time.sleep(1000)
        return action, 0.0, False, False, {}


gymnasium.register("Echo-v0", Echo)
