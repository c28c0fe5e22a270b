"""Several environments in one run: each task has the tools, rewards and limits of its own environment."""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from micro_run import result_of
from resuming import Whole, resume, train_with_images
from scenarios import MICRO
from transformers import AutoTokenizer

import agent_r1
from agent_r1 import Task, ToolEnv, exact_match
from agent_r1.cli import main
from agent_r1.commands.tasksets import open_taskset
from agent_r1.commands.training import with_unseen_questions
from agent_r1.core.environment import Environments
from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.export.config import ExportConfig
from agent_r1.export.trajectories import read_attempts
from agent_r1.store.reader import RunReader, read_results
from agent_r1.store.verification import verify
from agent_r1.training import api
from agent_r1.training.check import check
from agent_r1.training.config import EvalConfig, TrainConfig
from agent_r1.training.mixture import load_mixture, mix
from agent_r1.training.progress import SilentProgress
from agent_r1.training.sampling import group_requests
from agent_r1.training.user_task import load_task_file, make_taskset
from agent_r1.viewer.charts import draw_run

STEPS = 4
PARTS = {"wiki": "search", "notes": "read", "held": "count"}
OWN = '''
import zlib

from agent_r1 import ReferenceSolution, ReferenceSolutions, Message, Task, ToolEnv, script


def {tool}(query: str) -> str:
    """Find a page."""
    return "Brodra."


def {reward}(trajectory, task):
    return float(bool(trajectory.env_turns) and zlib.crc32(trajectory.last_text.encode()) % 2 == 0)


def solutions(task):
    return ReferenceSolutions(
        gold=(ReferenceSolution("even", script(Message.assistant("even"))),),
        wrong=(ReferenceSolution("odd", script(Message.assistant("odd"))),),
        expected_rewards={{"{reward}": 1.0}},
    )


env = ToolEnv([{tool}], [{reward}], max_turns=2)
tasks = [
    Task(f"{{split}}/{{n}}", "What is the mayor of Alban?", split=split)
    for split, count in (("train", 3), ("validation", 2), ("test", 2))
    for n in range(count)
]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mixture")
    for name in ("notes", "held"):
        text = OWN.format(tool=PARTS[name], reward=f"{name}_reward")
        (place / f"{name}.py").write_text(text, "utf-8")
    (place / "mix.toml").write_text(
        '[wiki]\ntaskset = "tinywiki"\nshare = 1\n[notes]\ntaskset = "notes.py"\nshare = 2\n'
        '[held]\ntaskset = "held.py"\nshare = 0\n',
        "utf-8",
    )
    return place


@pytest.fixture(scope="module")
def mixture(folder: Path) -> TaskSet:
    made = load_mixture(folder / "mix.toml", 0, "a/model")
    return replace(made, evaluation=("wiki/style-a", "notes/test", "held/test"), baselines=dict(made.baselines))


@pytest.fixture(scope="module")
def whole(mixture: TaskSet, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    place = tmp_path_factory.mktemp("whole")
    settings = {"taskset": mixture.name, "steps": STEPS, "groups_per_step": 3, "evaluate_every": 2, "evaluate_n": 4}
    return Whole(mixture, place, train_with_images(mixture, place, settings))


@pytest.fixture(scope="module")
def attempts(whole: Whole) -> list[tuple[str, Trajectory]]:
    with closing(RunReader(whole.place / "whole")) as reader:
        return [(one.task_id.partition("/")[0], one) for one in reader.trajectories("train")]


def test_each_prompt_shows_the_tools_of_its_own_environment_only(attempts: list[tuple[str, Trajectory]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MICRO["model"])
    assert {name for name, _ in attempts} == {"wiki", "notes"}
    for name, trajectory in attempts:
        prompt = tokenizer.decode(trajectory.turns[0].new_ids)
        assert {tool for tool in PARTS.values() if f'"name": "{tool}"' in prompt} == {PARTS[name]}


def test_each_attempt_has_the_rewards_and_limits_of_its_own_environment(attempts: list[tuple[str, Trajectory]]) -> None:
    names = {"wiki": {"em", "f1"}, "notes": {"notes_reward"}}
    assert all(set(trajectory.rewards) == names[name] for name, trajectory in attempts)
    assert max(len(trajectory.turns) for name, trajectory in attempts if name == "notes") <= 2


def test_metrics_validation_table_and_charts_tell_the_environments_apart(
    whole: Whole, attempts: list[tuple[str, Trajectory]]
) -> None:
    with closing(RunReader(whole.place / "whole")) as reader:
        steps = {metrics.step: metrics.values for metrics in reader.metrics()}
        (table,) = read_results(reader, "table")
        curves = {name: {step: values[name] for step, values in steps.items() if name in values} for name in steps[2]}
        fates = {fate.attempt: fate.step for fate in reader.fates()}
    for step, values in steps.items():
        rewards = [
            one.rewards["notes_reward"] for name, one in attempts if name == "notes" and fates[one.attempt] == step
        ]
        assert values["env_reward/notes"] == values["env_em/notes"] == pytest.approx(sum(rewards) / len(rewards))
        # The mean of a reward is over the attempts of environments that have it.
        assert values["reward/notes_reward"] == values["env_reward/notes"]
        assert values["reward/em"] == values["env_em/wiki"] and 0 <= values["env_constant_groups/wiki"] <= 1
    assert {"validation_em/wiki", "validation_em/notes"} <= steps[2].keys() and "validation_em/held" not in steps[2]
    rows = table["table"]
    assert rows["trained"].keys() == {"wiki/style-a", "notes/test", "held/test"}
    assert rows["naive-rag"].keys() == {"wiki/style-a"}  # a baseline of one part has no cells of the others
    assert table["measure"] == "exact match or reward 'held_reward' or reward 'notes_reward'"
    lines = {chart.title: [line.label for line in chart.lines] for chart in draw_run(curves)}
    assert lines["Reward by environment"] == ["notes", "wiki"]


def test_a_resumed_mixture_equals_an_uninterrupted_one(whole: Whole, folder: Path, tmp_path: Path) -> None:
    stopped = whole.stopped(2, tmp_path)
    again = replace(load_mixture(folder / "mix.toml", 0, "a/model"), evaluation=whole.taskset.evaluation)
    assert resume(again, stopped) == whole.result == result_of(whole.place / "whole")
    assert verify(stopped).violations == ()


def test_a_mixture_continues_in_python(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "resume_run", lambda config, taskset, *_: taskset)
    found: Any = agent_r1.resume(whole.place / "whole", steps=STEPS + 1)
    assert found.name == whole.taskset.name and set(found.env.by_name) >= {"wiki", "notes", "held"}


@pytest.mark.parametrize("name", ["mix.toml", "built.py"])
def test_a_run_is_continued_branched_and_evaluated_from_another_folder(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, away = shutil.copytree(folder, tmp_path / "home"), tmp_path / "away"
    (home / "built.py").write_text(BUILT, "utf-8")
    away.mkdir()
    monkeypatch.chdir(home)
    settings = ("--steps=1", "--groups_per_step=1", "--group_size=2", "--evaluate_n=0", "--max_tokens=2", "--quiet")
    assert main(["train", "--taskset", name, "--model=tiny-base", "--run=own", "--monitor.patience=9", *settings]) == 0
    monkeypatch.chdir(away)
    run = str(home / "runs" / "own")
    evaluation = ["eval", "--model", run, "--evaluate_n=1", "--splits", f"{'notes/' * (name == 'mix.toml')}test"]
    for command in (
        ["train", "--run", run, "--resume", "--steps=2", "--quiet"],
        ["train", "--model", f"{run}@2", "--run=branch", *settings],
        [*evaluation, "--quiet"],
        [*evaluation, "--taskset", str(home / name), "--quiet"],
        ["show", run],
    ):
        assert main(command) == 0, capsys.readouterr().err
    assert f"taskset{home / name}model" in "".join(capsys.readouterr().out.split())
    assert agent_r1.resume(run, steps=3, progress=SilentProgress()).resumed_from == 2


BUILT = """
from notes import env, tasks
from agent_r1.training.user_task import make_taskset


def build():
    return make_taskset(env, tasks, "built", "tiny-base")
"""


def test_exported_attempts_have_the_tools_of_their_environment(whole: Whole) -> None:
    with closing(RunReader(whole.place / "whole")) as reader:
        config = ExportConfig(format="openai", split="train")
        exported = list(read_attempts(reader, config))
    assert {one.summary.split for one in exported} == {"wiki/train", "notes/train"}
    for one in exported:
        names = {tool["function"]["name"] for branch in one.trajectory.branches for tool in one.tools_of(branch)}
        assert names <= {PARTS[one.summary.split.partition("/")[0]]} and (names or not one.trajectory.turns)


def test_a_mixture_has_the_wanted_shares_in_every_epoch(mixture: TaskSet) -> None:
    tasks = mixture.tasks("train")
    config = TrainConfig(steps=1, groups_per_step=3, group_size=4)
    requests = list(islice(group_requests(tasks, config, kind=mixture.kind), 2 * len(tasks)))
    for epoch in (requests[: len(tasks)], requests[len(tasks) :]):
        names = [request.task.env for request in epoch]
        assert abs(names.count("wiki") - len(tasks) / 3) <= 1 and set(names) == {"wiki", "notes"}
        assert len({request.task.id for request in epoch}) == 4000 + 3  # every task occurs
    # and so has every step
    assert all({request.task.env for request in requests[n : n + 3]} == {"wiki", "notes"} for n in range(0, 300, 3))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=5))
def test_every_part_has_its_share_to_within_one_task(parts: list[tuple[int, int]]) -> None:
    tasks = {str(n): [Task(f"{n}/{i}", "?", env=str(n)) for i in range(size)] for n, (size, _) in enumerate(parts)}
    shares = {str(n): Fraction(share) for n, (_, share) in enumerate(parts)}
    mixed = mix(tasks, shares)
    for name, share in shares.items():
        own = [task.id for task in mixed if task.env == name]
        assert abs(len(own) - len(mixed) * share / sum(shares.values())) < 1
        assert set(own) == {task.id for task in tasks[name]}
        assert max(map(own.count, own)) - min(map(own.count, own)) <= 1


def test_check_plays_the_solutions_of_all_parts(folder: Path) -> None:
    report = check(load_mixture(folder / "mix.toml", 0, ""), SilentProgress(), n=2)
    assert report.tasks.keys() == {
        *("train", "validation", "wiki/style-a", "wiki/style-b", "wiki/three-hop", "notes/test", "held/test")
    }
    assert report.passed and report.gold.played >= report.gold.passed > 10


def test_a_setting_on_which_the_parts_disagree_is_noted_and_has_the_value_of_the_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, mix = '[wiki]\ntaskset = "tinywiki"\n[notes]\ntaskset = "{}/notes.py"\n', str(tmp_path / "mix.toml")
    (tmp_path / "mix.toml").write_text(text.format(folder), "utf-8")
    line = "note: the parts disagree on trainer.learning_rate (wiki 0.001, notes 0.0003): 0.001 is used; give --trainer"
    dry = ["train", "--taskset", mix, "--run", str(tmp_path / "run"), "--dry_run", "--json"]
    assert main(dry) == 0
    out, err = capsys.readouterr()
    assert line in err and json.loads(out)["settings"]["trainer.learning_rate"] == 0.001
    assert main([*dry, "--trainer.learning_rate", "1e-5"]) == 0
    out, err = capsys.readouterr()
    assert "on trainer" not in err and json.loads(out)["settings"]["trainer.learning_rate"] == 1e-05
    assert "on steps (wiki 36, notes 20): 36 is used" in err
    assert main(["check", mix, "--n", "1"]) == 0 and line in capsys.readouterr().err


def test_check_names_the_parts_without_solutions_and_plays_the_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "held.py").read_text("utf-8")
    (tmp_path / "held.py").write_text(text.replace("def solutions", "def others"), "utf-8")
    notes, held = f'[notes]\ntaskset = "{folder}/notes.py"\n', '[{}]\ntaskset = "held.py"\n'
    (tmp_path / "mix.toml").write_text(notes + held.format("held") + held.format("more"), "utf-8")
    assert main(["check", str(tmp_path / "mix.toml"), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "7 tasks (train 3, validation 2, notes/test 2)" in shown and "earned the expected rewards: 7 of 7" in shown
    assert shown.splitlines().count("not checked, because they have no solutions: held, more") == 1
    assert main(["check", str(tmp_path / "mix.toml"), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unchecked"] == ["held", "more"]
    mixture = load_mixture(tmp_path / "mix.toml", 0, "")
    assert mixture.solutions is not None and mixture.solutions(mixture.tasks("held/test")[0]).gold == ()
    (tmp_path / "mix.toml").write_text(held.format("held"), "utf-8")
    assert main(["check", str(tmp_path / "mix.toml"), "--quiet"]) == 2
    assert "mix.toml: got none; add some" in capsys.readouterr().err


BY_ID = """
from agent_r1 import Message, ReferenceSolution, ReferenceSolutions, Task, ToolEnv, script

GOLD = {"one": "1", "two": "2"}


def right(trajectory, task):
    return float(trajectory.last_text == GOLD[task.id])


def solutions(task):
    return ReferenceSolutions(
        gold=(ReferenceSolution("gold", script(Message.assistant(GOLD[task.id]))),),
        wrong=(ReferenceSolution("wrong", script(Message.assistant("0"))),),
        expected_rewards={"right": 1.0},
    )


env = ToolEnv([], [right])
tasks = [Task(name, "?", split="test") for name in GOLD]
"""


def test_rewards_and_solutions_of_a_part_know_its_tasks_by_their_own_ids(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "by_id.py").write_text(BY_ID, "utf-8")  # of test tasks only, so that it needs share 0
    (tmp_path / "mix.toml").write_text(
        f'[notes]\ntaskset = "{folder}/notes.py"\n[by_id]\ntaskset = "by_id.py"\nshare = 0\n', "utf-8"
    )
    mixture = load_mixture(tmp_path / "mix.toml", 0, "")
    assert [task.id for task in mixture.tasks("by_id/test")] == ["by_id/one", "by_id/two"]
    report = check(mixture, SilentProgress(), n=2)
    assert report.tasks["by_id/test"] == 2 and report.failures == ()


def test_questions_that_a_mixture_trained_on_are_not_evaluated(tmp_path: Path) -> None:
    rows = [json.dumps({"question": f"What is {n} + {n}?", "answer": str(2 * n)}) for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows), "utf-8")
    (tmp_path / "mix.toml").write_text('[sums]\ntaskset = "math"\ndata = "sums.jsonl"\n', "utf-8")
    trained = TrainConfig(taskset=str(tmp_path / "mix.toml"), steps=1, groups_per_step=1, group_size=2)
    config = EvalConfig(taskset="math", data=tmp_path / "sums.jsonl", model="a/model")
    seen = {task.messages[-1].text for task in open_taskset(trained.taskset, trained).tasks("train")}
    taskset = with_unseen_questions(open_taskset("math", config), config, trained, SilentProgress())
    left = {task.messages[-1].text for split in taskset.evaluation for task in taskset.tasks(split)}
    assert seen and left and not seen & left and len(seen | left) == 40


def two(**tasks: Any) -> Mapping[str, Any]:
    env = {"calc": ToolEnv([], [exact_match]), "wiki": ToolEnv([], [exact_match])}
    return {"env": env, "tasks": [Task("a", "?", {"answers": ("x",)}, **tasks)]}


WRONG: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "unknown": (two(env="calk"), "env of task a: got 'calk'; did you mean 'calc'? give one of calc, wiki"),
    "missing": (two(), "env of task a: got none; give one of calc, wiki"),
    "single": (
        {**two(env="calc"), "env": ToolEnv([], [exact_match])},
        "env of task a: got 'calc', and a single environment; leave it out, or give the environments by name",
    ),
    "unrewarded": ({**two(env="a"), "env": {"a": ToolEnv([])}}, "env 'a': got no rewards"),
    "slash": ({**two(env="a/b"), "env": {"a/b": ToolEnv([], [exact_match])}}, "name of an environment: got 'a/b'"),
    "type": ({**two(env="a"), "env": {"a": print}}, "env 'a': got an object of type builtin"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_environment_is_one_line(case: str) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(InvalidInput) as error:
        make_taskset(**arguments, name="demo", model="a/model")
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


MALFORMED: Mapping[str, tuple[str, str]] = {
    "unknown field": ('[a]\ntaskset = "tinywiki"\nweight = 2', "a.weight: got Extra inputs"),
    "no table": ('taskset = "tinywiki"', "taskset: got Input should be"),
    "no share": ('[a]\ntaskset = "tinywiki"\nshare = 0', "share: got 0 for every part"),
    "unknown set": ('[a]\ntaskset = "tinywik"', "taskset: got 'tinywik'; did you mean 'tinywiki'?"),
    "data of a file": ('[a]\ntaskset = "one.py"\ndata = "x"', "a: got more than taskset and share"),
    "several": ('[a]\ntaskset = "several.py"', "with several environments; give each its own part"),
    "weights": (
        '[a]\ntaskset = "tinywiki"\n[b]\ntaskset = "one.py"',
        "reward 'f1': got weight 0 in a and 1 in b; give it another name in one of them",
    ),
    "mixture": ('[a]\ntaskset = "other.toml"', "a: got other.toml, a mixture; give each of its parts here"),
    "nothing to train": ('[a]\ntaskset = "tests.py"', "tasks of a: got none to train on; give it some"),
    "name": ('["a b"]\ntaskset = "tinywiki"', "name of an environment: got 'a b'"),
    "share": ('[a]\ntaskset = "tinywiki"\n[b]\ntaskset = "two.py"\nshare = 1e-9', "share of b: got"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_mixture_is_one_line(case: str, tmp_path: Path) -> None:
    text, message = MALFORMED[case]
    task = "from agent_r1 import *\nfrom agent_r1 import f1\ntasks = [Task('a', '?', {'answers': ('x',)}, env=%r)]\n"
    (tmp_path / "one.py").write_text(task % "" + "env = ToolEnv([], [f1])", "utf-8")
    (tmp_path / "two.py").write_text(task % "" + "env = ToolEnv([], [exact_match])", "utf-8")
    (tmp_path / "several.py").write_text(task % "b" + "env = {'b': ToolEnv([], [f1])}", "utf-8")
    (tmp_path / "tests.py").write_text(
        "from agent_r1 import *\ntasks = [Task('a', '?', {'answers': ('x',)}, 'test')]\n"
        "env = ToolEnv([], [exact_match])",
        "utf-8",
    )
    (tmp_path / "mix.toml").write_text(text, "utf-8")
    with pytest.raises(InvalidInput) as error:
        load_mixture(tmp_path / "mix.toml", 0, "a/model").tasks("train")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_with_several_environments_has_a_column_for_each(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "from agent_r1 import Task, ToolEnv, exact_match\n"
        "def of(env, n, split): return Task(f'{env}{n}{split}', '?', {'answers': ('x',)}, split, env)\n"
        "env = {name: ToolEnv([], [exact_match]) for name in ('calc', 'wiki')}\n"
        "tasks = [of(e, n, s) for s in ('train', 'validation', 'test') for e in env for n in range(2)]\n",
        "utf-8",
    )
    taskset = load_task_file(file, "a/model")
    assert isinstance(taskset.env, Environments) and taskset.evaluation == ("calc/test", "wiki/test")
    assert [task.id for task in taskset.tasks("wiki/test")] == ["wiki0test", "wiki1test"]
    # The first tasks of a split have some of each environment, for a validation on few of them.
    assert [task.env for task in taskset.tasks("validation")] == ["calc", "wiki", "calc", "wiki"]


def test_an_own_environment_without_tools_is_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Delegating:
        tools = ()

        def __init__(self) -> None:
            self.inner = ToolEnv([], [exact_match])

        def open(self, task: Task, context: Any) -> Any:
            return self.inner.open(task, context)

    lines: list[str] = []

    class Progress(SilentProgress):
        def print_line(self, text: str) -> None:
            lines.append(text)

    def train(env: Callable[[], Any]) -> None:
        tasks = [Task("a", "What is the mayor of Alban?", {"answers": ("Brodra",)})]
        settings = {**MICRO, "steps": 1, "evaluate_n": 0, "run": str(tmp_path / str(len(lines)))}
        nested = {key: value for key, value in settings.items() if "." not in key}
        agent_r1.train(env(), tasks, rewards=[exact_match], progress=Progress(), **nested)

    train(Delegating)
    assert [line for line in lines if "Delegating.tools is empty" in line and "env = {" in line]
    lines.append("own")
    train(lambda: ToolEnv([]))
    assert not [line for line in lines if "ToolEnv.tools is empty" in line]
