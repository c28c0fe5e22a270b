"""The tables of renamed names in CHANGELOG.md: every new name exists, and no name of the first version is missing."""

from __future__ import annotations

import ast
import importlib
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import choices, parameters
from agent_r1.cli import cli
from agent_r1.config import has_setting
from agent_r1.store.schema import TABLES
from agent_r1.training.config import EvalConfig, TrainConfig

ROOT = Path(__file__).parents[1]
RENAMED = (ROOT / "CHANGELOG.md").read_text().partition("### Renamed")[2].partition("\n## ")[0]


def split(names: str) -> list[str]:
    return names.split()


SETTINGS = split("""
data corpus sandbox seed task splits model algorithm run steps max_tokens context view.rule view.turns view.after
view.characters view.pieces tool_format tags.observation tags.answer tags.names concurrency episode_seconds
score_seconds pass_k pass_attempts retries device dtype threads row teacher learner.learning_rate
learner.critic_learning_rate learner.betas learner.weight_decay learner.max_grad_norm learner.minibatches
learner.micro_tokens doctor.failure_share doctor.failure_window doctor.patience doctor.idle_steps doctor.ratio_deviation
doctor.logprob_gap doctor.gradient_spike groups_per_step group_size max_staleness temperature top_p top_k reward_weights
evaluate_every evaluate_n checkpoint_every checkpoint_keep methods n
""")
"""Every setting of the first version's commands train and eval."""

PARAMETERS = split("""
advantage advantage.alpha advantage.baseline advantage.bootstrap advantage.coefficient advantage.epsilon advantage.gamma
advantage.history advantage.lam advantage.scale advantage.standard advantage.threshold advantage.turn_gamma
advantage.turn_weight advantage.value_clip advantage.warmup aggregation anchor correction correction.high
correction.level correction.low correction.rule entropy epochs filters.greedy filters.overlong filters.staleness
filters.success filters.top_variance filters.void_turn filters.zero_variance imitation kl kl.coefficient kl.estimator
kl.horizon kl.target kl.where length masks.advantage masks.loss observation ratio refill rejection rejection.high
rejection.level rejection.low rejection.statistic shaping.length shaping.process_scale shaping.turns surrogate
surrogate.bound surrogate.clip surrogate.dual surrogate.high surrogate.low surrogate.tau_negative surrogate.tau_positive
""")
"""Every parameter of the first version's algorithms."""

COMMANDS = split("train eval paper retriever check play verify tasks algorithms")

EXPORTED = {
    "agent_r1": """AgentR1Error InvalidInput Message Task ToolEnv ToolResult Trajectory exact_match f1 final_answer
        gated_exact_match sub_match tool train""",
    "agent_r1.env": """INVALID_CALLS Fault FunctionScorer ModelUser NaiveRag Opener Reply Resources Tool ToolEnv User
        UserEnv exact_match f1 final_answer gated_exact_match python_tool sub_match tool""",
    "agent_r1.env.adapters": """Gymnasium HttpServer OpenEnv StdioServer TextArena episode_return mcp_tools
        reasoning_gym_score reasoning_gym_tasks""",
}
"""The exported names of the first version."""

METRICS = split("""
reward failed filtered entropy advantage_std first_ratio_deviation logprob_gap staleness action_tokens model_tokens
padding skipped_steps kl_reference kl_coefficient explained_variance trust unscored retried calls invalid_calls
failed_calls policy_loss clip_fraction kl_old imitation_loss value_loss groups refilled_groups em tokens
tokens_per_second rollout_seconds update_seconds load_seconds doctor_seconds keep_seconds
""")
"""The metrics and timings of the first version's steps."""


def tables(text: str, heading: str) -> Iterator[list[tuple[str, ...]]]:
    """Yield the tables below a heading, each as rows of cells without quotes."""
    section = text.partition(f"\n#### {heading}\n")[2].partition("\n####")[0]
    for block in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
        _, _, *lines = block.splitlines()
        yield [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def pairs(heading: str, text: str = RENAMED) -> dict[str, str]:
    """Return the first table below a heading: old name -> new name."""
    first = next(tables(text, heading))
    return {old.strip("`"): new.strip("`") for old, new in first}


def missing(old: Iterable[str], successors: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return the old names that neither exist nor have a successor."""
    known = set(known)
    return [name for name in old if name not in known and name not in successors]


def resolve_name(name: str) -> object:
    """Import a dotted name: a module, an attribute of a module, or a member of a class.

    A field of a class without a default, such as a dataclass's, is returned as its annotation. Raises AttributeError.
    """
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            fields = {key: kind for base in getattr(value, "__mro__", ()) for key, kind in annotations_of(base).items()}
            value = fields[part] if part in fields else getattr(value, part)
        return value
    raise AttributeError(name)


def annotations_of(cls: type) -> Mapping[str, object]:
    return vars(cls).get("__annotations__", {})


def setting_exists(key: str) -> bool:
    return has_setting(TrainConfig, key) or has_setting(EvalConfig, key)


def parameter_keys() -> set[str]:
    """Return the parameters of all presets, and those of all components that a preset can be given."""
    keys = {key for algorithm in ALGORITHMS.values() for key in parameters(algorithm)}
    for field in Algorithm.model_fields:
        for component in choices(ALGORITHMS["grpo"], field).values():
            keys |= {f"{field}.{name}" for name in component.model_fields}
    return keys


def strings(*paths: str) -> set[str]:
    """Return the string constants of source files, those in docstrings' examples excluded."""
    trees = (ast.parse(path.read_text()) for pattern in paths for path in (ROOT / "agent_r1").glob(pattern))
    return {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_commands_and_their_successors_exist() -> None:
    commands = pairs("Commands")
    named = {old.split()[1]: new for old, new in commands.items() if old.startswith("agent-r1 ")}
    assert missing(COMMANDS, named, cli.commands) == []
    for new in commands.values():
        words = new.split()
        if words[0] == "agent-r1":
            assert words[1] in (*cli.commands, "COMMAND"), new
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), new
        else:
            place = words[2].replace(".", "/") if words[1] == "-m" else words[1]
            assert (ROOT / place).exists(), new


@pytest.mark.parametrize(("old", "new"), pairs("Settings").items())
def test_the_successor_of_a_setting_exists(old: str, new: str) -> None:
    assert all(map(setting_exists, new.split("`, `"))) and not setting_exists(old)


def test_no_setting_is_missing() -> None:
    assert missing(SETTINGS, pairs("Settings"), filter(setting_exists, SETTINGS)) == []


def test_the_successors_of_parameters_exist_and_none_is_missing() -> None:
    known, successors = parameter_keys(), pairs("Parameters of algorithms")
    old = {key.removeprefix("row."): new.removeprefix("algorithm.") for key, new in successors.items()}
    assert old.pop("any other `row.X") == "X"
    assert set(old.values()) <= known and not old.keys() & known
    assert missing(PARAMETERS, old, known) == []


def test_the_renamed_values_of_parameters_are_accepted() -> None:
    _, values = tables(RENAMED, "Parameters of algorithms")
    for key, before, now in [[cell.strip("`") for cell in row] for row in values]:
        name, (_, *path) = key.rsplit(".", 1)[-1], key.split(".")
        classes = [Algorithm] if len(path) == 1 else choices(ALGORITHMS["grpo"], path[0]).values()
        allowed = [str(one.model_fields[name].annotation) for one in classes if name in one.model_fields]
        assert any(f"'{now}'" in text for text in allowed) and not any(f"'{before}'" in text for text in allowed)


@pytest.mark.parametrize(("old", "new"), pairs("Python").items())
def test_the_successor_of_a_python_name_can_be_imported(old: str, new: str) -> None:
    resolve_name(new)


def test_no_exported_name_is_missing() -> None:
    successors = pairs("Python")
    for module, names in EXPORTED.items():
        for name in names.split():
            assert f"{module}.{name}" in successors or resolve_name(f"{module}.{name}"), name


def test_renamed_fields_exist() -> None:
    for owner, before, now in [[cell.strip("`") for cell in row] for row in list(tables(RENAMED, "Python"))[1]]:
        resolve_name(f"{owner}.{now}")
        with pytest.raises(AttributeError):
            resolve_name(f"{owner}.{before}")


def test_modules_and_documents_exist() -> None:
    for _, after in list(tables(RENAMED, "Python"))[2]:
        for path in re.findall(r"`(\S+?)`", after):
            assert (ROOT / path).exists(), path


def test_metrics_are_recorded_by_their_new_names_and_none_is_missing() -> None:
    recorded = strings("trainer/report.py", "training/*metrics.py", "training/loop.py", "algorithms/algorithm.py")
    successors = pairs("Metrics")
    assert set(successors.values()) <= recorded and not successors.keys() & recorded
    assert missing(METRICS, successors, recorded) == []


def test_keys_of_json_output_exist() -> None:
    source = {"tasksets": "commands/tasksets.py", "algorithms": "commands/algorithms.py"}
    fields = {"check": ("training.check.CheckReport", "training.check.SolutionCount")}
    fields["verify"] = ("store.verification.VerificationReport",)
    (rows,) = tables(RENAMED, "JSON output")
    for command, _, now in [[cell.strip("`") for cell in row] for row in rows]:
        known = strings(source.get(command, f"commands/{command}.py"))
        for name in fields.get(command, ()):
            known |= set(annotations_of(resolve_name(f"agent_r1.{name}")))  # type: ignore[arg-type]
        assert now in known, (command, now)


def test_files_of_a_run_have_their_new_names() -> None:
    written = strings("training/checkpoint/files.py")
    for old, new in pairs("Files of a run").items():
        assert new.removesuffix("-step-K") in written and old.removesuffix("-step-K") not in written


def test_tables_and_columns_of_the_database_exist() -> None:
    database = sqlite3.connect(":memory:")
    database.executescript(TABLES)
    written = strings("store/*.py", "training/**/*.py")
    for old, new in pairs("Database of a run").items():
        if old.startswith("event "):
            assert new in written
        else:
            table, _, column = new.partition(".")
            database.execute(f"SELECT {column or '*'} FROM {table}")


def test_a_name_without_a_successor_is_found() -> None:
    text = "\n#### Settings\n\n| first version | now |\n|---|---|\n| `task` | `tasksets` |\n"
    successors = pairs("Settings", text)
    assert successors == {"task": "tasksets"} and not setting_exists("tasksets")
    assert missing(["task", "view.rule", "seed"], successors, ["seed"]) == ["view.rule"]
    with pytest.raises(AttributeError):
        resolve_name("agent_r1.envs.ToolEnvs")
    with pytest.raises(AttributeError):
        resolve_name("agent_r1.core.Group.serial")
