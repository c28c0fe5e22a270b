"""Gymnasium's environments (https://gymnasium.farama.org) that can be told and played in text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.packages import import_extra
from agent_r1.core.task import Task
from agent_r1.envs.adapters.games import GameEnv, Observation


class Gymnasium:
    """An environment of gymnasium with text in and text out.

    Actions are ``Discrete``, told by name or number, or ``Text``. An observation is told as it is where it is text,
    as the environment draws it under ``render_mode="ansi"``, and as JSON otherwise. What is no action is explained
    and costs a turn; the environment does not see it.

    Args:
        name: as for ``gymnasium.make``; ``module:Name-v0`` imports the module first.
        actions: names for the numbers of a ``Discrete`` action space, in order.
        options: what ``gymnasium.make`` and the environment take, e.g. ``{"render_mode": "ansi"}``.
        max_turns: actions per episode, where the environment itself allows more.
        timeout: seconds an action may take.

    Raises:
        InvalidInput: gymnasium is not installed, has no such environment, or it cannot be played in text.
    """

    def __init__(
        self,
        name: str,
        actions: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        *,
        max_turns: int = 50,
        timeout: float = 20.0,
    ) -> None:
        self.name, self.actions = name, tuple(actions)
        keywords = {"name": name, "actions": list(actions), "options": dict(options or {})}
        GymnasiumGame(name, actions, options or {}).close()  # what is wrong with it is said before a run starts
        self.env = GameEnv("gymnasium", f"{__name__}:GymnasiumGame", keywords, max_turns, timeout)

    def tasks(self, train: int, test: int = 0, seed: int = 0, instruction: str = "") -> list[Task]:
        """Seeds to reset with, ``train`` of them in the split train and ``test`` others in the split test.

        ``instruction`` opens each episode; where it is empty the names of the actions do.
        """
        text = instruction or (f"Answer with one of: {', '.join(self.actions)}." if self.actions else "")
        messages = (Message.user(text),) if text else ()
        first = seed * 1_000_003
        return [
            Task(f"{self.name}/{first + n}", messages, {"seed": first + n}, "train" if n < train else "test")
            for n in range(train + test)
        ]


class GymnasiumGame:
    """One environment of gymnasium, in a process of its own."""

    def __init__(self, name: str, actions: Sequence[str], options: Mapping[str, Any]) -> None:
        self._gymnasium = import_extra("gymnasium", extra="gymnasium")
        try:
            self._env = self._gymnasium.make(name, **options)
        except (self._gymnasium.error.Error, ImportError, TypeError) as error:
            told = " ".join(str(error).split())
            raise InvalidInput("gymnasium environment", got=f"{name!r} ({told})", do="give one it can make") from error
        self._names = {action.lower(): number for number, action in enumerate(actions)}
        self._check(name, actions)

    def _check(self, name: str, actions: Sequence[str]) -> None:
        space, spaces = self._env.action_space, self._gymnasium.spaces
        if not isinstance(space, spaces.Discrete | spaces.Text):
            do = "wrap it so that its actions are Discrete or Text"
            raise InvalidInput(f"actions of {name}", got=type(space).__name__, do=do)
        if actions and not (isinstance(space, spaces.Discrete) and space.n == len(actions)):
            raise InvalidInput(f"actions of {name}", got=f"{len(actions)} names", do=f"name the actions of {space}")

    def open(self, seed: int, luck: int) -> Observation:
        observation, _ = self._env.reset(seed=seed)
        return Observation(self._told(observation))

    def step(self, text: str) -> Observation:
        action = self._action(text.strip())
        if action is None:
            return Observation(f"{text.strip()[:100]!r} is no action. {self._expected()}", valid=False)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        end = "terminal" if terminated else "truncated" if truncated else None
        return Observation(self._told(observation), float(reward), end)  # type: ignore[arg-type]  # the three above

    def close(self) -> None:
        self._env.close()

    def _action(self, text: str) -> Any:
        """The action that the text names; None where it names none."""
        space = self._env.action_space
        if isinstance(space, self._gymnasium.spaces.Text):
            return text if space.contains(text) else None
        number = self._names.get(text.lower())
        if number is None and text.isdecimal():
            number = int(text)
        return None if number is None or not 0 <= number < space.n else int(space.start) + number

    def _expected(self) -> str:
        return f"The actions are: {', '.join(self._names) or self._env.action_space}."

    def _told(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self._env.render_mode == "ansi":
            return _uncoloured(str(self._env.render()))
        return json.dumps(observation, default=_plain)


def _uncoloured(drawing: str) -> str:
    """A drawing for terminals as text: what stood out by its colour stands in brackets.

    Example:
        >>> _uncoloured("SF\\x1b[41mF\\x1b[0mG")
        'SF[F]G'
    """
    return re.sub(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", r"[\1]", drawing)


def _plain(value: Any) -> Any:
    """An array or a number of numpy as Python values."""
    return value.tolist()
