"""Plain reward functions as a Scorer. What cannot be scored is None and never 0.0: it must not teach anything."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

from agent_r1.core.environment import ExecutesCode, weakest_sandbox
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.trajectory import RewardValue, Scores, Trajectory, Unscored
from agent_r1.sandbox import sandbox_level
from agent_r1.tools.execution import (
    DEFAULT_TIMEOUT,
    CallFailure,
    CallOutcome,
    CallTimeout,
    ReturnValue,
    run_with_timeout,
)

RewardFunction = Callable[[Trajectory, Task], Any]
"""Gives (or, async, promises) a number, a tuple with one for each turn, or a mapping of names to these."""


@dataclass(frozen=True, slots=True)
class FunctionScorer:
    """Scores each trajectory by itself, by functions.

    ``functions`` are by the name of their reward; a function that returns a mapping brings names of
    its own. Where a function raises, takes longer than ``timeout`` seconds or gives anything but a finite
    number, that name's reward is Unscored. A function that runs code of the policy's says where by an attribute
    ``sandbox``, as :class:`~agent_r1.core.environment.ExecutesCode` does; the scorer says the weakest_sandbox of them.

    Example:
        FunctionScorer({"em": exact_match, "f1": f1})
    """

    functions: Mapping[str, RewardFunction]
    timeout: float = DEFAULT_TIMEOUT

    @property
    def sandbox(self) -> str | None:
        """Where the functions run code that the policy wrote, by what they say; None where they run none."""
        functions: Iterable[object] = self.functions.values()
        return weakest_sandbox(
            sandbox_level(function.sandbox) for function in functions if isinstance(function, ExecutesCode)
        )

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        return tuple(await asyncio.gather(*(self._rewards(trajectory, task) for trajectory in group)))

    async def _rewards(self, trajectory: Trajectory, task: Task) -> Scores:
        runs = (run_with_timeout(partial(function, trajectory, task), self.timeout) for function in self.functions.values())
        scores: dict[str, RewardValue | Unscored] = {}
        for name, outcome in zip(self.functions, await asyncio.gather(*runs), strict=True):
            for key, value in _values(name, outcome).items():
                scores[key] = Unscored("two functions give it") if key in scores else _score(value)
        return scores


def named(functions: Iterable[RewardFunction]) -> Mapping[str, RewardFunction]:
    """The functions by their own names. Raises InvalidInput for one without a name or with that of another."""
    by_name: dict[str, RewardFunction] = {}
    for function in functions:
        if not inspect.isroutine(function) or function.__name__ == "<lambda>":
            raise InvalidInput(
                "reward", got=repr(function), do="give a function defined with def: its name is the reward's"
            )
        if function.__name__ in by_name:
            raise InvalidInput("rewards", got=f"two functions named {function.__name__!r}", do="give each its own name")
        by_name[function.__name__] = function
    return by_name


def _values(name: str, outcome: CallOutcome) -> Mapping[str, object]:
    match outcome:
        case ReturnValue(value=Mapping() as values):
            return {str(key): value for key, value in values.items()}
        case ReturnValue(value=value):
            return {name: value}
        case CallFailure(reason=reason):
            return {name: Unscored(reason)}
        case CallTimeout(seconds=seconds):
            return {name: Unscored(f"it took longer than {seconds:g} seconds")}


def _score(value: object) -> float | tuple[float, ...] | Unscored:
    if isinstance(value, tuple):
        scores = [_number(item) for item in value]
        unscored = next((score for score in scores if isinstance(score, Unscored)), None)
        return unscored or tuple(score for score in scores if not isinstance(score, Unscored))
    return _number(value)


def _number(value: object) -> float | Unscored:
    if isinstance(value, Unscored):
        return value
    if not isinstance(value, Real):
        return Unscored(f"it is {type(value).__name__} and not a number")
    try:
        score = float(value)
    except (OverflowError, ValueError) as error:
        return Unscored(str(error))
    return score if math.isfinite(score) else Unscored(f"it is {score}")
