"""One rank of :class:`agent_r1.trainer.fsdp.FsdpTrainer`, with its parts of the models and of the optimizer's state."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain, repeat
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_r1.algorithms.registry import as_algorithm
from agent_r1.algorithms.types import StateValues, TopTokens
from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import Dtype
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.micro_batches import MicroBatch, PassPlan, make_micro_batches
from agent_r1.data.sequences import Block
from agent_r1.model.adapter import has_adapter, without_adapter
from agent_r1.model.value_head import ValueModel, build_value_model
from agent_r1.model.weights import (
    DTYPES,
    Rows,
    TensorFiles,
    cast_parameters,
    checkpoint_activations,
    compute_float32_logits,
    set_product_precision,
    write_rows,
)
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.forward_backward import ModelSet, Work, forward_backward
from agent_r1.trainer.oom_retry import FreedMemory, explain_oom
from agent_r1.trainer.optimizer import Optimizer, ParameterGroup, full_tensor, overwrite
from agent_r1.trainer.protocol import CRITIC, POLICY, Module, OptimStats, PassStats, PreparedBatch, Role
from agent_r1.trainer.single_process import syncs_reference

P = ParamSpec("P")
T = TypeVar("T")


class OneForward(nn.Module):
    """A module that runs a whole pass of its model inside one call of ``forward``.

    FSDP gathers the weights of a module at the beginning of ``forward``, and frees the weights at the end. Backbone and
    head can use the same weights (tied embeddings). So the weights must stay gathered until the head has run.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Work[P, T], /, *arguments: P.args, **options: P.kwargs) -> T:
        return work(self.model, *arguments, **options)


def shard_model(model: PreTrainedModel, mesh: DeviceMesh, dtype: Dtype) -> OneForward:
    """Divide the weights of ``model`` among the ranks, in place. Return a new module that contains ``model``.

    Run each pass of the model by a call of the new module, whose ``forward`` gathers the divided weights.
    """
    root = OneForward(model)
    if dtype != "float32":
        compute_float32_logits(model)
    _shard_layers(model, mesh, dtype)
    _shard(root, mesh, dtype)
    return root


def shard_critic(critic: ValueModel, mesh: DeviceMesh, dtype: Dtype) -> None:
    """Divide the weights of ``critic`` among the ranks, in place."""
    _shard_layers(critic, mesh, dtype)
    _shard(critic.head, mesh, "float32")
    _shard(critic, mesh, dtype)


def _shard_layers(model: nn.Module, mesh: DeviceMesh, dtype: Dtype) -> None:
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            _shard(module, mesh, dtype)


def _shard(module: nn.Module, mesh: DeviceMesh, dtype: Dtype) -> None:
    policy = MixedPrecisionPolicy()
    if dtype != "float32":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    # Without resharding after the forward pass, weights would stay gathered after a pass without a gradient, and the
    # pass after an optimizer step would read old weights.
    fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)  # loss weights are normalized over the batch: gradients are summed
    module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply by a factor while it sums


def like(tensor: Tensor, target: Tensor) -> Tensor:
    """Divide the whole tensor ``tensor`` among the ranks in the same way as ``target``. Return the divided tensor.

    If ``target`` is not divided, return ``tensor`` unchanged.
    """
    if not isinstance(target, DTensor):
        return tensor
    whole = tensor.to(target.device, target.dtype)
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def own_rows(tensor: DTensor) -> Rows:
    """Return the rows of ``tensor`` that this rank holds, with their place in the whole tensor.

    ``tensor`` is divided among the ranks by rows.
    """
    assert tensor.placements == (Shard(0),)
    rows, total = tensor.to_local().detach(), tensor.shape[0]
    size = math.ceil(total / tensor.device_mesh.size())
    return Rows(rows, min(tensor.device_mesh.get_local_rank() * size, total), total)


def read_part(saved: Mapping[str, Tensor], name: str, target: Tensor) -> Tensor:
    """Return the tensor ``name`` of ``saved``, divided among the ranks like ``target``.

    If ``saved`` is in files, each rank reads only its own rows.
    """
    if not (isinstance(saved, TensorFiles) and isinstance(target, DTensor) and saved.shape(name) == target.shape):
        return like(saved[name], target)
    own = own_rows(target)
    rows = saved.rows(name, own.first, own.first + len(own.tensor)).to(target.device, target.dtype)
    return DTensor.from_local(rows, target.device_mesh, target.placements, shape=target.shape, stride=target.stride())


def share_blocks(blocks: Sequence[Block], ranks: int) -> list[list[Block]]:
    """Return a list of blocks for each rank, so that all ranks have about the same number of tokens.

    A block is a list of sequences that must be in the same micro-batch. Each block, the longest first, goes to the rank
    with the fewest tokens so far. The list of a rank can be empty.
    """
    sizes = [sum(map(len, block)) for block in blocks]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(blocks)), key=lambda index: -sizes[index]):
        rank = tokens.index(min(tokens))
        shares[rank].append(index)
        tokens[rank] += sizes[index]
    return [[blocks[index] for index in sorted(share)] for share in shares]


def padding_micro_batch() -> MicroBatch:
    """Return a micro-batch of one token that predicts nothing. Its loss and gradients are 0."""
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        ids=torch.zeros((1, 1), dtype=torch.int64),
        position_ids=None,
        subtree_end=None,
        logit_positions=none,
        token_positions=none,
        tokens=none,
        post_action_states=none,
        turns=none,
        num_tokens=0,
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShardedModelSet(ModelSet):
    """The sharded models of one rank. A pass reads only the sequences of this rank.

    All ranks must run the same passes together. In a pass, all ranks have the same number of micro-batches.

    ``roots`` maps each model to the module that :func:`shard_model` returned. Each pass calls this module instead of
    the model.
    """

    roots: Mapping[nn.Module, OneForward]
    rank: int
    ranks: int

    def call(self, model: PreTrainedModel, work: Work[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        return self.roots[model](work, *arguments, **options)

    def plan(self, blocks: Sequence[Block]) -> PassPlan:
        own = list(make_micro_batches(share_blocks(blocks, self.ranks)[self.rank], self.micro_tokens))
        count = torch.tensor(len(own))
        dist.all_reduce(count, dist.ReduceOp.MAX)
        padding = repeat(padding_micro_batch(), int(count) - len(own))
        device = self.policy.device
        return PassPlan(torch.zeros(0, dtype=torch.int64), (micro.to(device) for micro in chain(own, padding)))


@dataclass(frozen=True, slots=True, eq=False)
class RankSettings:
    """The models and settings from which each rank makes its :class:`RankTrainer`. The models are on the CPU.

    Attributes:
        algorithm: the algorithm as plain data.
        modules: the names of the Python modules that define components of the algorithm.
        device: ``cpu`` or ``cuda``.
        random_state: the state of torch's random number generator, from which the new weights of a critic are drawn.
        tf32: whether GPUs multiply float32 matrices in TF32.
    """

    model: PreTrainedModel
    algorithm: Mapping[str, object]
    modules: tuple[str, ...]
    config: TrainerConfig
    temperature: float
    teacher: PreTrainedModel | None
    device: str
    threads: int
    random_state: Tensor
    tf32: bool


class RankTrainer:
    """The part of a trainer that one rank runs. All ranks must call the same methods together.

    A pass over a batch reads only this rank's share of the sequences. The result of a pass is 0 at each token that this
    rank did not read. So the sum of the results of all ranks is the result for the batch.
    """

    def __init__(self, settings: RankSettings) -> None:
        torch.set_num_threads(settings.threads)
        torch.set_rng_state(settings.random_state)
        set_product_precision(settings.device, settings.tf32)
        for module in settings.modules:
            _import(module)
        algorithm = as_algorithm(settings.algorithm, "")
        config, self._algorithm, self._rank = settings.config, algorithm, dist.get_rank()
        device = torch.device(f"cuda:{self._rank}" if settings.device == "cuda" else "cpu")
        mesh = init_device_mesh(settings.device, (dist.get_world_size(),))
        # order: copy the models, then switch on checkpointing, then shard, then make the optimizer
        model = settings.model.eval().to(device)
        self._critic: ValueModel | None = None
        self._reference: PreTrainedModel | None = None
        if "critic" in algorithm.needs:  # copied, because modules with common weights cannot be sharded
            self._critic = copy.deepcopy(build_value_model(model, config.critic_reads_logprobs))
        if "reference" in algorithm.needs:
            plain = without_adapter(model) if has_adapter(model) else model
            self._reference = copy.deepcopy(plain).requires_grad_(False)
            if not syncs_reference(algorithm):
                cast_parameters(self._reference, config.dtype)
        teacher = settings.teacher
        if teacher is not None:
            teacher = cast_parameters(teacher.eval().requires_grad_(False), config.dtype).to(device)
        if config.activation_checkpointing:
            for trained in filter(None, (model, self._critic)):
                checkpoint_activations(trained, type(model).__name__)

        roots: dict[nn.Module, OneForward] = {}
        for one in (model, self._reference, teacher):
            if one is not None:
                roots[one] = shard_model(one, mesh, config.dtype)
        if self._critic is not None:
            shard_critic(self._critic, mesh, config.dtype)
        self._policy = model
        self._models = ShardedModelSet(
            policy=model,
            temperature=settings.temperature,
            micro_tokens=config.micro_tokens,
            critic=self._critic,
            reference=self._reference,
            teacher=teacher,
            roots=roots,
            rank=self._rank,
            ranks=dist.get_world_size(),
        )
        self._freed_memory = FreedMemory()
        groups = {POLICY: ParameterGroup(model, config.learning_rate)}
        if self._critic is not None:
            groups[CRITIC] = ParameterGroup(self._critic, config.critic_learning_rate)
        self._optimizer = Optimizer(groups, config.betas, config.weight_decay, config.max_grad_norm, config.optimizer)

    def logprobs(self, batch: TrainingBatch, role: Role) -> Tensor:
        with self._memory():
            return self._models.logprobs(batch, role)

    def entropy(self, batch: TrainingBatch) -> Tensor:
        with self._memory():
            return self._models.entropy(batch)

    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        with self._memory():
            return self._models.top_tokens(batch, count)

    def values(self, batch: TrainingBatch) -> StateValues:
        with self._memory():
            return self._models.values(batch)

    def forward_backward(self, batch: PreparedBatch, scale: float, modules: Collection[Module]) -> PassStats:
        """Compute the gradient of the batch's loss, multiplied by ``scale``, for the parameters of ``modules``."""
        with self._memory():
            return forward_backward(self._models, self._algorithm, batch, scale, modules)

    def optim_step(self, loss: Tensor, modules: Collection[Module], learning_rate_factor: float) -> OptimStats:
        """Take an optimizer step on this rank's part of the weights. ``loss`` is the loss of the whole batch."""
        return self._optimizer.step(loss, modules, learning_rate_factor)

    def sync_reference(self, alpha: float) -> None:
        assert self._reference is not None
        with torch.no_grad():
            for reference, policy in zip(self._reference.parameters(), self._policy.parameters(), strict=True):
                reference.mul_(1 - alpha).add_(policy.detach(), alpha=alpha)

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights of the policy on the CPU, by name. All ranks except rank 0 return {}."""
        return self._gathered({name: p for name, p in self._policy.named_parameters() if p.requires_grad})

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the policy's trained weights by ``weights``, which are not divided among the ranks."""
        self._overwrite({name: p for name, p in self._policy.named_parameters() if p.requires_grad}, weights)

    def save_state(self, folder: Path) -> Path:
        """Write this rank's parts of the trainer's state to a file in ``folder``, and return the path of the file.

        Rank 0 also writes the tensors that are not divided. Raise AgentR1Error if the file cannot be written.
        """
        tensors = self._tensors()
        divided = {name: own_rows(tensor) for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        whole = {name: tensor for name, tensor in tensors.items() if self._rank == 0 and name not in divided}
        path = folder / f"trainer-{self._rank + 1:05}-of-{dist.get_world_size():05}.safetensors"
        write_rows(path, divided, whole)
        return path

    def load_state(self, tensors: Mapping[str, Tensor], micro_tokens: int) -> None:
        """Replace the trainer's state."""
        self._overwrite(self._tensors(), tensors)
        self._models = replace(self._models, micro_tokens=micro_tokens)

    @contextmanager
    def _memory(self) -> Iterator[None]:
        # FSDP exchanges tensors in every layer, so a rank without memory cannot repeat a pass alone. The error ends all
        # ranks, and the run continues from its last checkpoint.
        work = f"rank {self._rank} of the trainer, in passes of {self._models.micro_tokens} tokens"
        do = "lower --trainer.micro_tokens, and continue the run from its last checkpoint with --resume"
        with explain_oom(work, do):
            yield
        self._freed_memory.give_back()

    def _tensors(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        if self._critic is not None:
            critic = self._critic.named_parameters()
            weights |= {f"critic.{name}": tensor for name, tensor in critic if tensor.requires_grad}
        if self._reference is not None and syncs_reference(self._algorithm):
            weights |= {f"reference.{name}": tensor for name, tensor in self._reference.named_parameters()}
        return {**weights, **{f"optimizer.{name}": tensor for name, tensor in self._optimizer.tensors().items()}}

    def _overwrite(self, target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
        parts = {name: read_part(source, name, target[name]) if name in target else source[name] for name in source}
        overwrite(target, parts)

    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered = {}
        for name, tensor in tensors.items():
            whole = full_tensor(tensor.detach())  # all ranks take part
            if self._rank == 0:
                gathered[name] = whole.to("cpu", copy=True)
        return gathered


def _import(module: str) -> None:
    try:
        import_module(module)
    except Exception as error:  # the module can raise any error
        got = f"components of the module {module}, which a rank cannot import ({type(error).__name__}: {error})"
        do = "define them in a module that python -c 'import ..' finds, or give trainer.ranks 1"
        raise InvalidInput("algorithm", got=got, do=do) from error
