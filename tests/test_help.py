"""Help, version and shell completion of the command line."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from agent_r1.cli import cli, main
from agent_r1.config import iter_fields
from agent_r1.training.config import TrainConfig


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("", *cli.commands):
        assert main([*command.split(), "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: agent-r1 {command}".strip())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"agent-r1, version {version('agent-r1')}\n"


def test_help_shows_the_common_settings_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for key, _ in iter_fields(TrainConfig):
        assert f" --{key}" in shown, key
    assert main(["train", "--help"]) == 0
    common = capsys.readouterr().out
    assert "--steps INT" in common and "--trainer.betas" not in common


def test_help_does_not_import_torch() -> None:
    program = "import sys\nfrom agent_r1.cli import main\nmain(['train', '--help'])\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("agent-r1 tra", "train"), ("agent-r1 train --trainer.lear", "--trainer.learning_rate")],
)
def test_commands_and_options_are_completed(typed: str, offered: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_AGENT_R1_COMPLETE": "bash_complete"}
    command = [sys.executable, "-c", "from agent_r1.cli import enter; enter()"]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, encoding="utf-8")
    assert f"plain,{offered}" in done.stdout.splitlines(), done.stderr
