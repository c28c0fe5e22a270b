"""The command line: its output and exit codes. Bad input is reported in one line and leaves no file behind."""

import json
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agent_r1 import tool
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.cli import main
from agent_r1.store.reader import RunReader
from agent_r1.training.checkpoint_files import save_model
from research.tiny_base.tokenizer import make_tokenizer

AGENT = '''
from agent_r1 import Message, Task, ToolEnv, exact_match, tool
@tool
def double(number: int) -> str:
    """Double a number.

    Args:
        number: what to double."""
    return str(2 * number)
tasks = [Task(str(i), (Message.user(f"Double {i}"),), {"answers": (str(2 * i),)}) for i in range(5)]
env = ToolEnv(tools=[double], rewards=[exact_match])
'''
TINY = ["--groups_per_step", "2", "--group-size=2", "--max_tokens", "8", "--quiet"]


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> Ended:
        capfd.readouterr()
        code = main(arguments)
        return Ended(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    tokenizer = make_tokenizer(["Double a number", "what to double"])
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    config = Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads)
    return str(save_model(tmp_path_factory.mktemp("tiny"), Qwen3ForCausalLM(config), tokenizer))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT, "utf-8")
    return tmp_path


BAD_INPUT: dict[str, str] = {
    "": "Missing command; see agent-r1 --help",
    "trian": "command: got 'trian'; did you mean 'train'?",
    "train --stepz 5": "unknown option: got --stepz; did you mean '--steps'?",
    "train --trianer.weight-decay=5": "got --trianer.weight_decay; did you mean '--trainer.weight_decay'?",
    "eval --steps 3": "unknown option: got --steps",
    "tasksets --steps 3": "unknown option: got --steps; see agent-r1 tasksets --help",
    "train agent.py more.py": "unexpected extra argument (more.py)",
    "train --steps": "Option '--steps' requires an argument",
    "train --steps -1": "steps (command line): got -1; it should be greater than or equal to 1",
    "train --reward_weights.em x": "reward_weights.em (command line): got 'x'; it should be a valid number",
    "train --context_policy.keep_turns 3": "has no effect with the policy append: leave it out",
    "train --taskset tinywki": "taskset: got 'tinywki'; did you mean 'tinywiki'?",
    "train --config none.toml": "configuration file: got none.toml: No such file or directory",
    "train --config typo.toml": "unknown setting (typo.toml): got 'stpes'; did you mean 'steps'?",
    "train none.py": "got none.py, which is not a file",
    "train syntax.py": "syntax.py: got invalid syntax (line 2); fix the file",
    "train agent.py --data x.json": "--data: got it and agent.py; leave one out",
    "eval --taskset hotpotqa --data unanswered.json --model m": "unanswered.json",
    "train --resume": "resume: got no run; name the run to continue, as --run NAME",
    "train --resume --run nothing": "resume: got runs/nothing, which holds no run; leave resume out to start one",
    "verify nothing": "run: got nothing, but there is no folder runs/nothing; give the name of a run in runs/",
    "eval empty": "FILE.py: got empty, which is not a file; give --model empty to use a run or a model",
    "train tinywiki": "FILE.py: got tinywiki, which is not a file; give --taskset tinywiki, or a Python file",
    "train --device tpu": "got 'tpu'; give another: Device of the model: auto (a GPU if there is one), cpu",
    "train --config table.toml": "unknown setting (table.toml): got 'trainer'; it is a table: give its settings",
    "train --config value.toml": "algorithm.epochs (value.toml): got -1; give another: Input should be greater",
    "check agent.py": "solutions of agent: got none; add some",
    "check tinywiki --n -1": "Invalid value for '--n': -1 is not in the range x>=0; see agent-r1 check --help",
    "play tinywiki --split style-a --number 400": "--number: got 400; give one below 400",
    "--completion powershell": "'powershell' is not one of 'bash', 'zsh', 'fish'",
}


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(line: str, run, here: Path) -> None:
    (here / "typo.toml").write_text("stpes = 3", "utf-8")
    (here / "table.toml").write_text("trainer = 3", "utf-8")
    (here / "value.toml").write_text("[algorithm]\nepochs = -1", "utf-8")
    (here / "empty").mkdir()
    (here / "syntax.py").write_text("x = 1\ny = = 2", "utf-8")
    (here / "unanswered.json").write_text('[{"question": "Who?", "context": [], "supporting_facts": []}]', "utf-8")
    before = sorted(here.rglob("*"))
    ended = run(*line.split())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("agent-r1: ") and ended.err.count("\n") == 1
    assert BAD_INPUT[line] in ended.err
    assert [path for path in sorted(here.rglob("*")) if "__pycache__" not in path.parts] == before


LATE_BAD_INPUT: dict[str, str] = {
    "--model ./none": "./none",
    "--model MODEL --algorithm grppo": "algorithm (command line): got grppo; did you mean 'grpo'?",
    "--model MODEL --algorithm.loss.clip_hihg 0.3": "did you mean 'algorithm.loss.clip_high'?",
    "--model MODEL --context 4": "a prompt of",
    "--model MODEL --run there": "which exists; give another --run",
    "--model MODEL --run agent.py/x": "give a --run in a folder that can be written",
}


@pytest.mark.parametrize("line", LATE_BAD_INPUT)
def test_bad_input_that_is_found_with_the_model_is_one_line_too(line: str, run, here: Path, model: str) -> None:
    (here / "empty").mkdir()
    (here / "runs" / "there").mkdir(parents=True)
    before = sorted(path for path in here.rglob("*"))
    ended = run("train", "agent.py", *line.replace("MODEL", model).split())
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
    assert LATE_BAD_INPUT[line] in ended.err
    assert [path for path in sorted(here.rglob("*")) if "__pycache__" not in path.parts] == before


WITHOUT_TORCH = [
    *("--help", "train --help", "--completion bash", "tasksets", "check agent.py", "verify nothing"),
    *("train --stepz 3", "train --steps -1", "train --taskset nope", "train x.py"),
]


def test_torch_is_not_imported_without_need(here: Path) -> None:
    # One process for all commands: each would start Python anew.
    program = "import sys; from agent_r1.cli import main"
    checks = "".join(f"\nmain({line.split()}); assert 'torch' not in sys.modules, {line!r}" for line in WITHOUT_TORCH)
    done = subprocess.run([sys.executable, "-c", program + checks], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


def test_the_package_is_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent_r1", "train", "--stepz", "3"], capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 2 and done.stderr.startswith("agent-r1: ") and "--steps" in done.stderr


def test_hyphens_in_options_are_underscores(run, here: Path) -> None:
    assert "trainer.learning_rate (command line): got -1" in run("train", "--trainer.learning-rate=-1").err


def test_task_sets_are_listed(run) -> None:
    assert run("tasksets").out.startswith("tinywiki ")
    assert "hotpotqa" in run("tasksets", "--json").data["tasksets"]


SOLUTIONS = """
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, script
def solutions(task):
    right, wrong = (
        ReferenceSolution("text", script(Message.assistant(f"<answer>{text}</answer>"))) for text in TEXTS
    )
    return ReferenceSolutions((right,), (wrong,), {"exact_match": 1.0})
"""


@pytest.mark.parametrize(("texts", "code", "passed"), [('task.data["answers"][0], "x"', 0, 5), ('"x", "y"', 1, 0)])
def test_a_task_set_of_a_file_is_checked(texts: str, code: int, passed: int, run, here: Path) -> None:
    (here / "agent.py").write_text(AGENT + SOLUTIONS.replace("TEXTS", f"({texts})"), "utf-8")
    ended = run("check", "agent.py", "--json", "--quiet")
    assert (ended.code, ended.data["passed"], ended.data["gold"]) == (code, code == 0, {"played": 5, "passed": passed})
    assert ended.data["wrong"] == {"played": 5, "passed": 5} and len(ended.data["failures"]) == 5 - passed
    shown = run("check", "agent.py", "--quiet")
    assert ("0, text: gold, but earned exact_match 0 of 1" in shown.out) == (code == 1)
    assert len(shown.err.splitlines()) == code


def test_algorithms_are_shown_with_objective_and_parameters(run) -> None:
    listed = run("algorithms", "--json").data["algorithms"]
    assert set(listed) == set(ALGORITHMS)
    assert {"objective", "paper", "deviations", "parameters"} == set(listed["dapo"])
    assert all(name in run("algorithms").out for name in ALGORITHMS)
    one = run("algorithms", "grpo", "--json").data["algorithms"]["grpo"]
    assert one == listed["grpo"]
    assert one["parameters"]["loss.clip_low"] == 0.2 and "clip(r, 0.8, 1.2)" in one["objective"]
    assert "--algorithm.loss.clip_low" in run("algorithms", "grpo").out
    assert "did you mean 'grpo'" in run("algorithms", "grppo").err


def test_the_listed_parameters_can_be_typed(run, model: str) -> None:
    listed = run("algorithms", "dapo", "--json").data["algorithms"]["dapo"]["parameters"]
    typed = [word for key, value in listed.items() for word in (f"--algorithm.{key}", str(value))]
    quick = ["--model", model, "--steps", "1", "--run", "demo", "--trainer.minibatches", "2", *TINY]
    ended = run("train", "agent.py", "--algorithm", "grpo", *typed, *quick)
    assert ended.code == 0, ended.err
    typed[typed.index("--algorithm.loss.clip_high") + 1] = "-1"  # control: they have an effect
    ended = run("train", "agent.py", *typed, *quick, "--run", "other")
    assert (ended.code, "algorithm.loss.clip_high (command line): got -1" in ended.err) == (2, True)


def test_an_agent_trains_from_a_file(run, here: Path, model: str) -> None:
    (here / "a.toml").write_text("steps = 7\n[trainer]\nlearning_rate = 0.5\nmax_grad_norm = 2\n", "utf-8")
    settings = ["--model", model, "--config", "a.toml", "--steps", "2", "--trainer.learning_rate=1e-3", "--run", "demo"]
    ended = run("train", "agent.py", *settings, *TINY, "--json")
    assert ended.code == 0, ended.err
    assert (ended.data["run"], ended.data["steps"]) == ("runs/demo", 2) and ended.data["train_seconds"] > 0
    assert set(ended.data["table"]) == {"base-tool-call", "trained"}
    assert set(ended.data["table"]["trained"]["train"]) == {"em", "f1", "n", "low", "high"}
    with closing(RunReader(here / "runs" / "demo")) as reader:
        config = reader.config()
        started = {event.attempt for event in reader.attempts()}
        assert len(started) == 2 * 2 * 2
        assert {trajectory.attempt for trajectory in reader.trajectories()} == started
        assert {fate.attempt for fate in reader.fates()} == started
        assert [measured.step for measured in reader.metrics()] == [1, 2]
    assert (config["taskset"], config["steps"], config["group_size"]) == ("agent", 2, 2)
    assert (config["trainer"]["learning_rate"], config["trainer"]["max_grad_norm"]) == (1e-3, 2.0)
    assert AutoModelForCausalLM.from_pretrained(here / "runs" / "demo" / "model") is not None
    _proves_itself(run, here / "runs" / "demo")


def test_a_dry_run_shows_memory_and_settings_and_starts_nothing(run, here: Path, model: str) -> None:
    before = sorted(here.rglob("*"))
    dry = ["train", "agent.py", "--dry_run", "--model", model, "--group_size", "2", "--algorithm.loss", "cispo"]
    ended = run(*dry, "--json")
    assert ended.code == 0 and ended.data["memory"]["bytes"] > 0, ended.err
    assert ended.data["settings"]["group_size"] == 2 and ended.data["settings"]["algorithm.loss.name"] == "cispo"
    assert "steps" not in ended.data["settings"] and "KV cache" in run(*dry).out
    assert run(*dry, "--context", "4").code == 2
    assert [path for path in sorted(here.rglob("*")) if "__pycache__" not in path.parts] == before


def _proves_itself(run, folder: Path) -> None:
    ended = run("verify", folder.name)
    assert ended.code == 0 and ended.out.startswith("The run is valid.") and "pending" in ended.out
    proved = run("verify", folder.name, "--digest", "--json")
    assert proved.data["valid"] and sum(proved.data["attempts"].values()) == 8
    assert run("verify", str(folder), "--digest").out.strip() == proved.data["digest"]
    with (folder / "model" / "model.safetensors").open("r+b") as file:
        file.write(b"\0")
    broken = run("verify", folder.name, "--digest", "--json")
    assert broken.code == 1 and not broken.data["valid"] and broken.data["digest"] is None
    assert broken.err.count("\n") == 1 and "1 rules are violated" in broken.err
    assert run("verify", folder.name).out.startswith("model: ") and broken.data["violations"][0].endswith("changed")


def test_a_run_is_evaluated_on_the_task_set_it_was_trained_on(run, here: Path, model: str) -> None:
    context = [["Alba", ["Alba is ruled by Bruno."]], ["Bruno", ["Bruno lives in Caro."]]]
    row = {"answer": "Bruno", "context": context, "supporting_facts": [["Alba", 0]], "type": "bridge", "level": "easy"}
    rows = [{**row, "_id": str(number), "question": f"Who rules Alba in {number}?"} for number in range(40)]
    (here / "questions.json").write_text(json.dumps(rows), "utf-8")
    taskset = ["--taskset", "hotpotqa", "--data", "questions.json"]
    trained = run("train", *taskset, "--model", model, "--steps", "1", "--run", "demo", "--evaluate_n", "2", *TINY)
    assert trained.code == 0, trained.err
    assert "runs/demo" in trained.out
    ended = run("eval", "--model", "demo", "--evaluate_n", "3", "--methods", "naive-rag,trained", "--json")
    assert ended.code == 0, ended.err
    assert {method: row["test"]["n"] for method, row in ended.data["table"].items()} == {"naive-rag": 3, "trained": 3}
    assert ended.data["retrieval"]["test"]["recall@5"] == 1.0
    assert "'nobody'" in run("eval", "--model", "demo", "--methods", "nobody").err


def test_a_run_is_resumed_with_its_own_settings(run, here: Path, model: str) -> None:
    begun = run("train", "agent.py", "--model", model, "--steps", "2", "--run", "demo", *TINY)
    assert begun.code == 0, begun.err
    resuming = ["train", "agent.py", "--run", "demo", "--resume", "--quiet"]
    for more, message in (
        ([], "resume: got runs/demo, which is complete: it took its 2 steps; give more --steps to continue"),
        (["--seed", "4"], "seed: got 4; leave it out: runs/demo continues with 0"),
        (["--algorithm.epochs", "2"], "algorithm.epochs: got 2; leave it out: runs/demo continues with 1"),
        (["--steps", "1"], "steps: got 1; give at least the 2 that runs/demo took"),
    ):
        refused = run(*resuming, *more)
        assert (refused.code, refused.err.count("\n")) == (2, 1) and message in refused.err
    again = run("train", "agent.py", "--model", model, "--run", "demo", "--quiet")
    assert again.code == 2 and "which exists; give another --run, or --resume to continue this one" in again.err
    fileless = run(*[word for word in resuming if word != "agent.py"], "--steps", "3")
    line = "FILE.py: got none; give the file that the run was started with, agent.py, which defines 'agent'"
    assert fileless.code == 2 and line in fileless.err
    assert line in run("eval", "--model", "demo").err and line in run("chat", "demo").err
    assert "'agent-r1 eval agent.py --model demo' gives its table again" in run(*resuming).err
    ended = run(*resuming, "--steps", "3", "--monitor.patience", "9", "--json")  # its random model may earn nothing
    assert ended.code == 0 and (ended.data["run"], ended.data["steps"]) == ("runs/demo", 3), ended.err
    proved = run("verify", "demo", "--json").data
    assert proved["valid"] and (proved["segments"], proved["steps"]) == (2, 3)


@tool
def double(number: int) -> str:
    """Double a number.

    Args:
        number: what to double.
    """
    return str(2 * number)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("train", "--epochs", "3"), "--epochs; give --steps"),
        (("train", "--batch_size", "8"), "--batch_size; give --groups_per_step and --group_size"),
        (("train", "--num_generations", "8"), "--num_generations; give --group_size"),
        (("eval", "--n", "8"), "--n; give --evaluate_n"),
        (("train", "--algorithm", "GRPO"), "did you mean 'grpo'?"),
        (
            ("train", "--model", "https://user:pw@api.example.com/v1"),
            "an address; give a Hugging Face name or a folder",
        ),
    ],
)
def test_names_of_other_frameworks_are_answered_with_ours(
    arguments: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert meant in error and error.count("\n") == 1 and "pw" not in error
