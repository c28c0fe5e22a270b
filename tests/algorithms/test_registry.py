"""An algorithm is chosen by name or file, its parts are exchanged by kind, its numbers set below them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.algorithms.advantages.groups import GroupRelative
from agent_r1.algorithms.loss_terms import Correction, Kl
from agent_r1.algorithms.objective import objective
from agent_r1.algorithms.policy_losses import Cispo, Clip
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_row, terms
from agent_r1.core.errors import InvalidInput

FILE = """
from agent_r1.algorithms.advantages.groups import GroupRelative
from agent_r1.algorithms.algorithm import Row
from agent_r1.algorithms.policy_losses import Clip

class Doubled(GroupRelative):
    kind = "doubled"

    @property
    def formula(self):
        return "twice as much"

MINE = Row(name="mine", advantage=Doubled(baseline="others"), surrogate=Clip(high=0.3))
BROKEN = Row(name="broken", advantage=GroupRelative(), aggregation="constant")
NUMBER = 3
"""


def refusal(name: str, settings: dict[str, object]) -> str:
    with pytest.raises(InvalidInput) as caught:
        build_row(name, settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_settings_a_row_is_as_it_stands() -> None:
    for name, row in ALGORITHMS.items():
        assert build_row(name, {}) == row and row.name == name


def test_a_number_is_set_in_the_part_it_belongs_to() -> None:
    row = build_row("dapo", {"surrogate.high": 0.3, "advantage.epsilon": 0.1, "epochs": 4, "filters.overlong": False})
    assert row.surrogate == Clip(high=0.3, dual=None)  # what was not named stays the row's, not the class's
    assert row.advantage == GroupRelative(scale="deviation", epsilon=0.1)
    assert (row.epochs, row.filters.overlong) == (4, False)
    assert row.filters.zero_variance == ALGORITHMS["dapo"].filters.zero_variance


def test_a_part_is_exchanged_by_naming_its_kind_in_whatever_order() -> None:
    settings = {"surrogate": "cispo", "surrogate.high": 3.0}
    for given in (settings, dict(reversed(settings.items()))):
        assert build_row("grpo", given).surrogate == Cispo(high=3.0)
    assert build_row("grpo", {"advantage": "whitened_group"}).advantage.kind == "whitened_group"
    assert ALGORITHMS["grpo"].surrogate == Clip()  # the row itself stays


def test_a_number_switches_an_optional_part_on_and_none_takes_it_away() -> None:
    row = build_row("grpo", {"kl.coefficient": 0.01, "correction.high": 3.0})
    assert (row.kl, row.correction) == (Kl(coefficient=0.01), Correction(high=3.0))
    assert ALGORITHMS["grpo"].kl is ALGORITHMS["grpo"].correction is None
    assert "reference" in row.needs and "reference" not in ALGORITHMS["grpo"].needs
    for nothing in ("none", None):
        assert build_row("reinforce++", {"kl": nothing}).kl is None


def test_none_takes_an_optional_number_away_and_is_left_where_it_is_a_word() -> None:
    assert build_row("grpo", {"surrogate.dual": "none"}).surrogate == Clip(dual=None)
    assert build_row("grpo", {"filters.zero_variance": "none"}).filters.zero_variance is None
    assert build_row("grpo", {"advantage.scale": "none"}).advantage == GroupRelative(scale="none")


def test_what_terms_tell_can_be_set_again_word_for_word() -> None:
    for name, row in ALGORITHMS.items():
        told = dict(terms(row))
        assert build_row(name, told) == row
        assert not any(key in ("name", "paper", "differs") for key in told)
        for other in ("grpo", "ppo"):  # also upon another row: then only the name is that of the other
            moved = build_row(other, told)
            assert (dict(terms(moved)), objective(moved)) == (told, objective(row))


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("gpro", {}, "algorithm: got gpro; did you mean grpo? there are: grpo, ppo"),
        ("", {}, "a row of yours as FILE.py:NAME"),
        ("grpo", {"entropi": 1}, "row.entropi: got no such term; did you mean entropy?"),
        ("grpo", {"high": 0.3}, "row.high: got no such term; did you mean surrogate.high? there are: advantage"),
        ("grpo", {"clip_high": 0.3}, "did you mean surrogate.high?"),
        ("grpo", {"name": "x"}, "row.name: got no such term"),
        ("grpo", {"surrogate.hgih": 0.3}, "row.surrogate.hgih: got no such term; did you mean high?"),
        ("grpo", {"kl.coeficient": 0.3}, "row.kl.coeficient: got no such term; did you mean coefficient?"),
        ("grpo", {"surrogate": "clp"}, "row.surrogate: got clp; did you mean clip? there are: clip, policy_gradient"),
        ("grpo", {"surrogate": "none"}, "row.surrogate: got none; did you mean"),
        ("grpo", {"kl": 0.1}, "row.kl: got 0.1; set what is below it: row.kl.coefficient"),
        ("grpo", {"masks": "off"}, "row.masks: got off; set what is below it: row.masks.advantage, row.masks.loss"),
        ("grpo", {"epochs.x": 1}, "row.epochs: got x below it; give it one value"),
        ("grpo", {"epochs": 0}, "row.epochs: got 0; give another: Input should be greater than or equal to 1"),
        ("grpo", {"epochs": "many"}, "row.epochs: got many"),
        ("grpo", {"surrogate.low": float("nan")}, "row.surrogate.low: got nan"),
        ("ppo", {"advantage.gamma": 1.5}, "row.advantage.gamma: got 1.5"),
        ("grpo", {"aggregation": "mean"}, "row.aggregation: got mean"),
        ("grpo", {"advantage.gamma": 0.9}, "group_relative has no gamma; there is one in token_gae"),
        ("grpo", {"advantage.lam": 0.9}, "group_relative has no lam; there is one in token_gae, length_adaptive_gae"),
        ("grpo", {"advantage.lam": 0.9}, "which have a critic; group_relative has none"),
        ("grpo", {"surrogate": "gmpo"}, "algorithm grpo: got parts that do not fit; surrogate gmpo is made for"),
    ],
)
def test_what_is_not_known_or_not_possible_is_refused_in_one_line(
    name: str, settings: dict[str, object], says: str
) -> None:
    assert says in refusal(name, settings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "raises.py").write_text("1 / 0")
    (tmp_path / "syntax.py").write_text("x = = 1")
    (tmp_path / "empty.py").write_text("x = 1")
    return tmp_path / "mine.py"


def test_a_row_of_a_file_is_built_like_any_other_and_its_parts_can_be_named(file: Path) -> None:
    row = build_row(f"{file}:MINE", {"surrogate.low": 0.1})
    assert (row.name, row.surrogate) == ("mine", Clip(low=0.1, high=0.3))
    assert "A = twice as much" in objective(row)
    assert build_row("grpo", {"advantage": "doubled"}).advantage.kind == "doubled"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:MINE", "nowhere.py, which is not a file; give FILE.py:NAME of a Row"),
        ("raises.py:MINE", "raises.py, which raised ZeroDivisionError: division by zero; mend it"),
        ("syntax.py:MINE", "syntax.py, which raised SyntaxError"),
        ("mine.py:THEIRS", "THEIRS, which is no Row of"),
        ("mine.py:THEIRS", "name one of its rows: MINE, BROKEN"),
        ("mine.py:NUMBER", "NUMBER, which is no Row of"),
        ("mine.py:", "name one of its rows: MINE, BROKEN"),
        ("empty.py:MINE", "define MINE = Row(..) in it"),
        ("mine.py:BROKEN", "algorithm broken: got parts that do not fit; length is given with aggregation 'constant'"),
        ("mine.py", "name one of its rows: MINE, BROKEN"),
    ],
)
def test_a_file_that_gives_no_row_says_why(name: str, says: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert says in refusal(name, {})


def test_a_row_of_a_file_refuses_settings_as_any_other_does(file: Path) -> None:
    assert "did you mean high?" in refusal(f"{file}:MINE", {"surrogate.hgih": 1})
