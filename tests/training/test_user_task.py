"""A user's own agent becomes a task set, and each mistake in it is reported in one line."""

from pathlib import Path
from textwrap import dedent

import pytest

from agent_r1 import Message, Task, ToolEnv, exact_match
from agent_r1.core.errors import InvalidInput
from agent_r1.training.user_task import load_task_file, make_taskset

AGENT = dedent("""
    from agent_r1 import Message, Task, ToolEnv, exact_match, tool

    @tool
    def double(number: int) -> str:
        \"\"\"Double a number.

        Args:
            number: what to double.
        \"\"\"
        return str(2 * number)

    tasks = [Task(str(i), (Message.user(f"Double {i}"),), {"answers": (str(2 * i),)}) for i in range(5)]
    env = ToolEnv(tools=[double], rewards=[exact_match])
""")


def write(folder: Path, text: str) -> Path:
    file = folder / "my_agent.py"
    file.write_text(text, "utf-8")
    return file


def task(name: str, split: str = "train") -> Task:
    return Task(name, (Message.user("?"),), {"answers": ("x",)}, split)


def test_a_file_with_env_and_tasks_is_a_task_set(tmp_path: Path) -> None:
    taskset = load_task_file(write(tmp_path, AGENT), "a/model")
    assert taskset.name == "my_agent" and taskset.recipe == {"taskset": "my_agent"}
    assert [spec.name for spec in taskset.env.tools] == ["double"]
    assert [task.id for task in taskset.tasks("train")] == ["0", "1", "2", "3", "4"]
    assert len(taskset.scorers) == 1


def test_a_file_can_import_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_agent.py").write_text(AGENT, "utf-8")
    assert load_task_file(write(tmp_path, "from beside_agent import env, tasks"), "a/model").name == "my_agent"


@pytest.mark.parametrize(
    ("line", "is_agent"),
    [
        ("async def run(base_url, api_key, task):\n    return 'x'", True),
        ("def run(task):\n    return task.id", False),
        ("from subprocess import run", False),
        ("run = max", False),
        ("run = 3", False),
    ],
)
def test_run_in_a_file_is_the_agent_if_it_has_the_parameters_of_one(line: str, is_agent: bool, tmp_path: Path) -> None:
    assert (load_task_file(write(tmp_path, f"{AGENT}\n{line}\n"), "a/model").agent is not None) == is_agent


def test_the_table_has_the_splits_other_than_train() -> None:
    env = ToolEnv([], [exact_match])
    assert make_taskset(env, [task("a"), task("b")], "demo", "a/model").evaluation == ("train",)
    mixed = make_taskset(env, [task("a"), task("b", "easy"), task("c", "hard")], "demo", "a/model")
    assert mixed.evaluation == ("easy", "hard")
    assert [t.id for t in mixed.tasks("train")] == ["a"] and [t.id for t in mixed.tasks("hard")] == ["c"]


BROKEN = {
    "got no env": "tasks = []",
    "got no tasks": AGENT + "del tasks",
    r"was never closed \(line 2\); fix the file": "x = 1\ny = (1,",
    r"NameError: name 'nothing' is not defined \(line 3\); fix": "x = 1\n\nprint(nothing)",
    r"JSONDecodeError: .*\(line 3\); fix": "import json\n\njson.loads('{')",
    r"ModuleNotFoundError: No module named 'no_such_module' \(line 1\)": "import no_such_module",
    "env: got an object of type int; make it a ToolEnv": AGENT + "env = 3",
    r"env: got no rewards; give rewards": AGENT + "env = ToolEnv([double])",
    "tasks: got an object of type str": AGENT + "tasks = 'abc'",
    r"tasks\[1\]: got an object of type str; make it a Task": AGENT + "tasks = [tasks[0], 'x']",
    r"tasks\[1\]: got a second task with id '0'": AGENT + "tasks = [tasks[0], tasks[0]]",
    "tasks: got none in the split 'train'": AGENT + "tasks = []",
    r"task 7: got answers='x'; put a tuple of text": AGENT
    + "tasks += [Task('7', 'Double 7', {'answers': 'x'}, 'test')]",
    "task 7: got answers=None; put": AGENT + "tasks += [Task('7', 'Double 7')]",
    "max_turns: got 0": AGENT + "env = ToolEnv([double], [exact_match], max_turns=0)",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_mistake_in_a_file_is_one_line(line: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=line) as caught:
        load_task_file(write(tmp_path, BROKEN[line]), "a/model")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="which is not a file; give a Python file"):
        load_task_file(tmp_path / "none.py", "a/model")


def test_a_file_can_define_solutions_to_check_it(tmp_path: Path) -> None:
    assert load_task_file(write(tmp_path, AGENT), "a/model").solutions is None
    taskset = load_task_file(write(tmp_path, AGENT + "def solutions(task):\n    return task.id\n"), "a/model")
    assert taskset.solutions is not None and taskset.solutions(task("1")) == "1"


def test_a_file_that_exits_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"SystemExit: 3 \(line 2\); fix the file"):
        load_task_file(write(tmp_path, "import sys\nsys.exit(3)"), "a/model")
