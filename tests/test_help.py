"""Help, version and shell completion of the command line."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest

from agent_r1.cli import cli, main
from agent_r1.config import iter_fields
from agent_r1.training.config import TrainConfig

Show = Callable[..., str]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """``show("train", "--help")`` returns the output of ``agent-r1 train --help``."""

    def call(*arguments: str) -> str:
        assert main(arguments) == 0
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("command", ["", *cli.commands])
def test_every_command_has_help(command: str, show: Show) -> None:
    assert show(*command.split(), "--help").startswith(f"Usage: agent-r1 {command}".strip())


def test_help_shows_the_common_settings_and_help_all_every_one(show: Show) -> None:
    shown = " ".join(show("train", "--help-all").split())
    for key, field in iter_fields(TrainConfig):
        assert f" --{key}" in shown and field.description, key
    assert "--steps INT Optimizer steps. [default: 200; >= 1]" in shown
    assert "--trainer.betas FLOAT,FLOAT" in shown and "[default: 0.9,0.95]" in shown
    assert "--engine.dtype float32|bfloat16" in shown and "--reward_weights.NAME FLOAT" in shown
    common = show("train", "--help")
    assert "--algorithm.KEY VALUE" in common and "--steps INT" in common and "--trainer.betas" not in common


def test_help_does_not_import_torch() -> None:
    program = "import sys\nfrom agent_r1.cli import main\nmain(['train', '--help'])\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_the_version_is_that_of_the_package(show: Show) -> None:
    assert show("--version") == f"agent-r1, version {version('agent-r1')}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_a_shell_is_printed(shell: str, show: Show) -> None:
    assert "_AGENT_R1_COMPLETE" in show("--completion", shell)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("agent-r1 tra", "train"),
        ("agent-r1 train --trainer.lear", "--trainer.learning_rate"),
        ("agent-r1 train --trainer.dtype bf", "bfloat16"),
    ],
)
def test_commands_options_and_values_are_completed(typed: str, offered: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_AGENT_R1_COMPLETE": "bash_complete"}
    command = [sys.executable, "-c", "from agent_r1.cli import enter; enter()"]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True)
    assert f"plain,{offered}" in done.stdout.splitlines(), done.stderr
