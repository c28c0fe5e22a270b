"""Installation: what `make` prints, and the one line on a system that is not supported."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make(*arguments: str) -> list[str]:
    """The lines that make prints, also when these tests are themselves run by make (which would report directories)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True, env=environment
    ).stdout.splitlines()


def test_the_demo_ends_with_how_to_call_the_command() -> None:
    assert "source .venv/bin/activate" in make("demo")[-1]


def test_torch_is_installed_first_and_from_the_index_of_cpu_builds_if_that_answers() -> None:
    installs = [line for line in make("--always-make", "install") if "pip install" in line]
    assert "download.pytorch.org/whl/cpu" in installs[0] and "^torch==" in installs[0]
    assert "requirements.lock" in installs[1] and "download.pytorch.org" not in installs[1]


def test_on_windows_one_line_names_the_systems_that_are_supported() -> None:
    line = "agent-r1: Agent-R1 runs on Linux and macOS; on Windows, use it in"
    code = "import sys; sys.platform = 'win32'; sys.argv = ['agent-r1', '--help']; import agent_r1.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.returncode == 1 and done.stderr.startswith(line) and done.stderr.count("\n") == 1


def test_every_file_that_is_no_module_is_listed_as_data_of_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"]
    listed = {
        path
        for package, globs in data.items()
        for glob in globs
        for path in (ROOT / package.replace(".", "/")).glob(glob)
    }
    files = {path for path in (ROOT / "agent_r1").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files if path.suffix != ".py"} == listed
