"""Settings come from the strongest layer that sets them, and every mistake is one clear line."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from agent_r1.config import NESTED_BY_NAME, Layer, from_text, read_toml, resolve, setting_keys
from agent_r1.core.errors import InvalidInput, suggest


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
    extra: dict[str, Any] = Field(default_factory=dict)
    optimizer: Optimizer = Optimizer()


class Part(BaseModel):
    steps: int = 1


def typed(**texts: str) -> Layer:
    return from_text(Settings, {key.replace("__", "."): text for key, text in texts.items()})


def test_the_strongest_layer_that_sets_a_key_wins() -> None:
    layers = [
        typed(steps="3"),
        Layer("a.toml", {"steps": 4, "optimizer": {"learning_rate": 0.1}}),
        Layer("defaults", {"steps": 5, "optimizer.learning_rate": 0.2, "optimizer.warmup": True}),
    ]
    settings = resolve(Settings, layers)
    assert (settings.steps, settings.optimizer.learning_rate, settings.optimizer.warmup) == (3, 0.1, True)
    assert resolve(Settings, layers[::-1]).steps == 5
    assert resolve(Settings, []) == Settings()


def test_tables_are_merged_entry_by_entry() -> None:
    strong, weak = typed(weights__em="2"), Layer("defaults", {"weights": {"em": 1, "f1": 0.5}, "extra": {}})
    assert resolve(Settings, [strong, weak]).weights == {"em": 2.0, "f1": 0.5}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "20", 20),
        ("data", "20", Path("20")),
        ("mode", "sum", "sum"),
        ("methods", "naive-rag,trained", ("naive-rag", "trained")),
    ],
)
def test_text_is_converted_to_the_type_of_its_field(key: str, text: str, value: object) -> None:
    assert resolve(Settings, [typed(**{key: text})]).model_dump()[key] == value


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learning_rate", "1e-3", 1e-3),
        ("betas", "0.9,0.99", (0.9, 0.99)),
        ("betas", "[0.9, 0.99]", (0.9, 0.99)),
        ("warmup", "true", True),
    ],
)
def test_text_of_nested_settings_is_converted_too(key: str, text: str, value: object) -> None:
    assert resolve(Settings, [typed(**{f"optimizer__{key}": text})]).optimizer.model_dump()[key] == value


def test_entries_of_a_table_are_converted_to_the_type_of_its_values() -> None:
    layer = from_text(Settings, {"weights.em": "2", "extra.mode": "token"})
    settings = resolve(Settings, [layer])
    assert (settings.weights, settings.extra) == ({"em": 2.0}, {"mode": "token"})


MISTAKES = {
    "steps (command line): got -1; it should be greater than or equal to 1": typed(steps="-1"),
    "steps (command line): got 'many'; it should be a valid integer": typed(steps="many"),
    "mode (command line): got 'max'; it should be 'mean' or 'sum'": typed(mode="max"),
    "optimizer.learning_rate (command line): got nan; it should be a finite number": typed(
        optimizer__learning_rate="nan"
    ),
    "optimizer.betas.1 (command line): got nothing; the list should be longer": typed(optimizer__betas="0.9"),
    "steps (a.toml): got '20'; it should be a valid integer": Layer("a.toml", {"steps": "20"}),
    "name (Python): got an object of type object; give text, a number, or a list or table of them": Layer(
        "Python", {"name": object()}
    ),
    "unknown setting (a.toml): got 'stepz'; did you mean 'steps'?": Layer("a.toml", {"stepz": 1}),
    "unknown setting (a.toml): got 'steps.a'; did you mean 'steps'?": Layer("a.toml", {"steps": {"a": 1}}),
    "unknown setting (a.toml): got 'optimizer.lr'; did you mean 'optimizer.learning_rate'?": Layer(
        "a.toml", {"optimizer": {"lr": 1}}
    ),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_with_its_source_and_a_remedy(line: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolve(Settings, [MISTAKES[line], Layer("defaults", {"steps": 2})])
    assert str(caught.value) == line


def test_a_mistake_names_the_layer_that_made_it() -> None:
    with pytest.raises(InvalidInput, match=r"^steps \(b.toml\)"):
        resolve(Settings, [typed(name="x"), Layer("b.toml", {"steps": 0}), Layer("defaults", {"steps": 3})])


@pytest.mark.parametrize(
    ("key", "known"),
    [("lr", "optimizer.learning_rate"), ("learning_rate", "optimizer.learning_rate"), ("step", "steps")],
)
def test_the_suggested_key_resembles_the_whole_the_last_word_or_the_initials(key: str, known: str) -> None:
    assert suggest(key, setting_keys(Settings)) == f"did you mean {known!r}?"


def test_settings_of_another_class_can_be_ignored_but_unknown_ones_are_refused() -> None:
    defaults = Layer("defaults", {"steps": 4, "optimizer": {"warmup": True}})
    assert resolve(Part, [defaults], Settings) == Part(steps=4)
    with pytest.raises(InvalidInput, match="did you mean 'steps'"):
        resolve(Part, [Layer("defaults", {"stepp": 4})], Settings)


def test_a_toml_file_is_a_layer(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("steps = 7\n[optimizer]\nbetas = [0.5, 0.6]\n", "utf-8")
    assert resolve(Settings, [read_toml(file)]).optimizer.betas == (0.5, 0.6)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"steps == 3", "line 1"), (b"\xff\xfe", "fix its TOML"), ("folder", "Is a directory")],
)
def test_a_toml_file_that_cannot_be_read_is_one_line(content: bytes | str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "folder":
        file.mkdir()
    with pytest.raises(InvalidInput, match=message) as caught:
        read_toml(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


class Preset(BaseModel):
    """A setting that is chosen by name, with settings below it."""

    preset: Annotated[Any, NESTED_BY_NAME] = None


@pytest.mark.parametrize(
    ("layers", "value"),
    [
        ([{"preset": "a"}], "a"),
        ([{"preset": {"name": "a"}}], "a"),
        ([{"preset.x": 1}], {"x": 1}),
        ([{"preset.x": 1}, {"preset": "a"}], {"name": "a", "x": 1}),
        (
            [{"preset": "b"}, {"preset": {"name": "a", "part": {"name": "c", "x": 1}}}],
            {"name": "b", "part": "c", "part.x": 1},
        ),
        ([{"preset.part": "d"}, {"preset": {"part": {"name": "c"}}}], {"part": "d"}),
    ],
)
def test_a_setting_with_a_name_gets_one_flat_table(layers: list[dict[str, Any]], value: object) -> None:
    assert resolve(Preset, [Layer("test", values) for values in layers]).preset == value
