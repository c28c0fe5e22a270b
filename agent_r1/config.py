"""Configurations made from layers of settings.

The layers are the command line, a TOML file, the defaults of the task set, and the defaults of the settings classes. A
value in an earlier layer has priority. Each error is one line that names the dotted key (``trainer.learning_rate``),
the layer, and the remedy.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from agent_r1.core.errors import InvalidInput, suggest
from agent_r1.core.files import open_regular

COMMAND_LINE = "command line"

LARGEST_INTEGER, LARGEST_NUMBER = 2**32 - 1, 1e9
"""The largest integer and the largest float that a setting can have. Some libraries overflow at larger numbers."""

Config = TypeVar("Config", bound=BaseModel)


class NestedByName:
    """A mark for settings such as ``algorithm``, whose value is a component with parameters of its own.

    ``--algorithm grpo --algorithm.loss cispo --algorithm.loss.clip_high 0.28`` reaches the validator of the setting as
    one flat table: ``{"name": "grpo", "loss": "cispo", "loss.clip_high": 0.28}``.
    """


NESTED_BY_NAME: Final = NestedByName()

BUILD: Final = "build"
"""The key in the context of validators under which they find the argument ``build`` of :func:`resolve`."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one source, with dotted keys or in nested tables.

    Example:
        Layer(source="config.toml", values={"steps": 20, "trainer": {"learning_rate": 1e-3}})
        Layer(source="defaults of tinywiki", values={"steps": 20, "trainer.learning_rate": 1e-3})
    """

    source: str
    values: Mapping[str, Any]


def resolve(
    cls: type[Config], layers: Sequence[Layer], ignore: type[BaseModel] | None = None, *, build: bool = True
) -> Config:
    """Return a configuration of the class ``cls``, made from layers. A value in an earlier layer has priority.

    Values are validated strictly: text is not accepted as a number.

    Args:
        ignore: a second class. A setting that this class has and ``cls`` lacks is ignored, so that an evaluation can
            use the configuration file of a training.
        build: whether components that are chosen by name, such as the algorithm, are built, which imports torch. If
            false, they stay unchecked names and tables. The other settings can so be checked in a moment.

    Raise InvalidInput for the first problem: a key is unknown, or a value is missing, has a wrong type or is out of
    range.
    """
    settings, sources = _merge(cls, layers, ignore)
    nested = to_json(_nest(cls, settings), inf_nan_mode="constants")
    try:
        return cls.model_validate_json(nested, strict=True, context={BUILD: build})
    except ValidationError as error:
        raise _explain(cls, error, sources) from None
    except InvalidInput as error:  # raised by the validator of a setting that is chosen by name
        source = _source(error.what, sources)
        raise InvalidInput(f"{error.what} ({source})" if source else error.what, got=error.got, do=error.do) from None


def settings_of(cls: type[BaseModel], layers: Sequence[Layer], ignore: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return the merged settings of the layers by dotted key, such as ``{"trainer.learning_rate": 1e-3}``."""
    return _merge(cls, layers, ignore)[0]


def read_toml(path: Path) -> Layer:
    """Return the settings of a TOML file as a layer. Raise InvalidInput if the file cannot be read or parsed."""
    try:
        with open_regular(path) as file:
            return Layer(str(path), tomllib.loads(file.read().decode("utf-8-sig")))
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise InvalidInput("configuration file", got=f"{path}: {reason}", do="give a TOML file") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, tables within tables without end
        raise InvalidInput("configuration file", got=f"{path}: {error}", do="fix its TOML") from None


def from_text(cls: type[BaseModel], texts: Mapping[str, str], source: str = COMMAND_LINE) -> Layer:
    """Return a layer of settings, each converted from text to the type of the setting.

    A text that cannot be converted stays text, so that :func:`resolve` reports the wrong value.

    Example:
        from_text(cls, {"steps": "20", "betas": "0.9,0.95"}).values == {"steps": 20, "betas": [0.9, 0.95]}
    """
    return Layer(source, {key: _convert(_value_type(cls, key), text) for key, text in texts.items()})


def iter_fields(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) for each setting of a settings class and of the settings classes inside it.

    Example:
        [key for key, _ in iter_fields(TrainConfig)] == ["data", ..., "trainer.learning_rate", ...]
    """
    for name, field in cls.model_fields.items():
        inner = nested_model(field)
        if inner is None:
            yield prefix + name, field
        else:
            yield from iter_fields(inner, f"{prefix}{name}.")


def setting_keys(cls: type[BaseModel]) -> list[str]:
    """Return the dotted key of every setting of a settings class."""
    return [key for key, _ in iter_fields(cls)]


def has_setting(cls: type[BaseModel], key: str) -> bool:
    """Return whether a dotted key names a setting, or an entry of a setting that is a table."""
    return find_field(cls, key) is not None


def find_field(cls: type[BaseModel], key: str) -> FieldInfo | None:
    """Return the field of the setting with a dotted key; None if no setting has the key.

    A setting can be a table with entries. The key of an entry gives the field of the table. The names of entries are
    not checked.
    """
    name, _, rest = key.partition(".")
    field = cls.model_fields.get(name)
    if field is None:
        return None
    inner = nested_model(field)
    if inner is not None:
        return find_field(inner, rest)
    return field if not rest or is_table(field) else None


def nested_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the settings class of a field that holds a group of settings, such as ``trainer``;"""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def is_table(field: FieldInfo) -> bool:
    """Return whether a setting is a table, with entries that have their own keys, such as ``algorithm.loss``"""
    return get_origin(field.annotation) is dict or NESTED_BY_NAME in field.metadata


# Names of other frameworks and of other commands. Most have no letters in common with ours.
_ELSEWHERE: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("epochs", "num_epochs", "num_train_epochs", "total_epochs", "max_steps", "iterations"): ("steps",),
    ("batch_size", "train_batch_size", "per_device_train_batch_size"): ("groups_per_step", "group_size"),
    ("num_generations", "rollouts", "rollout_n", "num_rollouts"): ("group_size",),
    ("max_completion_length", "max_new_tokens", "max_response_length"): ("max_tokens",),
    ("max_prompt_length", "max_length", "max_seq_len", "max_model_len"): ("context",),
    ("beta", "kl", "kl_coef", "kl_loss_coef"): ("algorithm.kl.coefficient",),
    ("clip_range", "cliprange", "epsilon", "clip_ratio"): ("algorithm.loss.clip_low", "algorithm.loss.clip_high"),
    ("gae_lambda",): ("algorithm.advantage.lam",),
    ("ppo_epochs", "num_iterations"): ("trainer.minibatches",),
    ("lora_r", "lora_rank"): ("trainer.lora.rank",),
    ("bf16", "fp16", "torch_dtype", "precision"): ("trainer.dtype", "engine.dtype"),
    ("gpus", "num_gpus", "nproc_per_node", "n_gpus_per_node"): ("trainer.ranks",),
    ("output_dir", "output", "name", "run_name"): ("run",),
    ("n", "num_samples", "eval_n", "limit"): ("evaluate_n",),
    ("eval_steps", "eval_every"): ("evaluate_every",),
    ("save_steps", "save_every"): ("checkpoint_every",),
    ("report_to", "logger", "wandb"): ("track",),
    ("dataset", "dataset_name", "train_files", "eval_dataset"): ("data",),
    ("model_name_or_path", "model_name", "pretrained"): ("model",),
    ("resume_from_checkpoint",): ("resume",),
    ("mix", "mixture", "env", "environment_name"): ("taskset",),
}


def suggest_setting(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a hint which of the ``known`` settings an unknown name means; "" if none is similar.

    ``prefix`` stands before a setting in the hint, as "--" on the command line.
    """
    known, last = list(known), name.rpartition(".")[2].lower()
    meant = next((ours for others, ours in _ELSEWHERE.items() if last in others), ())
    own = "algorithm" in known  # its settings depend on its name, so they are not among the known ones
    if shown := [f"{prefix}{one}" for one in meant if one in known or (own and one.startswith("algorithm."))]:
        return f"give {' and '.join(shown)}"
    return suggest(name, known).replace("'", f"'{prefix}", 1)


def unknown_setting(key: str, source: str, known: Iterable[str]) -> InvalidInput:
    """Return the error for an unknown key. The error suggests a similar key of ``known``.

    ``source`` is where the key was given, such as "command line".
    """
    known = list(known)
    if below := [name for name in known if name.startswith(f"{key}.")]:
        do = f"it is a table: give its settings, such as {below[0]}"
    else:
        do = suggest_setting(key, known) or "leave it out: no setting has a similar name"
    return InvalidInput(f"unknown setting ({source})", got=repr(key), do=do)


def _merge(
    cls: type[BaseModel], layers: Sequence[Layer], ignore: type[BaseModel] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in reversed(layers):
        for key, value in _flatten(ignore or cls, layer.values):
            if has_setting(cls, key):
                _check(key, value, layer.source)
                settings[key], sources[key] = value, layer.source
            elif ignore is None or not has_setting(ignore, key):
                raise unknown_setting(key, layer.source, setting_keys(cls) + setting_keys(ignore or cls))
    return settings, sources


def _check(key: str, value: Any, source: str) -> None:
    largest = LARGEST_INTEGER if isinstance(value, int) else LARGEST_NUMBER
    if isinstance(value, int | float) and largest < abs(value) != math.inf:  # the settings class refuses infinity
        raise InvalidInput(f"{key} ({source})", got=value, do=f"give at most {largest:.10g}")
    try:
        to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:
        got = f"an object of type {type(value).__name__}"
        do = "give text, a number, or a list or table of them"
        raise InvalidInput(f"{key} ({source})", got=got, do=do) from None


def _flatten(cls: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, BaseModel):  # such as an Algorithm given in Python: all its fields count as set
            value = to_jsonable_python(value)
        if not isinstance(value, Mapping):
            yield _without_name(cls, key), value
        elif value:
            yield from _flatten(cls, value, f"{key}.")
        elif not any(known == key or known.startswith(f"{key}.") for known in setting_keys(cls)):
            yield key, value  # an empty table with an unknown key: the caller reports the key


def _without_name(cls: type[BaseModel], key: str) -> str:
    parent, _, last = key.rpartition(".")
    field = find_field(cls, key)
    return parent if last == "name" and field is not None and NESTED_BY_NAME in field.metadata else key


def _nest(cls: type[BaseModel], settings: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        below = {key.partition(".")[2]: value for key, value in settings.items() if key.partition(".")[0] == name}
        inner = nested_model(field)
        if inner is not None and below and "" not in below:
            nested[name] = _nest(inner, below)
        elif "" in below and len(below) == 1:
            nested[name] = below[""]
        elif below:
            nested[name] = {key or "name": value for key, value in below.items()}
    return nested


def _value_type(cls: type[BaseModel], key: str) -> Any:
    field = find_field(cls, key)
    if field is None or NESTED_BY_NAME in field.metadata:
        return str
    if get_origin(field.annotation) is dict:
        return get_args(field.annotation)[1]
    return field.annotation


def _convert(annotation: Any, text: str) -> Any:
    if get_origin(annotation) is Annotated:  # ignore the bounds: resolve() checks the value
        return _convert(get_args(annotation)[0], text)
    if get_origin(annotation) is tuple:
        items = text.removeprefix("[").removesuffix("]").split(",")
        return [_convert(get_args(annotation)[0], item.strip()) for item in items if item]
    try:
        return TypeAdapter(annotation).validate_strings(text)
    except ValidationError:
        return text


def _explain(cls: type[BaseModel], error: ValidationError, sources: Mapping[str, str]) -> InvalidInput:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    source = _source(key, sources)
    if first["type"] == "missing" and source is None:
        return InvalidInput(key, got="nothing", do=f"give it, as --{key} or in a configuration file")
    if first["type"] == "missing":
        return InvalidInput(f"{key} ({source})", got="nothing", do="the list should be longer")
    do = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    field = find_field(cls, key)
    if first["type"] == "string_pattern_mismatch" and field is not None and field.description:
        do = f"give another: {' '.join(field.description.split())}"  # instead of the regular expression
    given = first["input"]
    if isinstance(given, BaseModel):  # a group of settings: name only those that were given
        got = repr(given.model_dump(exclude_defaults=True)) if given.model_fields_set else "nothing"
    else:
        got = repr(given)
    return InvalidInput(key if source is None else f"{key} ({source})", got=got, do=do)


def _source(key: str, sources: Mapping[str, str]) -> str | None:
    below = (known for known in sources if known.startswith(f"{key}."))
    above = (known for known in sources if key.startswith(f"{known}."))
    return next((sources[known] for known in (key, *above, *below) if known in sources), None)
