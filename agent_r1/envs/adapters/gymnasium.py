"""Environments of Gymnasium (https://gymnasium.farama.org) with observations and actions as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.core.errors import InvalidInput, import_extra
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.envs.adapters.games import GameEnv, Observation, seeded_tasks


class Gymnasium:
    """An environment of Gymnasium as text, with a ``Discrete`` or ``Text`` action space.

    The policy writes a ``Discrete`` action as its name or its index, from 0. If the policy's text is not an action, the
    policy gets an explanation. The environment then makes no step, but the turn counts towards ``max_turns``.

    Observations that are text are shown unchanged. For any other observation, the policy sees the rendered environment
    if ``render_mode`` is "ansi", otherwise the observation as JSON.

    Args:
        name: the name for ``gymnasium.make``. With ``module:Name-v0``, the module is imported first.
        actions: names for the actions of a ``Discrete`` action space, by index.
        options: arguments for ``gymnasium.make`` and the environment, e.g. ``{"render_mode": "ansi"}``.
        timeout: the time limit of an action in seconds.

    Raises:
        InvalidInput: if gymnasium is not installed, the environment does not exist, the action space is neither
            ``Discrete`` nor ``Text``, or ``actions`` does not fit the action space.
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
        GymnasiumGame(name, actions, options or {}).close()  # so that InvalidInput is raised before the run
        self.env = GameEnv("gymnasium", f"{__name__}:GymnasiumGame", keywords, max_turns, timeout)

    def tasks(self, train: int, test: int = 0, seed: int = 0, instruction: str = "") -> list[Task]:
        """Return tasks of two splits. ``train`` and ``test`` are the numbers of tasks in the splits "train" and "test".

        Each task has its own seed of the environment. Different values of ``seed`` give different tasks.
        ``instruction`` is the first message of each episode. By default, this message lists the names of the actions.
        """
        text = instruction or (f"Answer with one of: {', '.join(self.actions)}." if self.actions else "")
        return seeded_tasks(self.name, (Message.user(text),) if text else (), train, test, seed)


class GymnasiumGame:
    def __init__(self, name: str, actions: Sequence[str], options: Mapping[str, Any]) -> None:
        self._gymnasium = import_extra("gymnasium", extra="gymnasium")
        try:
            self._env = self._gymnasium.make(name, **options)
        except (self._gymnasium.error.Error, ImportError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise InvalidInput(
                "gymnasium environment", got=f"{name!r} ({reason})", do="give one it can make"
            ) from error
        self._numbers = {action.lower(): number for number, action in enumerate(actions)}
        space, spaces = self._env.action_space, self._gymnasium.spaces
        if not isinstance(space, spaces.Discrete | spaces.Text):
            do = "wrap it so that its actions are Discrete or Text"
            raise InvalidInput(f"actions of {name}", got=type(space).__name__, do=do)
        if actions and not (isinstance(space, spaces.Discrete) and space.n == len(actions)):
            raise InvalidInput(f"actions of {name}", got=f"{len(actions)} names", do=f"name the actions of {space}")

    def open(self, seed: int, attempt_seed: int) -> Observation:
        observation, _ = self._env.reset(seed=seed)
        return Observation(self._to_text(observation))

    def step(self, text: str) -> Observation:
        action = self._parse_action(text.strip())
        if action is None:
            expected = f"The actions are: {', '.join(self._numbers) or self._env.action_space}."
            return Observation(f"{text.strip()[:100]!r} is no action. {expected}", valid=False)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        end = "terminal" if terminated else "truncated" if truncated else None
        # mypy infers the type str for ``end``, but ``end`` has one of the values of ``Observation.end``
        return Observation(self._to_text(observation), float(reward), end)  # type: ignore[arg-type]

    def close(self) -> None:
        self._env.close()

    def _parse_action(self, text: str) -> Any:
        space = self._env.action_space
        if isinstance(space, self._gymnasium.spaces.Text):
            return text if space.contains(text) else None
        number = self._numbers.get(text.lower())
        if number is None and text.isdecimal():
            number = int(text)
        return None if number is None or not 0 <= number < space.n else int(space.start) + number

    def _to_text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self._env.render_mode == "ansi":
            return _mark_colors(str(self._env.render()))
        return json.dumps(observation, default=lambda array: array.tolist())  # for arrays and numbers of numpy


def _mark_colors(drawing: str) -> str:
    """Return a drawing for terminals as plain text. Each colored part is put in brackets.

    Example:
        >>> _mark_colors("SF\\x1b[41mF\\x1b[0mG")
        'SF[F]G'
    """
    return re.sub(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", r"[\1]", drawing)
