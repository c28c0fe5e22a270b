"""An OpenEnv server for tests: guess a digit, with two concurrent sessions. Usage: openenv_server.py PORT"""

import os
import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret = 0

    def reset(self, seed=None, episode_id=None, largest=10, **given):
        self.secret = (seed or 0) % largest
        return Hint(hint=f"a number below {largest}")

    def step(self, action, timeout_s=None, **given):
        if action.number == 97:
            os._exit(1)
        if action.number == 98:
            time.sleep(8)
        if action.number == 99:
            raise ValueError("the game broke")
        right = action.number == self.secret
        return Hint(hint="right" if right else "wrong", reward=float(right), done=right)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
