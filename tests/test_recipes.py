"""The recipes have valid settings and can be run, here at a small scale with a random model of the same kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from benchmark_files import SHARED, real_data
from film_pages import write_pages
from tests_tokenizer import hermes_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from agent_r1.config import Layer, from_text, read_toml, resolve
from agent_r1.retrieval.config import RetrieverConfig, check
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.tasksets.files import read_settings, read_settings_file
from agent_r1.tasksets.multihop.mixture import MixtureFile
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train
from environments.bfcl import Settings as BfclSettings
from environments.code_repair import Settings

RECIPES = Path(__file__).parents[1] / "recipes"
PAPER = RECIPES / "paper_multihop.toml"


def test_the_recipe_of_the_retriever_has_valid_settings() -> None:
    config = resolve(RetrieverConfig, [read_toml(RECIPES / "paper_retriever.toml")])
    check(config)
    assert config.encoder.endswith("bge-large-en-v1.5")
    assert resolve(TrainConfig, [read_toml(PAPER)]).corpus == f"http://{config.host}:{config.port}"


def test_the_stages_of_people_have_valid_settings_and_questions() -> None:
    text = (RECIPES / "people.toml").read_text("utf-8")
    commands = re.findall(r"agent-r1 train (.*)", text)
    assert len(commands) == 3
    shares = []
    for number, command in enumerate(commands, start=1):
        options = dict(re.findall(r"--(\S+) (\S+)", command))
        layer = from_text(TrainConfig, {key: value for key, value in options.items() if key != "config"})
        config = resolve(TrainConfig, [layer, read_toml(RECIPES / "people.toml")])
        assert config.run == f"runs/people-{number}"
        assert config.model == ("smollm2-135m" if number == 1 else f"runs/people-{number - 1}/model")
        questions = build(config.taskset, RECIPES.parent / config.data, None, config.seed).tasks("train")[:64]
        shares.append([len(task.data["chain"].relations) for task in questions].count(1) / 64)
    assert shares == [1 / 8, 1 / 4, 1 / 2]


def test_the_command_of_wikifilm_has_valid_settings_and_trains_on_2_hop_questions(tmp_path: Path) -> None:
    (command,) = re.findall(r"agent-r1 train (.*)", (RECIPES / "wikifilm.toml").read_text("utf-8"))
    options = dict(re.findall(r"--(\S+) (\S+)", command))
    layer = from_text(TrainConfig, {key: value for key, value in options.items() if key != "config"})
    config = resolve(TrainConfig, [layer, read_toml(RECIPES / "wikifilm.toml")])
    assert config.model == "runs/people-3/model" and config.data is not None
    pages = write_pages(tmp_path / "pages.jsonl")
    settings = (RECIPES.parent / config.data).read_text("utf-8").replace("pages.jsonl", str(pages))
    (tmp_path / "films.toml").write_text(settings, "utf-8")
    taskset = build(config.taskset, tmp_path / "films.toml", None, config.seed)
    assert {task.id.split("/")[1] for task in taskset.tasks("train")} == {"2-hop"}
    assert {"1-hop", "2-hop"} <= set(taskset.evaluation)


def test_the_recipe_of_short_multihop_questions_has_valid_settings() -> None:
    config = resolve(TrainConfig, [read_toml(RECIPES / "multihop_small.toml")])
    assert config.data is not None and (RECIPES.parent / config.taskset).is_file()
    mixture = read_settings_file(MixtureFile, RECIPES.parent / config.data)
    assert set(mixture.train) == {"hotpotqa", "2wiki"} and set(mixture.test) == {"hotpotqa", "2wiki", "musique"}
    assert config.trainer.lora.rank == 16 and config.corpus is not None


def test_the_recipe_of_gsm8k_has_valid_settings() -> None:
    config = resolve(TrainConfig, [read_toml(RECIPES / "gsm8k_small.toml")])
    assert (config.taskset, str(config.data), config.trainer.dtype) == ("math", "hf:openai/gsm8k:main", "bfloat16")


def test_the_recipe_of_code_repair_has_valid_settings() -> None:
    config = resolve(TrainConfig, [read_toml(RECIPES / "code_repair.toml")])
    assert config.taskset.endswith("/environments/code_repair") and config.data is not None
    settings = read_settings(Settings, RECIPES.parent / config.data)
    assert settings.data == RECIPES / "mbpp" and settings.proposals == 6
    assert set(config.reward_weights) == {"fixed", "gained", *config.extra_rewards}
    control = read_settings(Settings, RECIPES / "code_repair_shuffled.toml")
    assert control == settings.model_copy(update={"shuffle_feedback": True})


def test_the_recipe_of_bfcl_has_valid_settings() -> None:
    config = resolve(TrainConfig, [read_toml(RECIPES / "bfcl.toml")])
    assert config.data is not None and (RECIPES.parent / config.taskset / "__init__.py").is_file()
    settings = read_settings_file(BfclSettings, RECIPES.parent / config.data)
    assert settings.examples and settings.train == ("simple", "multiple")


def tiny_qwen(folder: Path) -> Path:
    """A random Qwen2 of two small layers that speaks Qwen2.5's own chat template, byte by byte."""
    tokenizer = hermes_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = (SHARED / "chat_templates" / "qwen2_5.jinja").read_text("utf-8")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16384}
    config = Qwen2Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **small, **heads)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def small_data(folder: Path) -> Path:
    """The paper's mixture, in small, of the benchmarks' own files."""
    portions = {
        "train.hotpotqa": ("hotpotqa_train_60.json", 8),
        "train.2wiki": ("2wiki_250.json", 8),
        "validation.hotpotqa": ("hotpotqa_train_60.json", 2),
        "validation.2wiki": ("2wiki_250.json", 2),
        "test.hotpotqa": ("hotpotqa_dev_500.jsonl", 2),
        "test.2wiki": ("2wiki_250.json", 2),
        "test.musique": ("musique_250.json", 2),
    }
    lines = [f'[{name}]\ndata = "{SHARED / file}"\ncount = {count}' for name, (file, count) in portions.items()]
    path = folder / "data.toml"
    path.write_text("\n".join(lines), "utf-8")
    return path


@real_data
def test_the_papers_run_takes_a_step_at_a_small_scale(tmp_path: Path) -> None:
    taskset = build("multihop", small_data(tmp_path), SHARED / "hotpotqa_corpus.jsonl", 0)
    assert taskset.evaluation == ("hotpotqa", "2wiki", "musique")
    asked = {"model": str(tiny_qwen(tmp_path / "model")), "run": str(tmp_path / "run")}
    small = {"steps": 1, "groups_per_step": 4, "group_size": 2, "max_tokens": 12, "checkpoint_every": 0}
    layers = [Layer("test", {**asked, **small, "evaluate_every": 1, "evaluate_n": 2}), read_toml(PAPER)]
    config = resolve_config(TrainConfig, layers, taskset)
    report = train(config, taskset, SilentProgress())
    assert set(report.table.cells) == {"naive-rag", "base-tool-call", "trained"}
    for cells in report.table.cells.values():
        assert list(cells) == ["hotpotqa", "2wiki", "musique"]
        assert all(cell.n == 2 and cell.sub is not None for cell in cells.values())
    reader = RunReader(tmp_path / "run")
    (step,) = reader.metrics()
    trajectories = list(reader.trajectories())
    reader.close()
    assert step.values["reward"] == -0.5  # a random model gives no answer: form 1/2
    assert {trajectory.task_id.split("/")[1] for trajectory in trajectories} == {"hotpotqa", "2wiki"}
