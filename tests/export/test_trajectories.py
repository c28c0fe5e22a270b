"""Trajectories and metrics of a run, read by datasets and by plain JSON and CSV."""

from __future__ import annotations

import csv
import json
import math
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from export.conftest import HOSTILE, record, trajectory
from rich.filesize import decimal

from agent_r1.cli import main
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Message, ToolSpec, from_openai
from agent_r1.core.trajectory import Status
from agent_r1.export import trajectories
from agent_r1.export.config import ExportConfig
from agent_r1.export.run import export_run
from agent_r1.export.trajectories import read_attempts
from agent_r1.renderers.byte_tokenizer import byte_tokenizer
from agent_r1.store.reader import RunReader


def export(run: Path, out: Path, **settings: Any) -> Path:
    export_run(run, out, ExportConfig(**settings))
    return out


def load(out: Path, cache: Path, **arguments: Any) -> Any:
    return datasets.load_dataset(str(out), split="train", cache_dir=str(cache / "cache"), **arguments)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "trajectories.jsonl").read_text("utf-8").split("\n") if line]


def test_datasets_loads_what_the_run_recorded(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "ROWS_PER_GROUP", 2)
    monkeypatch.setattr(trajectories, "ROWS_PER_FILE", 4)
    out = export(recorded, tmp_path / "out", format="trajectories")
    assert len(list(out.glob("data/*.parquet"))) == 2
    rows = load(out, tmp_path)
    assert rows["task"] == [f"task-{index}" for index in range(6)]
    assert rows["fate"] == ["trained", "dropped"] * 3 and rows["step"] == [1, 1, 2, 2, 3, 3]
    assert rows[1]["rewards"]["judge"] is None and rows[1]["reward"] is None
    row, expected = rows[2], trajectory(2, HOSTILE, turns=2)
    assert from_openai(row["messages"][0]) == expected.messages[0]
    assert [message.get("content") for message in row["messages"]] == [message.text for message in expected.messages]
    assert row["messages"][1]["tool_calls"][0]["function"] == {
        "name": "search",
        "arguments": {"query": HOSTILE, "k": 0},
    }
    assert row["turns"][1]["parent"] == 0 and row["turns"][0]["logprobs"] == [-0.1, -0.2]
    assert row["turns"][0]["call_rewards"] == [{"found": 1.0}] and row["rewards"]["format"] == -1.0


def test_a_chat_template_renders_the_messages_and_tools(recorded: Path, tmp_path: Path) -> None:
    row = load(export(recorded, tmp_path / "out", format="trajectories", first_step=2), tmp_path)[0]
    text = byte_tokenizer().apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    assert f"page of {HOSTILE}" in text and '"search"' in text


def test_the_openai_format_has_one_object_per_line_with_arguments_as_text(recorded: Path, tmp_path: Path) -> None:
    out = export(recorded, tmp_path / "out", format="openai")
    assert len(lines(out)) == len((out / "trajectories.jsonl").read_bytes().rstrip(b"\n").split(b"\n")) == 6
    line = lines(out)[2]
    function = line["messages"][1]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"query": HOSTILE, "k": 0}
    assert line["messages"][2] == {"role": "tool", "content": f"page of {HOSTILE}", "tool_call_id": "call_0"}
    assert line["tools"][0]["function"]["description"] == f"Find a page. {HOSTILE}"
    assert line["rewards"] == {"em": 0.0, "judge": 0.0, "format": -1.0, "found": 1.0}
    assert line["metadata"]["id"] == "demo:2.0.0:task-2"
    assert len(load(out, tmp_path)) == 6


def test_each_branch_of_an_attempt_is_a_conversation_with_its_own_messages_and_tools(tmp_path: Path) -> None:
    helper, main_call, after = trajectory(0, turns=3).turns
    tool = ToolSpec("look", "Look around.", {"type": "object", "properties": {}})
    helper = replace(helper, new_messages=(Message.user("help me"),), tools=())
    main_call = replace(main_call, parent=None, new_messages=(Message.user("the question"),), tools=(tool,))
    another = replace(after, index=3, new_messages=(Message.user("the other way"),), tools=(tool,))
    attempt = replace(trajectory(0), turns=(helper, main_call, replace(after, tools=(tool,)), another), answer="42")
    silent = replace(trajectory(1), turns=())
    run = record(tmp_path / "run", [attempt, silent])
    with closing(RunReader(run)) as reader:
        assert reader.trajectory(attempt.attempt) == attempt
    found = lines(export(run, tmp_path / "openai", format="openai"))
    said = [[message["content"] for message in line["messages"] if message["role"] == "user"] for line in found]
    assert said == [["help me"], ["the question"], ["the question", "the other way"]]
    assert [[tool["function"]["name"] for tool in line["tools"]] for line in found] == [[], ["look"], ["look"]]
    assert [line["metadata"]["conversation"] for line in found] == [0, 1, 2] and found[0]["metadata"]["answer"] == "42"
    rows = load(export(run, tmp_path / "parquet", format="trajectories"), tmp_path)
    assert [[turn["index"] for turn in turns] for turns in rows["turns"]] == [[0], [1, 2], [1, 3]]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"fate": "trained"}, {0, 2, 4}),
        ({"split": "extra"}, {0, 3}),
        ({"first_step": 2, "last_step": 2}, {2, 3}),
        ({"first_step": 3}, {4, 5}),
        ({"min_reward": 0.5}, {3, 5}),
        ({"status": "completed", "fate": "dropped", "split": "train"}, {1, 5}),
    ],
    ids=str,
)
def test_filters_select_attempts(recorded: Path, filters: dict[str, Any], kept: set[int]) -> None:
    with closing(RunReader(recorded)) as reader:
        found = read_attempts(reader, ExportConfig(format="openai", **filters))
        assert {attempt.trajectory.attempt.group_id for attempt in found} == kept


def test_nothing_is_written_if_no_attempt_matches(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"of which nothing matches --split x; leave a filter out"):
        export(recorded, tmp_path / "out", format="openai", split="x")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_leaves_nothing_and_keeps_the_earlier_one(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export(recorded, tmp_path / "out", format="openai")
    before = (out / "trajectories.jsonl").read_bytes()

    def full(*_: object) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr("agent_r1.export.run.write_openai", full)
    for target in (out, tmp_path / "new"):
        with pytest.raises(AgentR1Error, match="could not be written: No space left on device"):
            export_run(recorded, target, ExportConfig(format="openai"), force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "trajectories.jsonl").read_bytes() == before


def test_force_replaces_only_exports(recorded: Path, tmp_path: Path) -> None:
    config = ExportConfig(format="metrics")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work", "utf-8")
    (tmp_path / "link").symlink_to(mine)
    for out in (mine, tmp_path / "link", recorded, tmp_path / "mine" / "thesis.tex"):
        with pytest.raises(InvalidInput, match="which exists; name a new folder, or give --force"):
            export_run(recorded, out, config)
        with pytest.raises(InvalidInput, match="--force replaces only earlier exports"):
            export_run(recorded, out, config, force=True)
    assert (mine / "thesis.tex").read_text("utf-8") == "years of work"
    for format_name in ("metrics", "openai"):
        export_run(recorded, tmp_path / "out", ExportConfig(format=format_name), force=True)
    assert not (tmp_path / "out" / "metrics.csv").exists()


def test_metrics_are_numbers_in_csv_and_json(recorded: Path, tmp_path: Path) -> None:
    out = export(recorded, tmp_path / "out", format="metrics")
    with (out / "metrics.csv").open(encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["step"], second[f"reward/{HOSTILE}"]) == ("1", str(2 / 3)) and math.isnan(float(first["kl"]))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").split("\n") if line]
    assert rows[0] == {"step": 1, "reward": 0.5, "kl": None, f"reward/{HOSTILE}": 1 / 3}


def test_cards_show_no_credentials_and_no_paths(recorded: Path, tmp_path: Path) -> None:
    card = (export(recorded, tmp_path / "out", format="openai", fate="trained") / "README.md").read_text("utf-8")
    assert (
        "pass-7" not in card
        and "/home/ann" not in card
        and "questions.json" in card
        and "| task set | mix.toml |" in card
    )
    assert (
        "| conversations | 3 |" in card and "| fate | trained |" in card and "| algorithm | grpo 2402.03300 |" in card
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"format": "model", "split": "train"},
            "--split: got train; leave it out: it has no effect with --format model",
        ),
        ({"format": "openai", "checkpoint": "last"}, "--checkpoint: got last; leave it out"),
        ({"format": "metrics", "min_reward": 0.0}, "--min_reward: got 0.0; leave it out"),
        ({"format": "model", "push": "a b"}, "--push: got 'a b'; give OWNER/NAME"),
    ],
    ids=str,
)
def test_settings_without_effect_are_refused(
    recorded: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput) as error:
        export(recorded, tmp_path / "out", **settings)
    assert message in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("format_name", ["openai", "trajectories"])
def test_datasets_loads_columns_that_only_the_last_attempts_have(tmp_path: Path, format_name: str) -> None:
    failed = replace(trajectory(8, turns=2), status=Status.ENVIRONMENT_FAILED, reason="no route to the wiki")
    run = record(tmp_path / "run", [*map(trajectory, range(8)), failed])
    out = export(run, tmp_path / "out", format=format_name)
    rows = load(out, tmp_path, **({"chunksize": 1000} if format_name == "openai" else {}))
    last = rows[8] if format_name == "trajectories" else rows[8]["metadata"]
    assert last["status_reason"] == "no route to the wiki" and rows[8]["messages"][1]["tool_calls"]
    assert rows[0]["messages"] == [{"role": "user", "content": "Who rules Alba?"}, *rows[0]["messages"][1:]]


def test_memory_does_not_grow_with_the_number_of_attempts(tmp_path: Path) -> None:
    peaks = []
    for count in (10, 110):
        run = record(tmp_path / f"run-{count}", [trajectory(index, "x" * 20_000) for index in range(count)])
        tracemalloc.start()
        export(run, tmp_path / f"out-{count}", format="openai")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # the summaries of a page grow; the conversations, 20 MB, do not
    assert peaks[1] < peaks[0] + 2_000_000


def test_the_command_says_what_it_wrote_in_one_line(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"a [b] {'x' * 90}"
    assert main(["export", str(recorded), str(out), "--format", "openai", "--fate", "trained"]) == 0
    size = decimal(sum(path.stat().st_size for path in out.iterdir()))
    line = f"openai in {out}: 3 conversations, fate trained, {size}; README.md says how to load it\n"
    assert capsys.readouterr().out == line
