"""Functions with planted bugs: what is planted, what the agent sees, and how repairs are scored."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmark_files import SHARED, real_data

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code.problems import read_problems
from environments.code_repair import build
from environments.code_repair.bugs import Bug, apply_edit, most_similar_line, mutations, plant_bugs
from environments.code_repair.trials import STEPS, outcome_of

SPLITS = ("train", "validation", "test")


def row(number: int) -> dict[str, Any]:
    """Return a row of MBPP: a function that counts the values above a limit, under a name of its own."""
    name = f"count_{number}"
    code = f"def {name}(values, limit):\n    total = 0\n    for value in values:\n"
    code += f"        if value > limit:  # a comment\n            total += {number}\n    return total"
    tests = [
        f"assert {name}([1, 5, 9], 4) == {2 * number}",
        f"assert {name}([3, 4, 2], 2) == {2 * number}",
        f"assert {name}([7, 7], 7) == 0",
    ]
    return {"task_id": number, "text": f"Count {number} ways.", "code": code, "test_list": tests, "test_setup_code": ""}


ROWS = [row(number) for number in range(2, 22)]


Play = Callable[..., list[Trajectory]]


@pytest.fixture
def play(run_attempts: Any) -> Play:
    def play(taskset: TaskSet, tasks: Sequence[Task], texts: Any) -> list[Trajectory]:
        assert isinstance(taskset.env, ToolEnv)
        before = 1 + sum(message.role == "assistant" for message in taskset.env.examples)

        def reply(text: str) -> str:
            turn = text.count("<|im_start|>assistant") - before
            return str(texts(text, turn) if callable(texts) else texts[turn])

        return list(run_attempts(taskset, tasks, reply))

    return play


@pytest.fixture
def make(sandbox: Sandbox, rows_file: Callable[..., Path]) -> Callable[..., TaskSet]:
    def make(seed: int = 0, **settings: Any) -> TaskSet:
        data = rows_file(*ROWS)
        lines = [
            f"data = {json.dumps(data.name)}",
            *(f"{name} = {json.dumps(value)}" for name, value in settings.items()),
        ]
        (data.parent / "settings.toml").write_text("\n".join(lines), "utf-8")
        return build(data.parent / "settings.toml", seed)

    return make


def bug_of(task: Task) -> Bug:
    return task.data["bug"]


def bugs_of(taskset: TaskSet, split: str) -> list[Bug]:
    return [bug_of(task) for task in taskset.tasks(split)]


def outcome(bug: Bug, source: str) -> str:
    return outcome_of("", source, [(test.call, test.wanted) for test in bug.tests])


@pytest.mark.parametrize("proposals", [0, 5])
def test_every_bug_fails_the_visible_and_a_hidden_test_and_its_repair_passes_all(
    proposals: int, make: Callable[..., TaskSet]
) -> None:
    taskset = make(proposals=proposals)
    bugs = [bug for split in SPLITS for bug in bugs_of(taskset, split)]
    assert len(bugs) > 30 and len({bug.kind for bug in bugs}) >= 4
    for bug in bugs:
        visible, *hidden = outcome(bug, bug.source)
        assert visible == "f" and "f" in hidden
        assert bug.passes == tuple(letter == "p" for letter in hidden)
        assert apply_edit(bug.source, bug.proposals, bug.repair) == bug.right
        assert set(outcome(bug, bug.right)) == {"p"}
        lines = list(zip(bug.source.splitlines(), bug.right.splitlines(), strict=True))
        assert [index for index, (old, new) in enumerate(lines) if old != new] == [bug.line]


def test_no_function_is_in_two_splits_and_test_functions_have_one_bug(make: Callable[..., TaskSet]) -> None:
    taskset = make(bugs=3)
    functions = {split: [bug.problem.id for bug in bugs_of(taskset, split)] for split in SPLITS}
    assert all(functions.values())
    assert sum(len(set(names)) for names in functions.values()) == len(set().union(*functions.values()))
    assert len(set(functions["test"])) == len(functions["test"])
    assert len(functions["train"]) == 3 * len(set(functions["train"]))
    assert len({task.messages[0].text for task in taskset.tasks("train")}) == len(functions["train"])


def test_bugs_depend_on_the_seed_in_training_only(make: Callable[..., TaskSet]) -> None:
    first, again, other = make(0), make(0), make(1)
    assert bugs_of(first, "train") == bugs_of(again, "train") != bugs_of(other, "train")
    assert bugs_of(first, "test") == bugs_of(other, "test")


@pytest.mark.parametrize("proposals", [0, 4])
def test_hidden_tests_and_the_answer_are_in_no_message(
    proposals: int, make: Callable[..., TaskSet], play: Play
) -> None:
    taskset = make(proposals=proposals)
    tasks = taskset.tasks("test")
    texts = [tool_call("1" if proposals else "if value >= limit:"), "<answer>x</answer>"]
    for trajectory, bug in zip(play(taskset, tasks, texts), bugs_of(taskset, "test"), strict=True):
        seen = "\n".join(message.text for message in trajectory.messages)
        assert bug.problem.tests[0] in seen and bug.source in seen and bug.right not in seen
        assert "example" in trajectory.turns[0].observation[0].text or not trajectory.turns[0].results[0].ok
        for test in bug.tests[1:]:
            assert test.call not in seen


def tool_call(edit: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'try', 'arguments': {'edit': edit}})}\n</tool_call>"


def attempt(bug: Bug, *actions: str) -> list[str]:
    """Return the texts of an attempt: each action is a try, except the last one, which is the answer."""
    wrong = bug.source.splitlines()[bug.line].strip()
    other = next(one for one in mutations(bug.source) if "p" not in outcome(bug, one.source))
    words = {"right": bug.repair, "wrong": other.source.splitlines()[other.line].strip(), "same": wrong, "none": ""}
    *tries, final = (words[action] for action in actions)
    return [*map(tool_call, tries), f"<answer>{final}</answer>"]


@pytest.mark.parametrize(
    ("actions", "fixed", "first"),
    [
        (("right",), 1, 1),
        (("right", "right"), 1, 1),
        (("wrong", "right"), 1, 0),
        (("right", "wrong"), 0, 1),
        (("same", "right"), 1, 0),
        (("same",), 0, 0),
        (("none",), 0, 0),
    ],
)
def test_the_final_answer_decides(
    actions: tuple[str, ...], fixed: float, first: float, make: Callable[..., TaskSet], play: Play
) -> None:
    taskset = make()
    (task,) = taskset.tasks("test")[:1]
    (trajectory,) = play(taskset, [task], attempt(bug_of(task), *actions))
    assert (trajectory.rewards["fixed"], trajectory.rewards["first_fixed"]) == (fixed, first)
    assert trajectory.rewards["gained"] == 1 if fixed else trajectory.rewards["gained"] < 1


def test_the_gain_is_counted_from_what_the_bug_passes(make: Callable[..., TaskSet], play: Play) -> None:
    taskset = make(bugs=9)
    expected = {0: 0.5, 1: 0.0}
    for task in taskset.tasks("train"):
        bug = bug_of(task)
        for other in mutations(bug.source):
            line = other.source.splitlines()[other.line].strip()
            half = outcome(bug, other.source)[1:].count("p") == 1 and apply_edit(bug.source, (), line) == other.source
            if half and sum(bug.passes) in expected:
                (trajectory,) = play(taskset, [task], [f"<answer>{line}</answer>"])
                assert trajectory.rewards["gained"] == expected.pop(sum(bug.passes))
                assert trajectory.rewards["fixed"] == 0
    assert not expected


def test_the_tool_shows_the_failed_test_with_its_values(make: Callable[..., TaskSet], play: Play) -> None:
    taskset = make()
    (task,) = taskset.tasks("test")[:1]
    bug = bug_of(task)
    (right,) = play(taskset, [task], [tool_call(bug.repair), "<answer>x</answer>"])
    (wrong,) = play(taskset, [task], attempt(bug, "wrong", "right"))
    assert right.turns[0].observation[0].text == "1 of 1 examples pass.\n"
    assert f"{bug.tests[0].call} should give {bug.tests[0].wanted}, and gives " in wrong.turns[0].observation[0].text


@pytest.mark.parametrize("edit", ["", "9", "²", "1" * 5000])
def test_what_is_no_proposal_changes_nothing_and_counts_as_an_invalid_call(
    edit: str, make: Callable[..., TaskSet], play: Play
) -> None:
    taskset = make(proposals=3)
    (trajectory,) = play(taskset, taskset.tasks("test")[:1], [tool_call(edit), "<answer>0</answer>"])
    (result,) = trajectory.turns[0].results
    assert not result.ok and result.error == "invalid arguments"
    assert trajectory.rewards["fixed"] == 0 == trajectory.rewards["gained"]


def test_shuffled_feedback_is_about_another_function(make: Callable[..., TaskSet], play: Play) -> None:
    taskset = make(shuffle_feedback=True)
    tasks = taskset.tasks("train")[:40]

    def right(text: str, turn: int) -> str:
        bug = next(bug for bug in map(bug_of, tasks) if bug.source in text)
        return f"<answer>{bug.repair}</answer>" if turn else tool_call(bug.repair)

    found = play(taskset, tasks, right)
    passed = [trajectory.turns[0].observation[0].text.startswith("1 of 1") for trajectory in found]
    assert all(trajectory.rewards["fixed"] == 1 for trajectory in found)
    assert sum(passed) < len(passed) / 2


def test_the_measures_say_whether_an_agent_keeps_what_passed(make: Callable[..., TaskSet], play: Play) -> None:
    taskset = make(bugs=9, proposals=3)
    tasks = taskset.tasks("train")[:40]

    def heed(text: str, turn: int) -> str:
        passed = "1 of 1" in text.rsplit("<|im_start|>user", 1)[-1].rsplit("<|im_start|>tool", 1)[-1]
        return f"<answer>{1 if passed else 2}</answer>" if turn else tool_call("1")

    assert taskset.measures is not None
    heeding = taskset.measures(play(taskset, tasks, heed))
    assert (heeding["kept_after_pass"], heeding["kept_after_fail"]) == (1, 0)
    deaf = taskset.measures(play(taskset, tasks, [tool_call("1"), "<answer>1</answer>"]))
    assert (deaf["kept_after_pass"], deaf["kept_after_fail"]) == (1, 1)
    unheard = taskset.measures(play(taskset, tasks, [tool_call("9"), "<answer>1</answer>"]))
    assert not {"kept_after_pass", "kept_after_fail"} & set(unheard)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(x):\n    while x < 9:\n        x += 1\n    return x", "p"),
        ("def f(x):\n    while True:\n        x += 1", "x"),
        ("def f(x):\n    try:\n        while True:\n            x += 1\n    except Exception:\n        return 9", "x"),
        ("def f(x):\n    return f(x)", "f"),
        ("def f(x):\n    raise SystemExit", "x"),
        ("def f(x):\n    class Nine(int):\n        __repr__ = object.__repr__\n    return Nine(9)", "x"),
        ("def f(x:", "x"),
    ],
)
def test_a_trial_ends_after_a_number_of_steps_on_any_machine(source: str, expected: str) -> None:
    assert STEPS < 10**6 and outcome_of("", source, [("f(1)", "9")]) == expected


def test_a_new_line_replaces_the_most_similar_one() -> None:
    source = "def f(n):\n    total = 1\n    return total // n"
    assert most_similar_line(source, "total = 0") == 1
    assert apply_edit(source, (), "return total % n") == "def f(n):\n    total = 1\n    return total % n"
    assert apply_edit(source, (), "total = 1") is None and apply_edit(source, (), "zzz") is None
    assert apply_edit(source, (), "total = 0\ntotal = 2") is None


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        (ROWS[:2], "", "got 2 different questions; give at least 3"),
        (ROWS, "lines = 3", "got no function of at most 3 lines with a bug"),
        (ROWS, "proposals = -1", "proposals: got Input should be greater than or equal to 0"),
        (ROWS, "kinds = 3", "kinds: got Extra inputs are not permitted; give data, lines"),
        ([{**row(3), "test_list": ["assert count_3([9], 1) == 3"]} for _ in range(3)], "", "for a second time"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(
    rows: list[Any], settings: str, expected: str, rows_file: Callable[..., Path], sandbox: Sandbox
) -> None:
    data = rows_file(*rows)
    (data.parent / "s.toml").write_text(f'data = "{data.name}"\n{settings}', "utf-8")
    with pytest.raises(InvalidInput) as caught:
        build(data.parent / "s.toml", 0)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@real_data
def test_most_short_functions_of_mbpp_get_a_bug(sandbox: Sandbox) -> None:
    bugs = plant_bugs(read_problems(SHARED / "mbpp_400.jsonl"), 1, 6, 6, "0", sandbox)
    assert len(bugs) > 180 and len({bug.kind for bug in bugs}) == 8
