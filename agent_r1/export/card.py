"""Model cards and dataset cards: the README.md of an export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agent_r1.core.settings import flat_settings
from agent_r1.export.model import SavedWeights, base_of_adapter
from agent_r1.store import RunReader
from agent_r1.store.results import read_results

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
    """Return a JSON value as one line of YAML. Non-ASCII characters are escaped, as ``\\U0001f600``."""
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
    """Yield the Markdown table of the evaluation after training. Yield nothing if the exported weights were not
    evaluated.
    """
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
    """Return the last part of an absolute path ("/data/qwen" -> "qwen"), or any other name unchanged."""
    return Path(name).name if Path(name).is_absolute() else name


def _plain(text: str) -> str:
    """Return ``text`` in one line, with the special characters of Markdown escaped."""
    escaped = "".join(f"\\{c}" if c in r"\`*_[]<>|#" else c for c in " ".join(text.split()))
    return escaped.encode("utf-8", "backslashreplace").decode("utf-8")
