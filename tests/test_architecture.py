"""A room imports only the rooms it may see (DESIGN: Rooms), imports inside functions included; no cycles."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "agent_r1"
SEES = {
    "core": set(),
    "store": {"core"},
    "sandbox": {"core"},
    "tools": {"core", "sandbox"},
    "rewards": {"core", "tools", "sandbox"},
    "envs": {"core", "tools", "rewards", "sandbox"},
    "renderers": {"core"},
    "model": {"core"},
    "inference": {"core", "model"},
    "data": {"core"},
    "algorithms": {"core", "data"},
    "trackers": {"core"},
    "web": {"core"},
    "chat_api": {"core"},
    "trainer": {"core", "data", "algorithms", "model"},
    "rollout": {"core", "chat_api", "tools", "envs", "renderers"},
    "gateway": {"core", "rollout", "renderers", "web"},
    "reward_models": {"core", "chat_api", "config", "data", "model", "rewards", "store", "trainer"},
    "workers": {"core", "rollout", "store", "tools", "web"},
    "retrieval": {"core", "tools", "model", "config", "web"},
    "tasksets": {"core", "envs", "tools", "rewards", "retrieval", "sandbox", "config"},
    "training": {
        *("core", "store", "sandbox", "tools", "rewards", "envs", "renderers", "model", "inference", "data"),
        *("algorithms", "trainer", "rollout", "retrieval", "gateway", "tasksets", "config", "trackers"),
        *("reward_models", "workers", "chat_api"),
    },
    "export": {"core", "store", "model", "training"},
    "config": {"core"},
    "viewer": {"core", "store", "web"},
    "commands": {
        *("core", "store", "algorithms", "tasksets", "retrieval", "training", "viewer", "model", "export", "config"),
        *("reward_models", "workers"),
    },
    "cli": {"core", "commands", "config"},
    "__main__": {"cli"},
    "__init__": {"algorithms", "core", "envs", "rewards", "sandbox", "store", "tools", "training"},
}


def module_name(path, root=PACKAGE):
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree):
    """Every module that the syntax tree imports, wherever the import stands; type-checking imports too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def breaches(modules):
    """(module, what it imports and may not)."""
    for module, source in modules.items():
        here = room(module)
        for name in imported(ast.parse(source)):
            if name.split(".")[0] == "agent_r1" and name != "agent_r1":
                there = room(name)
                if there in SEES and there not in SEES[here] | {here}:
                    yield module, name


MODULES = {module_name(path): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_room_is_known():
    assert {room(module) for module in MODULES} <= set(SEES)


def test_rooms_import_only_rooms_they_see():
    assert list(breaches(MODULES)) == []


def test_environments_see_what_task_sets_see_and_the_package_does_not_see_them():
    for path in sorted((ROOT / "environments").rglob("*.py")):
        names = [name for name in imported(ast.parse(path.read_text("utf-8"))) if name.startswith("agent_r1.")]
        assert {room(name) for name in names} <= {*SEES["tasksets"], "tasksets"}, path
    for module, source in MODULES.items():
        assert not any(name.split(".")[0] == "environments" for name in imported(ast.parse(source))), module


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("agent_r1.core.x", "import agent_r1.envs"),
        ("agent_r1.rollout.x", "def f():\n    from agent_r1.trainer import updater"),
        ("agent_r1.trainer.x", "from agent_r1 import rollout"),
        ("agent_r1.tasksets.x", "from agent_r1.model.load import load_model"),
    ],
)
def test_a_breach_is_seen(module, source):
    assert list(breaches({module: source}))


def test_core_imports_only_the_standard_library():
    for module, source in MODULES.items():
        if room(module) == "core":
            outside = {name.split(".")[0] for name in imported(ast.parse(source))} - {"agent_r1"}
            assert outside <= set(sys.stdlib_module_names), module


def import_graph(modules):
    return {
        module: {name for name in imported(ast.parse(source)) if name in modules and name != module}
        for module, source in modules.items()
    }


def test_no_module_imports_itself_in_a_circle():
    TopologicalSorter(import_graph(MODULES)).prepare()


def test_a_circle_is_seen():
    circle = {"agent_r1.a": "import agent_r1.b", "agent_r1.b": "def f():\n    import agent_r1.a"}
    with pytest.raises(CycleError):
        TopologicalSorter(import_graph(circle)).prepare()


def test_the_package_and_the_command_line_load_neither_torch_nor_a_server():
    heavy = "('torch', 'transformers', 'starlette', 'ray')"
    code = f"import sys, agent_r1, agent_r1.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "[]"
