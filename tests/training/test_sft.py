"""Supervised fine-tuning: tokens, loss and gradient are those of the chat template, and a run resumes exactly."""

import asyncio
import json
from contextlib import closing

import pytest
import torch
from chat_templates import SEARCH, tokenizer_of
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import agent_r1
from agent_r1.cli import main
from agent_r1.config import Layer
from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import NO_POLICY
from agent_r1.model.load import read_weights
from agent_r1.renderers.byte_tokenizer import TEMPLATE
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.tasksets.transcripts import make_taskset, parse, read_transcripts
from agent_r1.training.build import build_runtime
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.environments import make_rollout
from agent_r1.training.progress import SilentProgress
from agent_r1.training.sft import sft_layers, solutions_of

HEADERS = (
    "{{ '<|start|>' }}{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
# thoughts are kept in the last message only, so that each answer has a prompt of its own
THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"tools": TEMPLATE, "headers": HEADERS, "thoughts": THOUGHTS}


def call(query):
    return {"id": "a1", "type": "function", "function": {"name": "search", "arguments": json.dumps({"query": query})}}


def rows_of(kind):
    asked = [{"role": "user", "content": f"Who taught {name}?"} for name in ("Alba", "Bruno", "Cleo")]
    if kind == "tools":
        return [
            {
                "messages": [
                    question,
                    {"role": "assistant", "content": "", "tool_calls": [call(f"page {number}")]},
                    {"role": "tool", "tool_call_id": "a1", "content": "Dora taught her."},
                    {"role": "assistant", "content": "Dora" + "." * number},
                ],
                "tools": [SEARCH.to_openai()],
            }
            for number, question in enumerate(asked)
        ]
    thought = {"reasoning_content": "I know this."} if kind == "thoughts" else {}
    return [
        {
            "messages": [
                question,
                {"role": "assistant", "content": "Dora.", **thought},
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes" + "!" * number, **thought},
            ]
        }
        for number, question in enumerate(asked)
    ]


def save_model(folder, template):
    tokenizer = tokenizer_of(template, ["<|im_start|>", "<|im_end|>"])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, initializer_range=0.2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tools_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), TEMPLATE)


def config_of(model, taskset, folder, **settings):
    given = {"model": model, "run": str(folder), "trainer.learning_rate": 1e-3, **settings}
    return resolve_config(TrainConfig, sft_layers([Layer("test", given)], taskset, 1), taskset)


def expected(model_folder, rows):
    """Return loss and gradient over what the template writes after each prompt, from whole renders of transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    total, count = torch.zeros(()), 0
    for row in rows:
        messages = [json.loads(json.dumps(message)) for message in row["messages"]]
        for one in (one for message in messages for one in message.get("tool_calls", [])):
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            options = {"tools": row.get("tools"), "tokenize": False}
            prompt = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, **options)
            whole = tokenizer.apply_chat_template(messages[: place + 1], **options).rstrip("\n")
            ids = tokenizer(whole, add_special_tokens=False, return_tensors="pt").input_ids
            start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
            logits = model(ids).logits[0, start - 1 : -1]
            total = total + cross_entropy(logits, ids[0, start:], reduction="sum")
            count += ids.shape[1] - start
    (total / count).backward()
    return float(total.detach()) / count, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("micro_tokens", [64, 8192])
def test_loss_and_gradient_are_those_of_whole_renders(kind, micro_tokens, tmp_path):
    model, rows = save_model(tmp_path / "model", TEMPLATES[kind]), rows_of(kind)
    taskset = make_taskset([parse(row) for row in rows])
    config = config_of(model, taskset, tmp_path / "run", **{"trainer.micro_tokens": micro_tokens})
    runtime = build_runtime(config, taskset)
    gradients = {}

    def keep_gradients(factor, optim_step=runtime.trainer.optim_step):
        gradients.update({name: p.grad.clone() for name, p in runtime.policy.model.named_parameters()})
        return optim_step(factor)

    runtime.trainer.optim_step = keep_gradients

    async def update():
        rollout = make_rollout(runtime.agent, taskset.env)
        collector = Collector(rollout, taskset.scorers, NullRecorder(), "run", RolloutLimits())
        requests = (GroupRequest(number, task, 1) for number, task in enumerate(taskset.tasks("train")))
        groups = [group async for group in collector.collect(requests)]
        before = await runtime.updater.losses(groups)
        return before, await runtime.updater.update([runtime.updater.select(group) for group in groups])

    before, report = asyncio.run(update())
    loss, gradient = expected(model, rows)
    assert report.metrics["sft_loss"] == pytest.approx(loss, abs=1e-5)
    assert sum(total for total, _ in before) / sum(count for _, count in before) == pytest.approx(loss, abs=1e-5)
    assert gradients.keys() == gradient.keys()
    for name in gradient:
        assert torch.allclose(gradients[name], gradient[name], atol=1e-5), name
    assert "logprob_gap" not in report.metrics and report.metrics["staleness"] == 0


def taskset_of(tmp_path, number=12, validation=2):
    rows = [rows_of("tools")[place % 3] for place in range(number)]
    rows += [{**rows_of("tools")[place], "split": "validation"} for place in range(validation)]
    file = tmp_path / "transcripts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def test_a_stopped_run_continues_exactly(tools_model, tmp_path):
    file = taskset_of(tmp_path)
    settings = {"groups_per_step": 4, "checkpoint_every": 1, "evaluate_every": 2}

    def run(name, steps):
        taskset = make_taskset(read_transcripts(file))
        arguments = {"model": tools_model, "run": str(tmp_path / name), "steps": steps, **settings}
        agent_r1.finetune(file, progress=SilentProgress(), **arguments)
        assert (tmp_path / name / "transcripts.jsonl").exists() and taskset.validation == "validation"

    run("whole", 6)
    run("moved", 4)
    file.unlink()  # the run has its own copy, wherever it is
    (tmp_path / "moved").rename(tmp_path / "stopped")
    agent_r1.resume(tmp_path / "stopped", steps=6, progress=SilentProgress())
    with closing(RunReader(tmp_path / "whole")) as whole, closing(RunReader(tmp_path / "stopped")) as stopped:
        assert whole.curve("sft_loss") == stopped.curve("sft_loss")
        assert whole.curve("validation_loss") == stopped.curve("validation_loss")
        (first,) = [one for one in whole.trajectories() if one.attempt.group_id == 0]
        assert {span.version for turn in first.turns for span in turn.version_spans} == {NO_POLICY}
        assert {logprob for turn in first.turns for logprob in turn.logprobs} == {0.0}
        curve = whole.curve("validation_loss")
        assert curve[6] < curve[2]
    model = AutoModelForCausalLM.from_pretrained(tools_model)
    ours, theirs = (read_weights(tmp_path / name / "model", model) for name in ("whole", "stopped"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert main(["verify", str(tmp_path / "stopped")]) == 0


def test_a_fine_tuned_model_is_a_start_for_training(tools_model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--run", "start", "--n", "8", "--epochs", "8", "--trainer.learning_rate", "1e-3", "--quiet"]
    assert main(["sft", "--from_solutions", "--taskset", "tinywiki", *arguments]) == 0
    rows = [json.loads(line) for line in (tmp_path / "runs/start/transcripts.jsonl").read_text("utf-8").splitlines()]
    assert [row["split"] for row in rows] == ["train"] * 8 + ["validation"]
    assert any(message.get("tool_calls") for message in rows[0]["messages"]) and rows[0]["tools"]
    assert main(["eval", "--model", "start"]) == 2
    assert "learned from transcripts" in capsys.readouterr().err
    small = ["--steps", "1", "--groups_per_step", "2", "--group_size", "2", "--evaluate_n", "0", "--quiet"]
    assert main(["train", "--taskset", "tinywiki", "--model", "start", "--run", "after", *small]) == 0
    assert main(["sft", "--from", "after", "--min_reward", "-1", "--run", "own", "--steps", "1", "--quiet"]) == 0
    assert main(["verify", "own"]) == 0


QUESTION, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def test_solved_examples_of_the_prompt_are_not_learned():
    row = {"messages": [QUESTION, {**ANSWER, "weight": 0}, QUESTION, ANSWER, QUESTION, ANSWER], "split": "train"}
    transcript = parse(row)
    assert (len(transcript.opening), len(transcript.turns)) == (3, 2) and transcript.to_openai() == row
    solved = build("environments/people")
    (first, *_) = solutions_of(solved, 1)
    assert sum(message.role == "assistant" for message in first.opening) == 8
    calls = [answer.calls for answer, _ in first.turns]
    assert all(calls[:-1]) and len(calls) > 1 and not calls[-1]
    assert parse(first.to_openai()) == first and not any(call.raw for call in calls[0])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": "hello"}, "no list of messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the assistant"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "before any prompt"),
        ({"messages": [{"role": "user", "content": "a"}] + [{"role": "assistant", "content": "b"}] * 2}, "in a row"),
        ({"messages": [{"role": "person", "content": "a"}]}, "'person'"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "weight": 0}]}, "no message of the"),
        ({"messages": [QUESTION, ANSWER, QUESTION, {**ANSWER, "weight": 0}]}, "weight 0"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, "weight 0.5"),
        ({"messages": [], "split": "test"}, "split 'test'"),
        ({"messages": [], "tools": [{"type": "function"}]}, "without a name"),
        ({"messages": [], "tools": 5}, "no list"),
        ({"messages": [], "tools": "no json"}, "no JSON"),
        ({"messages": [], "tools": [{"function": {"name": "a", "parameters": "text"}}]}, "schema"),
        ({"messages": [], "tools": [{"function": {"name": "a", "description": 5}}]}, "description"),
    ],
)
def test_a_row_that_is_no_transcript_is_named(row, says, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row), "utf-8")
    assert main(["sft", str(file), "--model", "tiny-base"]) == 2
    error = capsys.readouterr().err
    assert says in error and "row 1" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "got nothing"),
        (["FILE", "--from_solutions"], "DATA and --from_solutions"),
        (["VALIDATION"], "none to learn from, and 2 for validation"),
        (["FILE", "--n", "3"], "--n: got it and DATA"),
        (["FILE", "--data", "other.jsonl"], "--data: got it and DATA"),
        (["--from_solutions", "--min_reward", "1"], "--min_reward: got it and --from_solutions"),
        (["FILE", "--temperature", "0.7"], "makes no attempts"),
        (["FILE", "--algorithm", "grpo"], "makes no attempts"),
    ],
)
def test_options_without_an_effect_are_refused(arguments, says, tmp_path, capsys):
    files = {"VALIDATION": 0, "FILE": 3}
    given = [str(taskset_of(tmp_path, files[one])) if one in files else one for one in arguments]
    assert main(["sft", *given, "--model", "tiny-base"]) == 2
    assert says in capsys.readouterr().err


def test_what_the_template_writes_otherwise_is_refused(tools_model, tmp_path):
    asked = {"role": "user", "content": "a"}
    for answer in ("<|im_end|>", 'a <tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'):
        taskset = make_taskset([parse({"messages": [asked, {"role": "assistant", "content": answer}]})])
        with pytest.raises(InvalidInput, match="template writes"):
            build_runtime(config_of(tools_model, taskset, tmp_path / "run"), taskset)
    long = make_taskset([parse({"messages": [asked, {"role": "assistant", "content": "b" * 3000}]})])
    with pytest.raises(InvalidInput, match="tokens, but the context has"):
        build_runtime(config_of(tools_model, long, tmp_path / "run"), long)
    fine = make_taskset([parse({"messages": [asked, {"role": "assistant", "content": "b", "reasoning_content": "c"}]})])
    assert build_runtime(config_of(tools_model, fine, tmp_path / "run"), fine)  # a template without thoughts drops them
