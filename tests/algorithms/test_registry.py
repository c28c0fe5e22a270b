"""An algorithm is chosen by name or file, its components by name, and its parameters below them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.algorithms.advantages.groups import GroupRelative
from agent_r1.algorithms.algorithm import objective
from agent_r1.algorithms.loss_terms import Correction, Kl
from agent_r1.algorithms.policy_losses import Cispo, Clip
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import as_algorithm, build_algorithm, parameters
from agent_r1.core.errors import InvalidInput

FILE = """
from agent_r1.algorithms.advantages.groups import GroupRelative
from typing import Literal
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.policy_losses import Clip

class Doubled(GroupRelative):
    name: Literal["doubled"] = "doubled"

    @property
    def formula(self):
        return "twice as much"

MINE = Algorithm(name="mine", advantage=Doubled(baseline="leave_one_out"), loss=Clip(clip_high=0.3))
BROKEN = Algorithm(name="broken", advantage=GroupRelative(), aggregation="constant")

class Nameless(GroupRelative):
    pass

NAMELESS = Algorithm(name="nameless", advantage=Nameless())
"""


def refusal(name: str, settings: dict[str, object]) -> str:
    with pytest.raises(InvalidInput) as caught:
        build_algorithm(name, settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_settings_a_preset_is_unchanged() -> None:
    for name, preset in ALGORITHMS.items():
        assert build_algorithm(name, {}) == preset and preset.name == name


def test_a_parameter_is_set_in_its_component() -> None:
    algorithm = build_algorithm(
        "dapo", {"loss.clip_high": 0.3, "advantage.epsilon": 0.1, "epochs": 4, "filters.overlong": False}
    )
    assert algorithm.loss == Clip(clip_high=0.3, dual_clip=None)  # the rest keeps the preset's values, not the class's
    assert algorithm.advantage == GroupRelative(scale="std", epsilon=0.1)
    assert (algorithm.epochs, algorithm.filters.overlong) == (4, False)
    assert algorithm.constant_groups == ALGORITHMS["dapo"].constant_groups == "drop"


def test_a_component_is_exchanged_by_its_name_in_any_order() -> None:
    settings = {"loss": "cispo", "loss.clip_high": 3.0}
    for given in (settings, dict(reversed(settings.items()))):
        assert build_algorithm("grpo", given).loss == Cispo(clip_high=3.0)
    assert build_algorithm("grpo", {"advantage": "whitened_group"}).advantage.name == "whitened_group"
    assert ALGORITHMS["grpo"].loss == Clip()  # the preset itself is unchanged


def test_a_parameter_adds_an_optional_component_and_none_removes_it() -> None:
    algorithm = build_algorithm("grpo", {"kl.coefficient": 0.01, "correction.high": 3.0})
    assert (algorithm.kl, algorithm.correction) == (Kl(coefficient=0.01), Correction(high=3.0))
    assert ALGORITHMS["grpo"].kl is ALGORITHMS["grpo"].correction is None
    assert "reference" in algorithm.needs and "reference" not in ALGORITHMS["grpo"].needs
    for nothing in ("none", None):
        assert build_algorithm("reinforce++", {"kl": nothing}).kl is None


def test_none_removes_an_optional_number_unless_it_is_a_value_itself() -> None:
    assert build_algorithm("grpo", {"loss.dual_clip": "none"}).loss == Clip(dual_clip=None)
    assert build_algorithm("rft", {"filters.success": "none"}).filters.success is None
    assert build_algorithm("grpo", {"advantage.scale": "none"}).advantage == GroupRelative(scale="none")


def test_the_parameters_of_an_algorithm_can_be_set_again() -> None:
    for name, preset in ALGORITHMS.items():
        listed = parameters(preset)
        assert build_algorithm(name, listed) == preset
        assert not any(key in ("name", "paper", "deviations") for key in listed)
        for other in ("grpo", "ppo"):  # upon another preset only its name remains
            moved = build_algorithm(other, listed)
            assert (parameters(moved), objective(moved)) == (listed, objective(preset))


def test_a_stored_algorithm_is_built_again_whatever_its_name() -> None:
    for preset in ALGORITHMS.values():
        own = preset.model_copy(update={"name": "own", "deviations": "mine"})
        for algorithm in (preset, own):
            assert as_algorithm(algorithm.model_dump(mode="json"), "grpo") == algorithm
    assert as_algorithm(own, "grpo") is own
    assert as_algorithm({"epochs": 2}, "ppo").name == "ppo"
    assert "got own; there are: grpo" in refusal("own", {"advantage": "whitened_group"})


def test_nested_settings_are_those_with_dotted_keys() -> None:
    nested = {"loss": {"name": "cispo", "clip_high": 3}, "kl": {"coefficient": 0.1}, "correction": None}
    flat = {"loss": "cispo", "loss.clip_high": 3, "kl.coefficient": 0.1, "correction": "none"}
    assert build_algorithm("grpo", nested) == build_algorithm("grpo", flat)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("grppo", {}, "algorithm: got grppo; did you mean 'grpo'? there are: grpo, ppo"),
        (
            "grpo",
            {"entropi": 1},
            "algorithm.entropi: got no parameter of this name; did you mean 'algorithm.entropy_coef'?",
        ),
        ("grpo", {"high": 0.3}, "did you mean 'algorithm.loss.clip_high'? there are: advantage"),
        ("grpo", {"name": "x"}, "algorithm.name: got no parameter of this name"),
        (
            "grpo",
            {"loss.clip_hgih": 0.3},
            "algorithm.loss.clip_hgih: got no parameter of this name; did you mean 'algorithm.loss.clip_high'?",
        ),
        ("grpo", {"loss": "clp"}, "algorithm.loss: got clp; did you mean 'clip'? there are: clip, policy_gradient"),
        ("grpo", {"loss": "none"}, "algorithm.loss: got none; there are: clip"),
        ("grpo", {"kl": 0.1}, "algorithm.kl: got 0.1; set its parameters: algorithm.kl.coefficient"),
        ("grpo", {"epochs.x": 1}, "algorithm.epochs: got x below it; give it one value"),
        ("grpo", {"epochs": 0}, "algorithm.epochs: got 0; give another: Input should be greater than or equal to 1"),
        ("grpo", {"advantage.lam": 0.9}, "group_relative has no lam; these have it: token_gae, length_adaptive_gae"),
        ("grpo", {"loss": "gmpo"}, "algorithm grpo: got components that do not fit; loss gmpo is"),
    ],
)
def test_unknown_and_invalid_settings_are_refused_in_one_line(
    name: str, settings: dict[str, object], message: str
) -> None:
    assert message in refusal(name, settings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE, "utf-8")
    (tmp_path / "raises.py").write_text("1 / 0", "utf-8")
    (tmp_path / "empty.py").write_text("x = 1", "utf-8")
    return tmp_path / "mine.py"


def test_an_algorithm_of_a_file_is_named_by_the_file_and_its_components_can_be_used(file: Path) -> None:
    algorithm = build_algorithm(f"{file}:MINE", {"loss.clip_low": 0.1})
    assert (algorithm.name, algorithm.loss) == (f"{file}:MINE", Clip(clip_low=0.1, clip_high=0.3))
    assert "A = twice as much" in objective(algorithm)
    assert build_algorithm("grpo", {"advantage": "doubled"}).advantage.name == "doubled"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:MINE", "nowhere.py, which is not a file; give FILE.py:NAME of an Algorithm"),
        ("raises.py:MINE", "raises.py, which raised ZeroDivisionError: division by zero; fix the file"),
        ("mine.py:THEIRS", "name one of its algorithms: MINE, BROKEN"),
        ("empty.py:MINE", "define MINE = Algorithm(..) in it"),
        (
            "mine.py:BROKEN",
            "algorithm mine.py:BROKEN: got components that do not fit; length is given with aggregation 'constant'",
        ),
        ("mine.py:NAMELESS", "algorithm.advantage: got a component of class Nameless, which declares no name"),
        ("mine.py", "got mine.py without :NAME; name one of its algorithms: MINE, BROKEN"),
    ],
)
def test_a_file_without_the_algorithm_is_refused_with_the_reason(
    name: str, message: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert message in refusal(name, {})
