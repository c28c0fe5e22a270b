"""Write models and adapters of a run to folders that transformers and peft can load."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1.core.errors import InvalidInput
from agent_r1.core.redaction import flat_settings
from agent_r1.store.manifest import (
    MANIFEST,
    MODEL,
    CorruptCheckpoint,
    check_manifest,
    checkpoint_step,
    list_checkpoints,
)
from agent_r1.store.reader import RunReader, read_results

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ADAPTER_CONFIG = "adapter_config.json"

NOT_OF_THE_MODEL = (MANIFEST, "trainer*.safetensors", "trainer.json", "progress.json", "monitor.json")
"""Patterns of files in saved folders that belong to the run, not to the model."""


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """The weights that a run saved after a step."""

    folder: Path  # the folder of the model; with LoRA, of the adapter
    step: int
    is_best: bool  # whether ``step`` is the best step by validation
    merged: Path | None = None  # the folder of the model with the merged adapter; None if the run saved none

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).is_file()


def find_weights(run: Path, reader: RunReader, checkpoint: str) -> SavedWeights:
    """Return the saved weights that ``checkpoint`` selects: "best", "last", or the number of a step.

    Raise InvalidInput if the run has not saved these weights, or if they are damaged.
    """
    best = best_step(reader)
    checkpoints = list_checkpoints(run)
    final_step = reader.last_step() if best is None else best
    has_final = _is_intact(run / MODEL) and (reader.is_complete() or not checkpoints)
    if has_final and (checkpoint == "best" or (checkpoint == "last" and not checkpoints and best is None)):
        adapter = run / MODEL / "adapter"
        return SavedWeights(adapter if adapter.is_dir() else run / MODEL, final_step, best is not None, run / MODEL)
    intact = {checkpoint_step(folder): folder for folder in checkpoints if _is_intact(folder)}
    newest = max(intact, default=-1)
    step = best if checkpoint == "best" and best in intact else newest
    if checkpoint not in ("best", "last"):
        step = next((each for each in intact if str(each) == checkpoint), -1)
    if step not in intact:
        there = ", ".join(map(str, sorted(intact))) or "none"
        do = f"choose best, last or a step with an intact checkpoint; there are: {there}"
        raise InvalidInput("--checkpoint", got=f"{checkpoint} of {run}, which has no such weights", do=do)
    return SavedWeights(intact[step], step, step == best)


def best_step(reader: RunReader) -> int | None:
    """Return the step with the best exact match in validation, or None without a validation."""
    validated = reader.curve("validation_em")
    return max(validated, key=lambda step: (validated[step], step), default=None)


def write_model(folder: Path, weights: SavedWeights) -> None:
    """Write the model with its tokenizer and chat template to ``folder``, for ``from_pretrained``.

    A LoRA adapter is merged into the model.
    """
    if not weights.is_adapter:
        _copy(weights.folder, folder)
    elif weights.merged is not None:
        _copy(weights.merged, folder)
    else:
        _write_merged(folder, weights.folder)


def write_adapter(folder: Path, weights: SavedWeights) -> None:
    """Write the adapter to ``folder``, for ``PeftModel.from_pretrained``.

    Raise InvalidInput if the run was not trained with LoRA.
    """
    if not weights.is_adapter:
        do = "give --format model: only runs with --trainer.lora.rank have an adapter"
        raise InvalidInput("--format", got="adapter, of a run without LoRA", do=do)
    _copy(weights.folder, folder)


def base_of_adapter(folder: Path) -> str:
    return str(json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))["base_model_name_or_path"])


def _write_merged(folder: Path, adapter: Path) -> None:
    # Imported here, because the modules import torch.
    import torch

    from agent_r1.model.adapter import merged_copy, save_weights
    from agent_r1.model.load import load_images, load_model, load_tokenizer, quiet_transformers

    merged: PreTrainedModel = merged_copy(load_model(str(adapter), torch.float32))
    with quiet_transformers():
        save_weights(folder, merged, merged.state_dict())
        tokenizer = load_tokenizer(str(adapter))
        tokenizer.save_pretrained(folder)
        images = load_images(str(adapter), tokenizer)
        if images is not None:
            images.save_pretrained(folder)


def _copy(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(map(path.match, NOT_OF_THE_MODEL)):
            shutil.copyfile(path, target / path.name)


def _is_intact(folder: Path) -> bool:
    try:
        check_manifest(folder)
    except CorruptCheckpoint:
        return False
    return True


LOCAL_PATHS = ("data", "corpus", "model", "teacher", "run", "agent")
"""Settings that can be a local path. A card shows only the last part of the path."""

LOAD_MODEL = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""

LOAD_ADAPTER = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({base})  # the model that the run began with, or its folder
model = PeftModel.from_pretrained(base, "{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""

LOAD_PARQUET = """\
```python
from datasets import load_dataset

trajectories = load_dataset("{name}", split="train")
print(trajectories[0]["messages"], trajectories[0]["reward"])
```

Each row is one conversation of an attempt, as the policy saw it; `id` names the attempt. An attempt has several if its
context was rewritten or if it has sub-agents. `messages` and `tools` are in the OpenAI format; the arguments of calls
are objects, as chat templates of transformers expect them. `turns` has the exact tokens: those that the policy saw
since the turn `parent`, those that it sampled, and their log-probabilities. `rewards` has the sum of each reward by
name, and `reward` the weighted sum of all; null means that it could not be computed.
"""

LOAD_JSONL = """\
```python
from datasets import load_dataset

trajectories = load_dataset("{name}", split="train")
```

Each line is one conversation of an attempt, as the policy saw it, with `messages` and `tools` in the format of the
OpenAI API: the arguments of a call are JSON text. Chat templates of transformers expect objects, and would write the
text in quotes: to train with a chat template, as TRL does, use an export in the format `trajectories`. `rewards` has
the sum of each reward by name, and `reward` the weighted sum of all; null means that it could not be computed.
"""

LOAD_METRICS = """\
```python
import pandas

metrics = pandas.read_csv("{name}/metrics.csv", index_col="step")
```
"""


def model_card(name: str, run: Path, reader: RunReader, weights: SavedWeights, is_adapter: bool) -> str:
    """Return the model card (README.md) of an exported model or adapter.

    ``name`` is the repository or folder that the example code of the card loads. ``run`` is the folder of the run.
    """
    config = reader.config()
    base = base_of_adapter(weights.folder) if is_adapter else str(config.get("model"))
    header: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
    }
    tags = ["agent-r1", "reinforcement-learning", "tool-use", *(["lora"] if is_adapter else [])]
    header = {**header, **({"base_model": base} if _is_hub_name(base) else {}), "tags": tags}
    load = LOAD_ADAPTER.format(base=json.dumps(_short(base)), name=name) if is_adapter else LOAD_MODEL.format(name=name)
    if (weights.folder / "preprocessor_config.json").is_file():  # a model with vision
        load = load.replace("AutoModelForCausalLM", "AutoModelForImageTextToText")
    what = "LoRA adapter" if is_adapter else "model"
    return "\n".join(
        [
            *_front_matter(header),
            f"# {_plain(run.name)}",
            "",
            f"A {what} trained by reinforcement learning over whole episodes, with agent-r1 {version('agent-r1')}.",
            "",
            *_table(["", ""], _training(config, reader, weights).items()),
            "## Results",
            "",
            *_validations(reader, weights),
            *_final_table(reader, weights),
            "## How to load",
            "",
            load,
            "The tokenizer has the chat template with which the model was trained. Give the tools with"
            " `apply_chat_template(messages, tools=tools)`.",
            "",
            *_all_settings(config),
        ]
    )


def dataset_card(
    name: str,
    run: Path,
    reader: RunReader,
    format_name: str,
    facts: Mapping[str, Any],
    columns: Sequence[Mapping[str, Any]],
) -> str:
    """Return the dataset card (README.md) of exported trajectories or metrics.

    Args:
        name: the repository or folder that the example code of the card loads.
        run: the folder of the run.
        format_name: trajectories, openai or metrics.
        facts: the number of conversations or steps, and the settings that selected them.
        columns: the columns with their types; () if the files contain the types.
    """
    files = {"trajectories": "data/*.parquet", "openai": "trajectories.jsonl", "metrics": "metrics.jsonl"}[format_name]
    load = {"trajectories": LOAD_PARQUET, "openai": LOAD_JSONL, "metrics": LOAD_METRICS}[format_name]
    header = {
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": files}]}],
        **({"dataset_info": [{"config_name": "default", "features": columns}]} if columns else {}),
        "tags": ["agent-r1", "reinforcement-learning", "tool-use"],
    }
    what = "Metrics" if format_name == "metrics" else "Trajectories"
    config = reader.config()
    return "\n".join(
        [
            *_front_matter(header),
            f"# {what} of {_plain(run.name)}",
            "",
            f"{what} of a run of agent-r1 {version('agent-r1')}.",
            "",
            *_table(["", ""], {**_about(config), **facts}.items()),
            "## How to load",
            "",
            load.format(name=name),
            *_all_settings(config),
        ]
    )


def _front_matter(header: Mapping[str, Any]) -> Iterator[str]:
    yield "---"
    yield from (f"{key}: {_yaml(value)}" for key, value in header.items())
    yield from ("---", "")


def _yaml(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return re.sub("[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", text)


def _about(config: Mapping[str, Any]) -> dict[str, str]:
    algorithm = config.get("algorithm", {})
    return {
        "base model": _short(str(config.get("model"))),
        "task set": str(config.get("taskset")),
        **({"data": _short(str(config["data"]))} if config.get("data") else {}),
        "algorithm": " ".join(str(algorithm.get(key)) for key in ("name", "paper") if algorithm.get(key)),
    }


def _training(config: Mapping[str, Any], reader: RunReader, weights: SavedWeights) -> dict[str, str]:
    trainer = config.get("trainer", {})
    lora = trainer.get("lora", {}).get("rank")
    best = ", the best by validation" if weights.is_best else ""
    return {
        **_about(config),
        "weights": f"step {weights.step} of {reader.last_step()}{best}",
        "attempts per step": f"{config.get('groups_per_step')} tasks x {config.get('group_size')} attempts",
        "learning rate": str(trainer.get("learning_rate")),
        **({"LoRA rank": str(lora)} if lora else {}),
        "seed": str(config.get("seed")),
    }


def _validations(reader: RunReader, weights: SavedWeights) -> Iterator[str]:
    found = {one["step"]: one for one in read_results(reader, "validation")}
    if (one := found.get(weights.step)) is not None:
        interval = f"{one['em']:z.3f} ({one['low']:z.3f} to {one['high']:z.3f}), n = {one['n']}"
        yield f"Validation of these weights (split `{_plain(one['split'])}`, mean with 95 % interval): {interval}."
    else:
        yield "These weights were not validated during training."
    yield ""


def _final_table(reader: RunReader, weights: SavedWeights) -> Iterator[str]:
    tables = list(read_results(reader, "table")) if weights.merged is not None else []
    if not tables:
        return
    cells: Mapping[str, Mapping[str, Mapping[str, float]]] = tables[-1]["table"]
    splits = list(dict.fromkeys(split for row in cells.values() for split in row))
    rows = [
        [method, *(_cell(row[split]) if split in row else "-" for split in splits)] for method, row in cells.items()
    ]
    yield from ("After training, greedy decoding, mean with 95 % interval:", "")
    yield from _table(["method", *splits], rows)


def _cell(cell: Mapping[str, float]) -> str:
    return f"{cell['em']:z.3f} ({cell['low']:z.3f} to {cell['high']:z.3f}), n = {cell['n']}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(map(_plain, heads))} |"
    yield "|" + "---|" * len(heads)
    yield from (f"| {' | '.join(_plain(str(cell)) for cell in row)} |" for row in rows)
    yield ""


def _all_settings(config: Mapping[str, Any]) -> Iterator[str]:
    settings = flat_settings(config)
    shown = {
        key: _short(value) if key in LOCAL_PATHS and isinstance(value, str) else value
        for key, value in settings.items()
    }
    yield from ("<details><summary>All settings</summary>", "", "```json")
    yield json.dumps(shown, indent=2).replace("`", "\\u0060")
    yield from ("```", "", "</details>", "")


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not Path(name).exists() and not name.startswith((".", "/", "~"))


def _short(name: str) -> str:
    return Path(name).name if Path(name).is_absolute() else name


def _plain(text: str) -> str:
    escaped = "".join(f"\\{c}" if c in r"\`*_[]<>|#" else c for c in " ".join(text.split()))
    return escaped.encode("utf-8", "backslashreplace").decode("utf-8")
