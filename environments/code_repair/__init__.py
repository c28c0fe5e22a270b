"""``code_repair``: the agent repairs a function of MBPP that contains one bug. Hidden tests grade the repair."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.core.trajectory import Rewards, Trajectory
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.rewards.scoring import final_answer
from agent_r1.sandbox.config import DEFAULT_LEVEL, SandboxConfig, SandboxLevel
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.answers import answer, reference
from agent_r1.tasksets.code import WAIT, format_trial, trial_program
from agent_r1.tasksets.code.problems import Problem, packages_for, read_problems
from agent_r1.tasksets.files import (
    GIVEN_OUT,
    WHOLE,
    DataSettings,
    Splits,
    all_questions,
    nonempty_splits,
    read_settings,
    read_splits,
)
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.tool_errors import ToolErrorKind, error_result
from environments.code_repair.bugs import Bug, apply_edit, mutations, plant_bugs

_log = logging.getLogger(__name__)

TRY = "try"
PASSED = "1 of 1 examples pass."

WRITING = (
    "One line of a function is wrong. Try the right line: <try>line</try>. "
    "When the test passes, reply with <answer>line</answer>."
)
CHOOSING = (
    "One line of a function is wrong. Try a number of the list: <try>number</try>. If the test fails, try another. "
    "When the test passes, reply with <answer>number</answer>."
)

RECIPE: Mapping[str, Any] = {"tool_format": "tags", "reward_weights.gained": 0.0, "reward_weights.first_fixed": 0.0}
"""The default settings for training on this task set. Only the reward ``fixed`` has a weight other than 0."""

MAX_OUTPUT = 300
"""The maximum number of characters of a tool result: enough for a failed test, not for a long traceback."""


class Settings(DataSettings):
    """The settings of the task set, as in a TOML file. ``data`` are functions with tests, in the format of MBPP.

    Example of a file:

        data = "mbpp.jsonl"
        proposals = 6
    """

    lines: int = Field(default=8, ge=2)
    """The maximum number of lines of a function. Longer functions are left out."""

    bugs: int = Field(default=3, ge=1)
    """The maximum number of tasks that are made from one function of the training split. Each task has one bug. In the
    other splits, at most one task is made from each function."""

    proposals: int = Field(default=0, ge=0, le=99)
    """The maximum number of proposed lines, of which the agent chooses one. 0: the agent writes the line itself."""

    turns: int = Field(default=4, ge=2)
    """The maximum number of actions in an episode."""

    shuffle_feedback: bool = False
    """Whether the agent's test tool ignores the agent's edit, and returns the result of a random edit of a random
    function instead. This is a control experiment."""


def build(data: Path, seed: int, sandbox: SandboxLevel = DEFAULT_LEVEL) -> TaskSet:
    """Build the task set. In each task, the agent repairs a function in which a bug was planted.

    ``data`` is a file or data set of functions with tests, in the format of MBPP, or a TOML file of settings.

    Raises InvalidInput if an argument cannot be used, or if no bug can be planted.
    """
    settings = read_settings(Settings, data)
    splits = read_splits(settings.data, seed, read_problems, GIVEN_OUT)
    confined = Sandbox(SandboxConfig(level=sandbox, packages=packages_for(p.exam for p in all_questions(splits))))
    tasks = _tasks(splits, settings, seed, confined)
    bugs = [task.data["bug"] for task in tasks["test"] or tasks["train"]]
    choosing = settings.proposals > 0
    return TaskSet(
        name="code_repair",
        env=ToolEnv(
            [try_tool(confined, bugs if settings.shuffle_feedback else ())],
            max_turns=settings.turns,
            system=CHOOSING if choosing else WRITING,
            examples=examples(choosing),
            max_output=MAX_OUTPUT,
        ),
        tasks=nonempty_splits(tasks, settings.data),
        scorers=(RepairScorer(confined),),
        rewards=("fixed", "gained", "first_fixed"),
        recipe={"sandbox": sandbox, **RECIPE},
        validation="validation" if tasks["validation"] else None,
        solutions=solutions_of(settings.turns),
        measures=repair_rates,
        sandbox=confined.isolation,
    )


def _tasks(splits: Splits[Problem], settings: Settings, seed: int, sandbox: Sandbox) -> Mapping[str, tuple[Task, ...]]:
    tasks = {}
    for split, problems in splits.items():
        if split == WHOLE:
            continue
        count, source = (settings.bugs, str(seed)) if split == "train" else (1, split)
        bugs = plant_bugs(problems, count, settings.lines, settings.proposals, source, sandbox)
        numbered = [(sum(one.problem.id == bug.problem.id for one in bugs[:i]), bug) for i, bug in enumerate(bugs)]
        # first one bug of every function, then a second bug of every function, and so on
        tasks[split] = tuple(bug.task(split, number) for number, bug in sorted(numbered, key=lambda pair: pair[0]))
    if not any(tasks.values()):
        got = f"no function of at most {settings.lines} lines with a bug that its tests find"
        raise InvalidInput(str(settings.data), got=got, do="give functions with at least two tests, as MBPP has them")
    return tasks


# The solved tasks of the prompt, whose functions are in no benchmark: (the request, the test and the function with the
# wrong line; proposed lines; tried lines with the results of the tool). The last try passes the test.
_SOLVED: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]], ...] = (
    (
        "Find the last digit.\nassert last_digit(57) == 7\n\ndef last_digit(n):\n    n = abs(n)\n    return n // 10",
        ("n = max(n)", "return n % 10", "return n / 10"),
        (
            ("return n / 10", "last_digit(57) should give 7, and gives 5.7\n0 of 1 examples pass."),
            ("return n % 10", PASSED),
        ),
    ),
    (
        "Check if a text has more than n words.\nassert has_words('to be', 1) == True\n\n"
        "def has_words(text, n):\n    return len(text.split()) < n",
        ("return len(text.split()) <= n", "return len(text.split()) == n", "return len(text.split()) > n"),
        (
            (
                "return len(text.split()) <= n",
                "has_words('to be', 1) should give True, and gives False\n0 of 1 examples pass.",
            ),
            ("return len(text.split()) > n", PASSED),
        ),
    ),
)


def examples(choosing: bool) -> tuple[Message, ...]:
    """Return the two solved tasks that each prompt begins with, as messages.

    If ``choosing`` is True, the agent chooses corrected lines of code from a list, and gives their numbers. Otherwise,
    the agent writes the lines.
    """
    messages: list[Message] = []
    for text, proposals, tries in _SOLVED:
        menu = "".join(f"\n{index}: {line}" for index, line in enumerate(proposals, start=1))
        edits = [str(proposals.index(line) + 1) if choosing else line for line, _ in tries]
        results = [Message.tool(result, "call_0") for _, result in tries]
        calls = zip((tool_call(TRY, edit=edit) for edit in edits), results, strict=True)
        messages += [Message.user(f"{text}\n{menu}" if choosing else text), *chain(*calls), answer(edits[-1])]
    return tuple(messages)


def try_tool(sandbox: Sandbox, shuffled: Sequence[Bug] = ()) -> Tool:
    """Return the tool ``try``: it edits the function as the agent asks, and runs the visible test in ``sandbox``.

    If ``shuffled`` is not empty, the results say nothing about the agent's edit, for a control experiment: the tool
    draws a function from ``shuffled``, edits a random line of it, and returns the result of its visible test.
    """

    @tool(name=TRY, timeout=sandbox.config.limits.seconds + WAIT, sandbox=sandbox)
    async def try_edit(edit: str, task: Task) -> ToolResult:
        """Run the function with this line on the test.

        Args:
            edit: the line
        """
        bug: Bug = task.data["bug"]
        source = apply_edit(bug.source, bug.proposals, edit)
        if source is None:
            wanted = "a line that is similar to the wrong one"
            wanted = f"a number from 1 to {len(bug.proposals)}" if bug.proposals else wanted
            return error_result(ToolErrorKind.INVALID_ARGUMENTS, f"That changes nothing: write {wanted}.")
        if shuffled:
            rng = random.Random(hashlib.sha256(f"{task.id} {source}".encode()).digest())
            bug = rng.choice(shuffled)
            source = rng.choice(bug.proposals or [one.source for one in mutations(bug.source)])
        return format_trial(await sandbox.run(trial_program(source, bug.problem.exam, bug.tests[:1])))

    return try_edit


Results = tuple[bool | None, ...]
"""The result of each hidden test: True if the test passes, False if the test fails, None if the test did not run."""


class RepairScorer:
    """A scorer with three rewards for the repair of a function that contains a bug.

    An edit of the agent replaces one line of the function. The rewards come from the n hidden tests, of which the
    function with the bug passes b.

    - ``fixed``: 1 if the function passes all hidden tests after the edit in the final answer; else 0.
    - ``gained``: max(0, (p - b) / (n - b)) if the function passes p hidden tests after the edit in the final answer.
    - ``first_fixed``: like ``fixed`` for the first edit: in the first call of the tool ``try`` or, without a call, in
      the final answer.

    If an edit is missing or invalid, its rewards are 0. If a hidden test did not run because the sandbox failed, they
    are None.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.sandbox = sandbox.isolation

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
        bug: Bug = task.data["bug"]
        pairs = [(final_function(trajectory, bug), first_function(trajectory, bug)) for trajectory in group]
        different = sorted({source for pair in pairs for source in pair if source is not None})
        graded = await asyncio.gather(*(self._grade(bug, source) for source in different))
        results = dict(zip(different, graded, strict=True))
        for source, result in results.items():
            if None in result:
                _log.warning("a repair of %s could not be judged: %s", task.id, source.splitlines()[0])
        return tuple(
            {
                "fixed": _fixed(results.get(final or "")),
                "gained": _gained(results.get(final or ""), bug),
                "first_fixed": _fixed(results.get(first or "")),
            }
            for final, first in pairs
        )

    async def _grade(self, bug: Bug, source: str) -> Results:
        verdicts = await asyncio.gather(*(exam.judge(self._sandbox, source) for exam in bug.exams))
        return tuple(verdict.passed for verdict in verdicts)


def _fixed(results: Results | None) -> float | None:
    if results is None:
        return 0.0
    return None if None in results else float(all(results))


def _gained(results: Results | None, bug: Bug) -> float | None:
    if results is None:
        return 0.0
    if None in results:
        return None
    before = sum(bug.passes)
    return max(0.0, (sum(map(bool, results)) - before) / (len(results) - before))


def final_function(trajectory: Trajectory, bug: Bug) -> str | None:
    """Return the source of the function after the edit in the agent's final answer; None without a valid edit."""
    text = final_answer(trajectory)
    return None if text is None else apply_edit(bug.source, bug.proposals, text)


def tried_edits(trajectory: Trajectory) -> list[tuple[str, ToolResult]]:
    """Return the edits that were given to the tool ``try``, with its results."""
    return [
        (edit, result)
        for turn in trajectory.env_turns
        for call, result in zip(turn.action.message.calls, turn.results, strict=False)  # the last turn's are not run
        if call.name == TRY and isinstance(edit := (call.arguments or {}).get("edit"), str)
    ]


def first_function(trajectory: Trajectory, bug: Bug) -> str | None:
    """Return the source of the function after the agent's first edit; None if the edit is missing or invalid."""
    for edit, _ in tried_edits(trajectory):
        return apply_edit(bug.source, bug.proposals, edit)
    return final_function(trajectory, bug)


def first_try(trajectory: Trajectory) -> tuple[bool, bool] | None:
    """Return (passed, kept) for the first edit that the tool ``try`` tested; None if ``try`` tested no edit.

    ``passed`` is whether the edited function passed the visible test, which the agent can see. ``kept`` is whether the
    edit is also the final answer.
    """
    for edit, result in tried_edits(trajectory):
        if result.ok:
            text = "".join(part.text for part in result.parts if isinstance(part, Text))
            return text.startswith(PASSED), (final_answer(trajectory) or "").strip() == edit.strip()
    return None


def repair_rates(trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """Return four rates by name, from 0 to 1: how often attempts repair the function, and how they use test results.

    - ``first_fix_rate``: of all attempts, the share whose first edit repairs the function.
    - ``corrected_rate``: of the attempts with a wrong first edit, the share whose final answer repairs the function.
    - ``kept_after_pass``: of the attempts whose first tested edit passed the visible test, the share whose final answer
      is the same edit.
    - ``kept_after_fail``: of the attempts whose first tested edit failed the visible test, the share whose final answer
      is the same edit.

    If an agent ignores the test results, ``kept_after_pass`` and ``kept_after_fail`` are about equal. Attempts that
    could not be graded do not count. A rate is left out if no attempt counts for the rate.
    """
    graded = [(t, t.rewards.get("fixed"), t.rewards.get("first_fixed")) for t in trajectories]
    judged = [(t, fixed, first) for t, fixed, first in graded if fixed is not None and first is not None]
    tries = [found for t, _, _ in judged if (found := first_try(t)) is not None]
    shares = {
        "first_fix_rate": [first == 1 for _, _, first in judged],
        "corrected_rate": [fixed == 1 for _, fixed, first in judged if first == 0],
        "kept_after_pass": [kept for passed, kept in tries if passed],
        "kept_after_fail": [kept for passed, kept in tries if not passed],
    }
    return {name: fmean(found) for name, found in shares.items() if found}


def solutions_of(max_turns: int) -> Callable[[Task], ReferenceSolutions]:
    """Return a function that takes a task and returns its reference solutions: known right and wrong solutions."""

    def of(task: Task) -> ReferenceSolutions:
        bug: Bug = task.data["bug"]
        right = bug.repair
        # a number that no proposal has, or the line with the bug
        wrong = str(len(bug.proposals) + 1) if bug.proposals else bug.source.splitlines()[bug.line].strip()
        gold = (
            reference("the right line", answer(right)),
            reference("the right line, tried first", tool_call(TRY, edit=right), answer(right)),
        )
        others = (
            reference("the line with the bug", answer(wrong)),
            reference("the right line, given up", tool_call(TRY, edit=right), answer(wrong)),
            reference("the right line, without tags", Message.assistant(right)),
            reference("the tests", answer(bug.problem.tests[-1])),
            reference("an empty answer", answer("")),
            reference("nothing", Message.assistant("")),
            reference("trying to the end", *(tool_call(TRY, edit=right),) * max_turns),
        )
        return ReferenceSolutions(gold, others, {"fixed": 1.0, "gained": 1.0})

    return of
