"""Settings come from the strongest layer that names them, and every mistake is one clear line."""

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from agent_r1.config import Layer, from_text, keys, nearest, read_toml, resolve, restrict
from agent_r1.core.errors import InvalidInput


class Optimizer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    learning_rate: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: bool = False


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = "demo"
    data: Path | None = None
    steps: int = Field(default=10, ge=1)
    mode: Literal["mean", "sum"] = "mean"
    methods: tuple[str, ...] = ()
    weights: dict[str, float] = Field(default_factory=dict)
    row: dict[str, Any] = Field(default_factory=dict)
    optimizer: Optimizer = Optimizer()


class Part(BaseModel):
    steps: int = 1


def typed(**texts: str) -> Layer:
    return from_text(Settings, {key.replace("__", "."): text for key, text in texts.items()})


def test_the_strongest_layer_that_names_a_key_wins() -> None:
    layers = [
        typed(steps="3"),
        Layer("a.toml", {"steps": 4, "optimizer": {"learning_rate": 0.1}}),
        Layer("recipe", {"steps": 5, "optimizer.learning_rate": 0.2, "optimizer.warmup": True}),
    ]
    settings = resolve(Settings, layers)
    assert (settings.steps, settings.optimizer.learning_rate, settings.optimizer.warmup) == (3, 0.1, True)
    assert resolve(Settings, layers[::-1]).steps == 5
    assert resolve(Settings, []) == Settings()


def test_layers_of_a_table_add_up_entry_by_entry() -> None:
    strong, weak = typed(weights__em="2"), Layer("recipe", {"weights": {"em": 1, "f1": 0.5}, "row": {}})
    assert resolve(Settings, [strong, weak]).weights == {"em": 2.0, "f1": 0.5}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "20", 20),
        ("name", "20", "20"),
        ("data", "20", Path("20")),
        ("mode", "sum", "sum"),
        ("methods", "naive-rag,trained", ("naive-rag", "trained")),
        ("methods", "7", ("7",)),
    ],
)
def test_text_is_read_as_its_fields_type(key: str, text: str, value: object) -> None:
    assert resolve(Settings, [typed(**{key: text})]).model_dump()[key] == value


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learning_rate", "1e-3", 1e-3),
        ("learning_rate", ".5", 0.5),
        ("learning_rate", "3", 3.0),
        ("betas", "0.9,0.99", (0.9, 0.99)),
        ("betas", "[0.9, 0.99]", (0.9, 0.99)),
        ("warmup", "true", True),
        ("warmup", "True", True),
    ],
)
def test_text_of_inner_classes_too(key: str, text: str, value: object) -> None:
    assert resolve(Settings, [typed(**{f"optimizer__{key}": text})]).optimizer.model_dump()[key] == value


def test_entries_of_a_free_table_are_read_as_what_they_look_like() -> None:
    layer = from_text(Settings, {"row.clip": "0.2", "row.mode": "token", "row.off": "false", "row.none": "null"})
    assert resolve(Settings, [layer]).row == {"clip": 0.2, "mode": "token", "off": False, "none": None}


MISTAKES = {
    "steps (command line): got -1; it should be greater than or equal to 1": typed(steps="-1"),
    "steps (command line): got 1.5; it should be a valid integer": typed(steps="1.5"),
    "steps (command line): got 'many'; it should be a valid integer": typed(steps="many"),
    "mode (command line): got 'max'; it should be 'mean' or 'sum'": typed(mode="max"),
    "weights.em (command line): got 'x'; it should be a valid number": typed(weights__em="x"),
    "optimizer.learning_rate (command line): got nan; it should be a finite number": typed(
        optimizer__learning_rate="nan"
    ),
    "optimizer.betas.1 (command line): got 'x'; it should be a valid number": typed(optimizer__betas="0.9,x"),
    "optimizer.betas.1 (command line): got nothing; the list should be longer": typed(optimizer__betas="0.9"),
    "steps (a.toml): got '20'; it should be a valid integer": Layer("a.toml", {"steps": "20"}),
    "steps (a.toml): got True; it should be a valid integer": Layer("a.toml", {"steps": True}),
    "name (Python): got an object of type object; give text, a number, or a list or table of them": Layer(
        "Python", {"name": object()}
    ),
    "unknown setting (a.toml): got 'stepz'; the nearest that exists is 'steps'": Layer("a.toml", {"stepz": 1}),
    "unknown setting (a.toml): got 'steps.a'; the nearest that exists is 'steps'": Layer("a.toml", {"steps": {"a": 1}}),
    "unknown setting (a.toml): got 'wieghts'; the nearest that exists is 'weights'": Layer("a.toml", {"wieghts": {}}),
    "unknown setting (a.toml): got 'optimizer.lr'; the nearest that exists is 'optimizer.learning_rate'": Layer(
        "a.toml", {"optimizer": {"lr": 1}}
    ),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_that_says_where_and_what_would_be_right(line: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolve(Settings, [MISTAKES[line], Layer("recipe", {"steps": 2})])
    assert str(caught.value) == line


def test_a_mistake_is_blamed_on_the_layer_that_made_it() -> None:
    with pytest.raises(InvalidInput, match=r"^steps \(b.toml\)"):
        resolve(Settings, [typed(name="x"), Layer("b.toml", {"steps": 0}), Layer("recipe", {"steps": 3})])


@pytest.mark.parametrize(
    ("key", "known"),
    [("lr", "optimizer.learning_rate"), ("learning_rate", "optimizer.learning_rate"), ("step", "steps")],
)
def test_the_nearest_key_is_found_by_likeness_last_word_or_initials(key: str, known: str) -> None:
    assert nearest(key, keys(Settings)) == known


def test_a_recipe_is_cut_to_the_class_it_is_used_for_but_its_mistakes_stay() -> None:
    recipe = Layer("recipe", {"steps": 4, "optimizer": {"warmup": True}})
    assert resolve(Part, [restrict(recipe, Part, Settings)]) == Part(steps=4)
    with pytest.raises(InvalidInput, match="nearest that exists is 'steps'"):
        restrict(Layer("recipe", {"stepp": 4}), Part, Settings)


def test_a_toml_file_is_a_layer(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("steps = 7\n[optimizer]\nbetas = [0.5, 0.6]\n")
    assert resolve(Settings, [read_toml(file)]).optimizer.betas == (0.5, 0.6)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"steps == 3", "line 1"), (b"\xff\xfe", "mend its TOML"), ("folder", "Is a directory")],
)
def test_a_toml_file_that_cannot_be_read_is_one_line(content: bytes | str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "folder":
        file.mkdir()
    with pytest.raises(InvalidInput, match=said) as caught:
        read_toml(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)
