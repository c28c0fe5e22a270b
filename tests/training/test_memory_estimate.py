"""The memory of a run is estimated before it begins: micro-batches that fit are chosen, and others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scenarios import MICRO, micro_taskset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.model.adapter import add_adapter, count_adapter
from agent_r1.model.config import LoraConfig
from agent_r1.model.forward import hidden_states, token_scores
from agent_r1.trainer.single_process import shares_prefixes
from agent_r1.training import build
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.memory_estimate import (
    GIB,
    MemoryPlan,
    PassShape,
    adapter_weights,
    available_memory,
    kv_bytes_per_token,
    pass_bytes,
    pass_shape,
    plan_memory,
)

CPU = torch.device("cpu")
PLENTY = 100 * GIB


def qwen(layers: int = 1) -> PreTrainedModel:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).eval()  # fmt: skip


def gpt2(layers: int = 1) -> PreTrainedModel:
    config = GPT2Config(vocab_size=300, n_embd=64, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def config_of(**settings: Any) -> TrainConfig:
    given = {"model": "any", "concurrency": 8, "trainer.micro_tokens": 2048, **settings}
    return resolve(TrainConfig, [Layer("test", {key.replace("__", "."): value for key, value in given.items()})])


def shape_of(model: PreTrainedModel, **settings: Any) -> PassShape:
    config = config_of(**settings)
    return pass_shape(model, config, 128, 2048, shares_prefixes(config.trainer, config.algorithm, [model]))


def test_shared_prefixes_make_longer_sequences_with_a_mask_or_without() -> None:
    alone, shared = (shape_of(qwen(), trainer__share_prefixes=share) for share in ("auto", "on"))
    assert (alone.rows, alone.length, alone.with_mask) == (16, 128, False)
    assert (shared.rows, shared.length, shared.with_mask) == (1, 2048, False)
    eager = qwen()
    eager.set_attn_implementation("eager")
    masked = shape_of(eager, trainer__share_prefixes="on")
    assert (masked.rows, masked.length, masked.with_mask) == (1, 2048, True)


def use_of(plan: MemoryPlan, name: str) -> int:
    return next((use.size for use in plan.uses if use.name.startswith(name)), 0)


def saved_bytes(model: PreTrainedModel, rows: int, length: int) -> int:
    """Return the bytes that a real forward pass saves for the backward pass, each storage once, without parameters."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        ids = torch.zeros(rows, length, dtype=torch.int64)
        loss = token_scores(model, hidden_states(model, ids).flatten(0, 1), ids.flatten(), 1.0)[0].sum()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert loss.requires_grad  # keeps the storages alive until here
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


@pytest.mark.parametrize("make", [qwen, gpt2])
def test_a_pass_takes_what_it_saves_and_some_temporary_tensors(make: Any) -> None:
    model = make(3)
    saved, estimated = saved_bytes(model, 16, 128), pass_bytes(shape_of(model))
    assert saved < estimated < 1.6 * saved


def test_each_rank_on_a_cpu_has_passes_and_models_of_its_own() -> None:
    model = qwen(3)
    alone, two = (
        plan_memory(model, config_of(trainer__ranks=n, trainer__share_prefixes="off", algorithm="ppo"), 128, PLENTY)
        for n in (1, 2)  # two ranks share no prefixes
    )
    assert use_of(two, "micro-batches") == 2 * use_of(alone, "micro-batches") > 0
    models = 2 * 2 * 4 * model.num_parameters()  # two ranks, policy and critic, float32
    assert (use_of(alone, "models of the ranks"), use_of(two, "models of the ranks")) == (0, models)


def test_moments_in_8_bits_take_a_quarter() -> None:
    model = qwen()
    whole, small = (
        plan_memory(model, config_of(trainer__optimizer=name), 128, PLENTY) for name in ("adamw", "adamw-8bit")
    )
    weights = model.num_parameters()
    assert use_of(whole, "gradients and moments") == (4 + 8) * weights
    assert use_of(small, "gradients and moments") == (4 + 2) * weights
    assert use_of(whole, "copies to save") - use_of(small, "copies to save") == 6 * weights


def test_a_pass_grows_with_its_tokens_and_shrinks_with_checkpointing_and_bfloat16() -> None:
    model = qwen(4)
    whole = pass_bytes(shape_of(model))
    half = pass_bytes(pass_shape(model, config_of(), 128, 1024, False))
    assert 0.4 * whole < half < 0.6 * whole
    assert pass_bytes(shape_of(model, trainer__activation_checkpointing=True)) < 0.5 * whole
    assert pass_bytes(shape_of(model, trainer__dtype="bfloat16")) < 0.75 * whole


def test_weights_count_once_for_each_copy() -> None:
    model = qwen()
    weights = 4 * model.num_parameters()

    def fixed(**settings: Any) -> tuple[float, float, float]:
        plan = plan_memory(model, config_of(**settings), 128, PLENTY)
        names = "further weights", "gradients", "copies"
        return tuple(use_of(plan, name) / weights for name in names)  # type: ignore[return-value]

    assert fixed() == (1, 3, 3)  # engine; gradient and two moments; weights and moments to save
    assert fixed(checkpoint_every=0) == (1, 3, 0)
    assert fixed(algorithm="ppo") == (2, 6, 6)  # and the critic
    assert fixed(algorithm="reinforce++") == (2, 3, 3)  # and the reference
    assert fixed(trainer__dtype="bfloat16", engine__dtype="bfloat16") == (1, 3, 3)  # two copies of half the size


@pytest.mark.parametrize("make", [qwen, gpt2])
def test_a_pass_that_trains_an_adapter_takes_what_it_saves(make: Any) -> None:
    model, lora = make(3), {"trainer__lora__rank": 4}
    estimated = pass_bytes(shape_of(model, **lora))
    add_adapter(model, LoraConfig(rank=4), seed=0, base="")
    saved = saved_bytes(model, 16, 128)
    assert saved < estimated < 1.6 * saved and estimated < pass_bytes(shape_of(make(3)))


def test_with_lora_frozen_weights_exist_once_and_the_rest_is_of_the_size_of_the_adapter() -> None:
    model = qwen()
    weights, lora = 4 * model.num_parameters(), LoraConfig(rank=4)
    adapter = 4 * adapter_weights(model, lora) / weights
    assert adapter_weights(model, lora) == count_adapter(add_adapter(qwen(), lora, seed=0, base="")) > 0

    def fixed(**settings: Any) -> tuple[float, float, float]:
        plan = plan_memory(model, config_of(trainer__lora__rank=4, **settings), 128, PLENTY)
        names = "further weights", "gradients", "copies"
        return tuple(use_of(plan, name) / weights for name in names)  # type: ignore[return-value]

    one = pytest.approx((adapter, 3 * adapter, 3 * adapter))
    assert fixed() == one  # the engine's; gradient and two moments; adapter and moments to save
    assert fixed(algorithm="ppo") == pytest.approx((2 * adapter, 6 * adapter, 6 * adapter))  # and the critic's
    assert fixed(algorithm="reinforce++") == one  # the reference has none
    assert fixed(engine__dtype="bfloat16")[0] == pytest.approx(0.5 + adapter / 2)  # an engine of another type
    adapted = add_adapter(qwen(), lora, seed=0, base="")
    plans = [plan_memory(one, config_of(trainer__lora__rank=4), 128, PLENTY) for one in (model, adapted)]
    assert plans[0] == plans[1]  # an adapter that is already in memory changes nothing


def test_the_kv_cache_holds_the_attempts_that_run_together_within_its_limit() -> None:
    model = qwen()
    per_token = 2 * 2 * 16 * 4  # keys and values of a layer with 2 heads of 16 numbers
    assert kv_bytes_per_token(model, "float32") == per_token == 2 * kv_bytes_per_token(model, "bfloat16")
    plan = plan_memory(model, config_of(), 128, PLENTY)
    assert use_of(plan, "KV cache") == 64 * 128 * per_token  # one batch of 64 sequences
    small = plan_memory(model, config_of(engine__kv_cache_gib=0.001), 128, PLENTY)
    assert use_of(small, "KV cache") == int(0.001 * GIB)


def test_the_native_decode_step_has_a_copy_of_the_weights() -> None:
    model, name = qwen(), "weights in the layout of the decode step"

    def copied(**settings: Any) -> int:
        return use_of(plan_memory(model, config_of(**settings), 128, PLENTY), name)

    assert copied() == 4 * model.num_parameters()
    assert copied(engine__dtype="bfloat16") == 2 * model.num_parameters() > copied(engine__decode_step="torch") == 0


def test_the_largest_micro_batch_that_fits_is_chosen() -> None:
    model, config = qwen(), config_of()
    totals = {
        tokens: plan_memory(model, config_of(trainer__micro_tokens=tokens), 128, PLENTY).total
        for tokens in (2048, 1024, 512)
    }
    for tokens, total in totals.items():
        assert plan_memory(model, config, 128, total).micro_tokens == tokens
        assert plan_memory(model, config, 128, total - 1).micro_tokens == tokens // 2


def test_without_memory_for_the_smallest_micro_batches_checkpoints_are_not_copied() -> None:
    model, config = qwen(), config_of()
    smallest = plan_memory(model, config_of(trainer__micro_tokens=128), 128, PLENTY)
    short = plan_memory(model, config, 128, smallest.total - 1)
    assert smallest.copies and use_of(smallest, "copies to save") and not short.copies
    assert use_of(short, "copies to save") == 0 and short.micro_tokens >= 128 and short.total < smallest.total


def test_a_model_that_cannot_run_without_data_is_trained_without_an_estimate(caplog: Any) -> None:
    class DataDependent(Qwen2ForCausalLM):
        def __init__(self, config: Qwen2Config) -> None:
            super().__init__(config)
            self.model.register_forward_pre_hook(
                lambda _, args, kwargs: int(kwargs["input_ids"].sum()), with_kwargs=True
            )

    model = DataDependent(qwen().config)
    plan = plan_memory(model, config_of(), 128, PLENTY)
    assert use_of(plan, "micro-batches") == 0 and "cannot be estimated" in caplog.text
    assert use_of(plan, "gradients") > 0


def test_activations_are_computed_twice_if_nothing_else_fits() -> None:
    model, config = qwen(4), config_of(trainer__micro_tokens=1024)
    twice = plan_memory(
        model, config_of(trainer__micro_tokens=1024, trainer__activation_checkpointing=True), 1024, PLENTY
    )
    assert twice.activation_checkpointing and not plan_memory(model, config, 1024, PLENTY).activation_checkpointing
    found = plan_memory(model, config, 1024, twice.total)
    assert found.activation_checkpointing and not found.copies and found.total < twice.total


def test_a_run_that_cannot_end_is_refused_with_numbers_and_with_settings_that_fit() -> None:
    model, settings = qwen(1), "--trainer.dtype bfloat16 --engine.dtype bfloat16"
    changed = {"trainer__dtype": "bfloat16", "engine__dtype": "bfloat16", "trainer__micro_tokens": 1024}
    least = plan_memory(model, config_of(**changed, trainer__activation_checkpointing=True), 1024, PLENTY)
    needed = least.total - use_of(least, "copies to save")
    with pytest.raises(InvalidInput, match=r"free, but at least .* GiB \(.*micro-batches of 1024 tokens") as refused:
        plan_memory(model, config_of(trainer__micro_tokens=1024), 1024, needed)
    assert f"give {settings}, or take" in str(refused.value)
    fitting = plan_memory(model, config_of(**changed), 1024, needed)  # the advice is right
    assert fitting.total <= needed


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    return root


MACHINE = {"proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable:   {8 * 2**20} kB\n"}


def group(folder: str, limit: object, used: int, cached: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/{folder}"
    stat = f"anon {used}\ninactive_file {cached}\n"
    return {f"{base}/memory.max": f"{limit}\n", f"{base}/memory.current": f"{used}\n", f"{base}/memory.stat": stat}


def test_available_memory_is_the_least_of_the_machine_and_its_control_groups(tmp_path: Path) -> None:
    assert available_memory(CPU, write(tmp_path / "machine", MACHINE)) == 8 * GIB
    unlimited = {**MACHINE, "proc/self/cgroup": "0::/\n", **group("", "max", 3 * GIB)}
    assert available_memory(CPU, write(tmp_path / "unlimited", unlimited)) == 8 * GIB
    limited = {**unlimited, **group("", 6 * GIB, 3 * GIB, cached=GIB)}
    assert available_memory(CPU, write(tmp_path / "limited", limited)) == 4 * GIB
    nested = {**limited, "proc/self/cgroup": "0::/slice/job\n", **group("slice", 2 * GIB, GIB)}
    assert available_memory(CPU, write(tmp_path / "nested", nested)) == GIB
    first = {"memory.limit_in_bytes": 3 * GIB, "memory.usage_in_bytes": GIB, "memory.stat": "total_inactive_file 0"}
    version_one = {**MACHINE, **{f"sys/fs/cgroup/memory/{name}": str(value) for name, value in first.items()}}
    assert available_memory(CPU, write(tmp_path / "one", version_one)) == 2 * GIB


def test_a_run_trains_with_micro_batches_that_fit_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    taskset = micro_taskset()
    config = resolve_config(TrainConfig, [Layer("test", {**MICRO, "trainer.micro_tokens": 8192})], taskset)
    plans: list[MemoryPlan] = []

    def remembered(*arguments: Any) -> MemoryPlan:
        plans.append(plan_memory(*arguments))
        return plans[-1]

    monkeypatch.setattr(build, "plan_memory", remembered)
    runtime = build.build_runtime(config, taskset)
    assert runtime.trainer.micro_tokens == 8192 and runtime.events == ()
    monkeypatch.setattr(build, "available_memory", lambda device: plans[0].total - 1)
    runtime = build.build_runtime(config, taskset)
    assert runtime.trainer.micro_tokens == 4096
    (event,) = runtime.events
    assert event.kind == "memory" and "4096 tokens instead of 8192" in event.detail
