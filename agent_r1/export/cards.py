"""The README.md of an export: a model card or a dataset card of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import CardData, DatasetCardData, ModelCardData

from agent_r1.core.redaction import flat_settings
from agent_r1.export.model import base_of_adapter
from agent_r1.store.reader import RunReader, read_results
from agent_r1.store.saved_weights import SavedWeights

TAGS = ["agent-r1", "reinforcement-learning", "tool-use"]

LOCAL_PATHS = ("taskset", "data", "corpus", "model", "teacher", "run", "agent")
"""Settings that can be a local path. A card shows only the last part of the path."""

TOKENIZER = """
The tokenizer has the chat template with which the model was trained. Give the tools with
`apply_chat_template(messages, tools=tools)`.
"""

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

Each row is one conversation of an attempt, as the policy saw it; `id` names the attempt. `messages` and `tools` are in
the OpenAI format; the arguments of calls are objects, as chat templates of transformers expect them. `turns` has the
exact tokens: those that the policy saw since the turn `parent`, those that it sampled, and their log-probabilities.
`rewards` has the sum of each reward by name, and `reward` the weighted sum of all; null: it could not be computed.
"""

LOAD_JSONL = """\
```python
from datasets import load_dataset

trajectories = load_dataset("{name}", split="train")
```

Each line is one conversation of an attempt, as the policy saw it, with `messages` and `tools` in the format of the
OpenAI API: the arguments of a call are JSON text, which chat templates of transformers would write in quotes. To train
with a chat template, use an export in the format `trajectories`. `rewards` has the sum of each reward by name, and
`reward` the weighted sum of all; null: it could not be computed.
"""

LOAD_METRICS = """\
```python
import pandas

metrics = pandas.read_csv("{name}/metrics.csv", index_col="step")
```
"""

LOAD_DATA = {"trajectories": LOAD_PARQUET, "openai": LOAD_JSONL, "metrics": LOAD_METRICS}
FILES = {"trajectories": "data/*.parquet", "openai": "trajectories.jsonl", "metrics": "metrics.jsonl"}


def model_card(name: str, run: Path, reader: RunReader, weights: SavedWeights, is_adapter: bool) -> str:
    """Return the model card of an exported model or adapter.

    ``name`` is the repository or folder that the example code of the card loads. ``run`` is the folder of the run.
    """
    config = reader.config()
    base = base_of_adapter(weights.folder) if is_adapter else str(config.get("model"))
    is_on_hub = base.count("/") == 1 and not Path(base).exists() and not base.startswith((".", "/", "~"))
    header = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base if is_on_hub else None,
        tags=[*TAGS, *(["lora"] if is_adapter else [])],
    )
    load = LOAD_ADAPTER.format(base=json.dumps(_short(base)), name=name) if is_adapter else LOAD_MODEL.format(name=name)
    if (weights.folder / "preprocessor_config.json").is_file():  # a model with vision
        load = load.replace("AutoModelForCausalLM", "AutoModelForImageTextToText")
    trainer = config.get("trainer", {})
    lora = trainer.get("lora", {}).get("rank")
    facts = {
        "weights": f"step {weights.step} of {reader.last_step()}{', the best by validation' * weights.is_best}",
        "attempts per step": f"{config.get('groups_per_step')} tasks x {config.get('group_size')} attempts",
        "learning rate": trainer.get("learning_rate"),
        **({"LoRA rank": lora} if lora else {}),
        "seed": config.get("seed"),
    }
    validated = {one["step"]: one for one in read_results(reader, "validation")}.get(weights.step)
    if validated is None:
        results = "These weights were not validated during training."
    else:
        split = _plain(validated["split"])
        results = f"Validation of these weights (split `{split}`, mean with 95 % interval): {_cell(validated)}."
    kind = "LoRA adapter" if is_adapter else "model"
    is_sft = config["algorithm"]["name"] == "sft"
    method = "supervised fine-tuning on transcripts" if is_sft else "reinforcement learning over whole episodes"
    tables = list(read_results(reader, "table")) if weights.merged is not None else []
    return _render(
        config,
        header,
        title=run.name,
        what=f"A {kind} trained by {method}, with",
        facts=facts,
        load=load + TOKENIZER,
        results=results,
        table=tables[-1]["table"] if tables else {},
    )


def dataset_card(
    name: str,
    run: Path,
    reader: RunReader,
    format_name: str,
    facts: Mapping[str, Any],
    columns: Sequence[Mapping[str, Any]],
) -> str:
    """Return the dataset card of exported trajectories or metrics.

    Args:
        name: the repository or folder that the example code of the card loads.
        run: the folder of the run.
        format_name: trajectories, openai or metrics.
        facts: the number of conversations or steps, and the settings that selected them.
        columns: the columns with their types; () if the files contain the types.
    """
    data_files = [{"split": "train", "path": FILES[format_name]}]
    header = DatasetCardData(
        configs=[{"config_name": "default", "data_files": data_files}],
        dataset_info=[{"config_name": "default", "features": list(columns)}] if columns else None,
        tags=TAGS,
    )
    what = "Metrics" if format_name == "metrics" else "Trajectories"
    load = LOAD_DATA[format_name].format(name=name)
    title = f"{what} of {run.name}"
    return _render(reader.config(), header, title=title, what=f"{what} of a run of", facts=facts, load=load)


def _render(
    config: Mapping[str, Any],
    header: CardData,
    *,
    title: str,
    what: str,
    facts: Mapping[str, Any],
    load: str,
    results: str = "",
    table: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
) -> str:
    algorithm = config.get("algorithm", {})
    about = {
        "base model": _short(str(config.get("model"))),
        "task set": _short(str(config.get("taskset"))),
        **({"data": _short(str(config["data"]))} if config.get("data") else {}),
        "algorithm": " ".join(str(algorithm.get(key)) for key in ("name", "paper") if algorithm.get(key)),
    }
    settings = {
        key: _short(value) if key in LOCAL_PATHS and isinstance(value, str) else value
        for key, value in flat_settings(config).items()
    }
    pages = jinja2.Environment(keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    pages.filters.update(plain=_plain, cell=_cell)
    return pages.from_string(Path(__file__).with_name("card.md").read_text("utf-8")).render(
        card_data=header.to_yaml(),
        title=title,
        intro=f"{what} agent-r1 {version('agent-r1')}.",
        facts={**about, **facts},
        load=load,
        results=results,
        table=table,
        splits=list(dict.fromkeys(split for cells in (table or {}).values() for split in cells)),
        settings=json.dumps(settings, indent=2).replace("`", "\\u0060"),
    )


def _cell(cell: Mapping[str, Any]) -> str:
    return f"{cell['em']:z.3f} ({cell['low']:z.3f} to {cell['high']:z.3f}), n = {cell['n']}"


def _short(name: str) -> str:
    return Path(name).name if Path(name).is_absolute() else name


def _plain(value: object) -> str:
    escaped = "".join(f"\\{c}" if c in r"\`*_[]<>|#" else c for c in " ".join(str(value).split()))
    return escaped.encode("utf-8", "backslashreplace").decode("utf-8")
