"""Estimate the memory that a run will need, and choose micro-batches that fit."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import Dtype
from agent_r1.data.sequences import MAX_TREE
from agent_r1.inference.kv_cache import kv_cache_bytes
from agent_r1.inference.native_decode import find_compiler, wants_native
from agent_r1.model.adapter import add_adapter, count_adapter
from agent_r1.model.config import LoraConfig
from agent_r1.model.forward import backbone_of, hidden_states, may_use_tree_attention, token_scores
from agent_r1.model.load import quiet_transformers
from agent_r1.model.vision import text_decoder
from agent_r1.model.weights import DTYPES, cast_parameters, checkpoint_activations
from agent_r1.trainer.config import OptimizerName
from agent_r1.trainer.single_process import shares_prefixes
from agent_r1.training.config import TrainConfig

PROBE_TOKENS = 16
NO_ADAPTER = LoraConfig()


@dataclass(frozen=True, slots=True)
class PassShape:
    """A forward and backward pass over sequences of equal length."""

    model_type: type[PreTrainedModel]
    settings: str  # the model's configuration as JSON
    lora: LoraConfig  # the adapter that the pass trains; with rank 0, all weights are trained
    dtype: Dtype
    device: str
    checkpointing: bool  # whether activation checkpointing is on
    with_critic: bool  # whether the pass also trains a critic, which has the size of the model
    with_mask: bool  # whether sequences can hold branches with a common prefix, so that attention needs a mask
    rows: int  # the number of sequences
    length: int  # the number of tokens in each sequence


@lru_cache(maxsize=64)
def pass_bytes(shape: PassShape) -> int:
    """Return the peak memory of a pass in bytes, without weights and their gradients."""
    with FakeTensorMode(), torch.device(shape.device):
        made = (shape.model_type, shape.settings, shape.dtype, shape.lora)
        models = [_fake_model(*made) for _ in range(1 + shape.with_critic)]
        for model in models:
            if shape.checkpointing:
                checkpoint_activations(model, shape.model_type.__name__)
            for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        ids = torch.zeros((shape.rows, shape.length), dtype=torch.long)
        with _AliveBytes() as alive:
            hidden, *critic = [_states(backbone_of(model), ids, shape.with_mask) for model in models]
            actions = hidden.flatten(0, 1)[torch.arange(ids.numel())]
            loss = token_scores(models[0], actions, ids.flatten(), 1.0)[0].sum()
            for states in critic:  # the sum stands for the critic's values, which are weighted sums of hidden states
                loss = loss + states.float().sum()
            loss.backward()
    return alive.peak


def _states(backbone: PreTrainedModel, ids: Tensor, with_mask: bool) -> Tensor:
    if with_mask:
        return hidden_states(backbone, ids, ids, torch.full(ids.shape, ids.shape[1]))
    # For tensors without data, transformers would allocate a causal mask that a real pass does not need. This mask
    # prevents the allocation, and itself needs almost no memory.
    dtype = next(backbone.parameters()).dtype
    mask = torch.zeros((1, 1, 1, 1), dtype=dtype).expand(ids.shape[0], 1, ids.shape[1], ids.shape[1])
    return text_decoder(backbone)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


@lru_cache(maxsize=64)
def _adapter_weights(model_type: type[PreTrainedModel], settings: str, lora: LoraConfig) -> int:
    with FakeTensorMode():
        return count_adapter(_fake_model(model_type, settings, "float32", lora))


def adapter_weights(model: PreTrainedModel, lora: LoraConfig) -> int:
    return _adapter_weights(type(model), settings_of(model), lora)  # type: ignore[arg-type]


def settings_of(model: PreTrainedModel) -> str:
    return json.dumps(model.config.to_dict(), default=str, sort_keys=True)


def kv_bytes_per_token(model: PreTrainedModel, dtype: Dtype) -> int:
    return _kv_bytes(type(model), settings_of(model), dtype)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _kv_bytes(model_type: type[PreTrainedModel], settings: str, dtype: Dtype) -> int:
    with FakeTensorMode(), torch.no_grad():
        model = _fake_model(model_type, settings, dtype)
        ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.long)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // PROBE_TOKENS


def _fake_model(
    model_type: type[PreTrainedModel], settings: str, dtype: Dtype, lora: LoraConfig = NO_ADAPTER
) -> PreTrainedModel:
    values: Mapping[str, Any] = json.loads(settings)
    with quiet_transformers():
        config = model_type.config_class.from_dict(dict(values))  # type: ignore[union-attr]
        model = model_type(config).eval()
        if lora.rank:
            _add_fake_adapter(model, lora)
        return cast_parameters(model, dtype)


def _add_fake_adapter(model: PreTrainedModel, lora: LoraConfig) -> None:
    with torch.device("meta"):  # peft moves matrices on other devices, which fails for tensors without data
        add_adapter(model, lora, seed=0, base="")
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.device.type == "meta":
            layer.weight = nn.Parameter(torch.empty(layer.weight.shape))


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _AliveBytes(TorchDispatchMode):
    """A counter of the bytes of living tensors, from the operation that makes a tensor until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._alive: dict[int, int] = {}  # number of bytes by the id() of the storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._alive:
            self._alive[id(storage)] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, id(storage))

    def _free(self, key: int) -> None:
        self._now -= self._alive.pop(key)


log = logging.getLogger(__name__)

FLOAT32 = 4
GIB = 2**30

ADVISED_RANK = 16

MOMENT_BYTES: Mapping[OptimizerName, int] = {"adamw": 8, "adamw-8bit": 2}
"""The bytes of the two moments of one weight, by optimizer. Scales of 8-bit moments add less than 2 %."""

OVERHEAD = 1.1
"""The memory that allocators hold, divided by the memory of the tensors."""

KEPT = 192 * 2**20
"""The bytes of freed memory that the next pass cannot use again, because tensors of other sizes do not fit there."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A part of the memory that a run needs: its name, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a run needs with micro-batches of at most ``micro_tokens`` tokens."""

    micro_tokens: int
    copies: bool  # whether a checkpoint is copied in memory, so that training goes on while the copy is written
    activation_checkpointing: bool
    uses: tuple[MemoryUse, ...]

    @property
    def total(self) -> int:
        """The sum of all parts in bytes, with the overhead of allocators."""
        return int(OVERHEAD * sum(use.size for use in self.uses))

    def __str__(self) -> str:
        return f"{_gib(self.total)} ({', '.join(f'{use.name} {_gib(use.size)}' for use in self.uses)})"


def plan_memory(model: PreTrainedModel, config: TrainConfig, context: int, available: int) -> MemoryPlan:
    """Return the memory that a run needs to train ``model``, with the largest micro-batches that fit.

    If none fit, training waits while a checkpoint is written, which saves the memory of its copy. If that is not
    enough, activations are computed twice.
    """
    shares = shares_prefixes(config.trainer, config.algorithm, [model])
    twice = (
        _with(config, {"trainer.activation_checkpointing": True}) if model.supports_gradient_checkpointing else config
    )
    for settings, copies in ((config, True), (config, False), (twice, False)):
        for tokens in _candidates(config, context):
            plan = _plan(model, settings, context, tokens, shares, copies)
            if plan.total <= available:
                return plan
    got = f"{_gib(available)} free, but at least {plan} are needed"
    raise InvalidInput("memory", got=got, do=_remedy(model, twice, context, available, shares))


def _candidates(config: TrainConfig, context: int) -> Iterator[int]:
    tokens = config.trainer.micro_tokens
    while tokens > context:
        yield tokens
        tokens //= 2
    yield min(config.trainer.micro_tokens, context)


def _plan(
    model: PreTrainedModel, config: TrainConfig, context: int, tokens: int, shares: bool, copies: bool = False
) -> MemoryPlan:
    uses = (*_uses_for_weights(model, config, copies), *_uses_for_tokens(model, config, context, tokens, shares))
    checkpointing = config.trainer.activation_checkpointing
    return MemoryPlan(tokens, copies, checkpointing, tuple(use for use in uses if use.size))


def _uses_for_tokens(
    model: PreTrainedModel, config: TrainConfig, context: int, tokens: int, shares: bool
) -> Iterator[MemoryUse]:
    if config.engine.backend == "embedded" and config.acts:
        attempts = min(config.concurrency, config.groups_per_step * config.group_size)
        rows = -(-attempts // config.engine.max_sequences) * config.engine.max_sequences
        is_native = wants_native(config.engine.decode_step, model) and find_compiler() is not None
        cached = "float32" if is_native else config.engine.dtype
        cache = rows * context * _without_data(model, lambda: kv_bytes_per_token(model, cached))
        yield MemoryUse("KV cache", min(cache, kv_cache_bytes(config.engine, model.device)))
        if is_native:
            size = DTYPES[config.engine.dtype].itemsize * _count_weights(model)
            yield MemoryUse("weights in the layout of the decode step", size)
    largest = max(tokens, context)  # the longest sequence is a micro-batch, also if it is longer than ``tokens``
    size = _without_data(model, lambda: pass_bytes(pass_shape(model, config, context, largest, shares)))
    passes = config.trainer.ranks if model.device.type == "cpu" else 1  # each rank has a GPU, or a part of one memory
    yield MemoryUse(f"micro-batches of {largest} tokens", passes * size)
    yield MemoryUse("freed and kept", passes * min(size, KEPT))
    if config.trainer.lora.rank:  # the merged model is made when no micro-batch is in memory
        yield MemoryUse("merged model", max(0, FLOAT32 * _count_weights(model) - size))


def _uses_for_weights(model: PreTrainedModel, config: TrainConfig, copies: bool) -> Iterator[MemoryUse]:
    needs, kl, lora = config.algorithm.needs, config.algorithm.kl, config.trainer.lora
    computed = DTYPES[config.trainer.dtype].itemsize
    served = DTYPES[config.engine.dtype].itemsize if config.acts else 0  # the engine's own weights
    parameters, on_cpu = _count_weights(model), model.device.type == "cpu"
    trained = 1 + ("critic" in needs)
    computing = trained * computed if config.trainer.dtype != "float32" else 0
    changing = kl is not None and kl.sync_steps > 0 and config.trainer.dtype != "float32"
    changed = served + computing + (trained - 1 + changing) * FLOAT32  # bytes for each weight that training changes
    if lora.rank:  # policy, critic, reference and an engine of the same type share the frozen weights
        frozen = ((served not in (0, computed)) * served + ("teacher" in needs) * computed) * parameters
        size = _without_data(model, lambda: adapter_weights(model, lora))
    else:
        frozen = (("reference" in needs) + ("teacher" in needs)) * computed * parameters
        size = parameters
    ranks = config.trainer.ranks
    if ranks > 1:  # the policy is whole in the process of the run, and each rank has whole models when it starts
        whole = trained + ("reference" in needs) + ("teacher" in needs)
        yield MemoryUse("models of the ranks", whole * FLOAT32 * parameters * (ranks if on_cpu else 1))
    parts = 1 if on_cpu else ranks  # each GPU has a part of what the ranks share
    yield MemoryUse("further weights", frozen + changed * size)
    moments = MOMENT_BYTES[config.trainer.optimizer] * trained * size
    yield MemoryUse("gradients and moments", (trained * FLOAT32 * size + moments) // parts)
    if on_cpu:  # the copies are in CPU memory, which a GPU does not use
        checkpoint = (trained * FLOAT32 * size + moments) * copies * (config.checkpoint_every > 0)
        best = FLOAT32 * size * (config.evaluate_every > 0 and config.checkpoint_every == 0)
        yield MemoryUse("copies to save", checkpoint + best)


def _count_weights(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters()) - count_adapter(model)


def _without_data(model: PreTrainedModel, compute: Callable[[], int]) -> int:
    try:
        return compute()
    except InvalidInput:
        raise
    except (
        Exception
    ) as error:  # some models have operations that depend on the data, and raise various errors without data
        name, reason = type(model).__name__, type(error).__name__
        log.warning("the memory of %s cannot be estimated (%s): its micro-batches may not fit", name, reason)
        return 0


def pass_shape(model: PreTrainedModel, config: TrainConfig, context: int, tokens: int, shares: bool) -> PassShape:
    """Return what determines the memory of a forward and backward pass over ``tokens`` tokens."""
    # on a CPU, attempts that share prefixes become a single row, and their attention needs no mask
    by_parts = shares and may_use_tree_attention(model)
    length = tokens if by_parts else min(max(context, MAX_TREE) if shares else context, tokens)
    return PassShape(
        model_type=type(model),
        settings=settings_of(model),
        lora=config.trainer.lora,
        dtype=config.trainer.dtype,
        device=model.device.type,
        checkpointing=config.trainer.activation_checkpointing,
        with_critic="critic" in config.algorithm.needs,
        with_mask=not by_parts and (shares or config.context_policy.name != "append"),
        rows=max(1, tokens // length),
        length=length,
    )


def _remedy(model: PreTrainedModel, config: TrainConfig, context: int, available: int, shares: bool) -> str:
    do = "take a smaller model, or a machine with more memory"
    one_sequence = context * _without_data(model, lambda: kv_bytes_per_token(model, "bfloat16")) / GIB
    steps: list[dict[str, Any]] = [
        {"trainer.dtype": "bfloat16", "engine.dtype": "bfloat16"},
        {"engine.decode_step": "torch"} if wants_native(config.engine.decode_step, model) else {},
        {"engine.kv_cache_gib": max(0.1, round(2 * one_sequence, 1))},
        {} if config.trainer.lora.rank or find_spec("peft") is None else {"trainer.lora.rank": ADVISED_RANK},
    ]
    given: dict[str, Any] = {}
    for step in steps:
        given |= step
        if _plan(model, _with(config, given), context, context, shares).total <= available:
            return f"give {_options(given)}, or {do}"
    shorter = context
    while (shorter := shorter // 2) >= 64:
        if _plan(model, _with(config, given), shorter, shorter, shares).total <= available:
            return f"give {_options({'context': shorter, **given})}, or {do}"
    return do


def _with(config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    for key, value in settings.items():
        *sections, name = key.split(".")
        update = {name: value}
        for depth in range(len(sections), 0, -1):
            section = reduce(getattr, sections[:depth], config)
            update = {sections[depth - 1]: section.model_copy(update=update)}
        config = config.model_copy(update=update)
    return config


def _options(settings: Mapping[str, Any]) -> str:
    return " ".join(f"--{key} {str(value).lower()}" for key, value in settings.items())


def available_memory(device: torch.device, root: Path = Path("/")) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_machine_memory(root), *_group_memory(root))


def _machine_memory(root: Path) -> int:
    try:
        lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text("ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024  # given in kB
    except (OSError, KeyError, ValueError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_memory(root: Path) -> list[int]:
    free = []
    for base, limit, used in (
        (root / "sys/fs/cgroup", "memory.max", "memory.current"),
        (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in _groups(root, base):
            try:
                limited, taken = int((folder / limit).read_text("utf-8")), int((folder / used).read_text("utf-8"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text("utf-8").splitlines())
                # The kernel frees inactive pages of files when memory is short.
                cached = int(stat.get("inactive_file", stat.get("total_inactive_file", "0")))
            except (OSError, ValueError):  # the group does not exist, or has no limit ("max")
                continue
            free.append(max(0, limited - taken + cached))
    return free or [_machine_memory(root)]


def _groups(root: Path, base: Path) -> Iterator[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    paths = {line.split(":", 2)[2].strip("/") for line in lines if line.count(":") >= 2} | {""}
    for path in sorted(paths):
        folder = base / path
        yield folder
        while folder != base:
            folder = folder.parent
            yield folder


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
