"""Installation: what `make` prints, what sdist and wheel contain, what the package imports, and an installed wheel.

The tests of the installed wheel run with INSTALLED_PYTHON, the Python of an environment with the wheel and nothing but
what it needs (make test-install).
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urljoin
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import agent_r1

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PINS = re.findall(r"^[^#\s].*$", (ROOT / "requirements.lock").read_text("utf-8"), re.M)
PYTHON = os.environ.get("INSTALLED_PYTHON", "")

needs_build = pytest.mark.skipif(find_spec("build") is None, reason="build is not installed (make install)")
needs_wheel = pytest.mark.skipif(not PYTHON, reason="INSTALLED_PYTHON names no Python (make test-install)")


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


# sdist and wheel


def copy_sources(to: Path) -> Path:
    """Copy what setuptools reads, without what earlier builds left in the tree (it would be packed again)."""
    to.mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    shutil.copytree(ROOT / "agent_r1", to / "agent_r1", ignore=shutil.ignore_patterns("__pycache__"))
    (to / "tests").mkdir()
    shutil.copy(__file__, to / "tests")
    return to


def build(source: Path, out: Path, *options: str) -> Path:
    """Build as `make dist` does, and return the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options, str(source)]
    done = subprocess.run(command, cwd=out.parent, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def files_in(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


@needs_build
def test_the_wheel_of_the_tree_and_of_the_sdist_hold_every_file_of_the_package(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    files = {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("agent_r1/**/*.*")}
    from_sdist = files_in(build(source, tmp_path / "dist"))
    assert from_sdist == files_in(build(source, tmp_path / "direct", "--wheel"))
    packed = {name: content for name, content in from_sdist.items() if name.startswith("agent_r1/")}
    assert packed == files and "agent_r1/py.typed" in packed
    information = f"agent_r1-{PROJECT['version']}.dist-info"
    assert from_sdist[f"{information}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"agent-r1 = agent_r1.cli:enter" in from_sdist[f"{information}/entry_points.txt"]
    with tarfile.open(tmp_path / "dist" / f"agent_r1-{PROJECT['version']}.tar.gz") as sdist:
        roots = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
    made = {"PKG-INFO", "setup.cfg", "agent_r1.egg-info"}
    assert roots == {"agent_r1", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", *made}


# What is declared, pinned and stated


def imports_outside(source: str) -> Iterator[tuple[str, str]]:
    """Yield the packages outside the standard library that a module imports, with the extra that an import names."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found = [name.name for name in names]
            case ast.ImportFrom(module=str(module), level=0):
                found = [module]
            case ast.Call(
                func=ast.Name(id="import_extra" | "require_extra"),
                args=[ast.Constant(value=str(module)), *rest],
                keywords=keywords,
            ):
                (extra,) = [*rest, *(keyword.value for keyword in keywords)]
                yield module.split(".")[0], extra.value if isinstance(extra, ast.Constant) else ""
                continue
            case _:
                continue
        for name in {name.split(".")[0] for name in found} - sys.stdlib_module_names - {"agent_r1"}:
            yield name, ""


installed_packages = cache(packages_distributions)  # from an import name to the packages that bring it


def undeclared(source: str) -> set[str]:
    everything = [*PROJECT["dependencies"], *(one for needed in EXTRAS.values() for one in needed)]
    declared = {canonicalize_name(Requirement(one).name) for one in everything}
    return {
        name
        for name, extra in imports_outside(source)
        # What an extra's own package brings (websockets of openenv-core) is covered by the name of that extra.
        if extra not in EXTRAS and not declared & set(map(canonicalize_name, installed_packages().get(name, [name])))
    }


def test_every_package_that_is_imported_is_a_dependency_or_in_an_extra() -> None:
    found = {path: undeclared(path.read_text("utf-8")) for path in sorted((ROOT / "agent_r1").rglob("*.py"))}
    assert {path.name: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source", ["import yaml", "def f():\n    from yaml import load", "import_extra('tqdm', extra='no-such-extra')"]
)
def test_a_package_that_is_not_declared_is_seen(source: str) -> None:
    assert len(undeclared(source)) == 1


def test_the_lock_pins_each_dependency_for_every_index() -> None:
    pins = {canonicalize_name(name): version for name, version in (pin.split("==") for pin in PINS)}
    assert len(pins) == len(PINS) and not any(set("+;@ ") & set(pin) for pin in PINS)
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_the_version_is_stated_once() -> None:
    version = PROJECT["version"]
    assert agent_r1.__version__ == version
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"**State: {version}," in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize(("tag", "accepted"), [(f"v{PROJECT['version']}", True), ("v9.9.9", False), ("v", False)])
def test_a_release_takes_no_tag_but_the_version(tag: str, accepted: bool) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
    runs = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "run" in step]
    done = subprocess.run(["bash", "-e", "-c", runs[0]], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag})
    assert (done.returncode == 0) is accepted
    assert all(make(*run.split()[1:]) for run in runs[1:])


# An installed wheel, called from an empty folder


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


def environment() -> Mapping[str, str]:
    """The variables of a user: no path into the tree, and none that pytest has set."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}


def call(program: str, *arguments: str, folder: Path) -> str:
    command = [str(Path(PYTHON).absolute().with_name(program)), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_wheel
def test_the_installed_package_is_used_and_needs_what_the_lock_pins_and_no_more(empty: Path) -> None:
    code = "import agent_r1; print(agent_r1.__file__, agent_r1.__version__)"
    file, version = call("python", "-c", code, folder=empty).split()
    assert file.startswith(f"{Path(PYTHON).absolute().parents[1]}/lib/") and version == PROJECT["version"]
    call("python", "-m", "pip", "check", folder=empty)
    listed = json.loads(call("python", "-m", "pip", "list", "--format", "json", folder=empty))
    installed = {f"{canonicalize_name(one['name'])}=={one['version'].partition('+')[0]}" for one in listed}
    pinned = {f"{canonicalize_name(name)}=={pin}" for name, pin in (pin.split("==") for pin in PINS)}
    # pip belongs to the environment, and the rest comes with a CUDA build of torch.
    others = {one for one in installed - pinned if not one.startswith(("pip==", "nvidia-", "cuda-", "triton=="))}
    assert others == {f"agent-r1=={version}"} and pinned <= installed


@needs_wheel
def test_every_module_is_imported_without_an_extra(empty: Path) -> None:
    code = """
import importlib, pkgutil, agent_r1
for found in pkgutil.walk_packages(agent_r1.__path__, "agent_r1."):
    try:
        if not found.name.endswith("__main__") and "sandbox.inside." not in found.name:  # the latter are programs
            importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        print(found.name, error.name)
"""
    missing = call("python", "-c", code, folder=empty).splitlines()
    assert missing == ["agent_r1.tasksets.math.verifier latex2sympy2_extended"]


@needs_wheel
def test_the_demo_is_trained_shown_verified_and_exported(empty: Path) -> None:
    assert "Train LLM agents" in call("agent-r1", "--help", folder=empty)
    assert call("agent-r1", "--version", folder=empty) == f"agent-r1, version {PROJECT['version']}\n"
    report = json.loads(call("agent-r1", "train", "--run", "demo", "--json", folder=empty).splitlines()[-1])
    assert report["table"]["trained"]["style-a"]["em"] >= 0.9
    assert "step 36 of 36" in call("agent-r1", "show", "demo", folder=empty)
    call("agent-r1", "verify", "demo", folder=empty)
    call("agent-r1", "export", "demo", "exported", folder=empty)
    assert "tiny-base" in (empty / "exported" / "README.md").read_text("utf-8")


@needs_wheel
def test_a_new_project_trains(empty: Path) -> None:
    call("agent-r1", "init", "towns", folder=empty)
    options = ["--config", "train.toml", "--steps", "2", "--run", "towns"]
    assert "base-tool-call" in call("agent-r1", "train", "agent.py", *options, folder=empty / "towns")


@needs_wheel
def test_the_viewer_serves_its_pages_and_files(empty: Path) -> None:
    command = [str(Path(PYTHON).absolute().with_name("agent-r1")), "view", "--port", "0"]
    viewer = subprocess.Popen(command, cwd=empty, stdout=subprocess.PIPE, encoding="utf-8", env=environment())
    assert viewer.stdout is not None
    try:
        address = next(found[0] for line in viewer.stdout if (found := re.findall(r"http://\S+", line)))
        browser = build_opener(HTTPCookieProcessor())  # the first answer sets a cookie
        page = browser.open(address).read().decode()
        style = browser.open(urljoin(address, "/static/style.css")).read()
    finally:
        viewer.terminate()
        viewer.wait(60)
    assert "demo" in page and style == (ROOT / "agent_r1" / "viewer" / "static" / "style.css").read_bytes()
