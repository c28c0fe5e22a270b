"""Sharding by FSDP2: each rank keeps a part of every weight, and gathers whole layers only while it computes them.

``torch.distributed.fsdp.fully_shard`` gathers the weights of a module when the module's ``forward`` is called, and
sums the gradients of all ranks after the module's backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_r1.core.weights import Dtype
from agent_r1.data.micro_batches import MicroBatch, PassPlan, make_micro_batches
from agent_r1.data.sequences import Block
from agent_r1.model.tensor_files import Rows, TensorFiles
from agent_r1.model.value_head import ValueModel
from agent_r1.model.weights import DTYPES, compute_float32_logits
from agent_r1.trainer.forward_backward import ModelSet, Work
from agent_r1.trainer.rank_memory import MemoryAgreement

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
    """Divide the weights of ``critic`` among the ranks, in place.

    The backbone computes in ``dtype``, and the head in the data type of its weights.
    """
    _shard_layers(critic, mesh, dtype)
    _shard(critic.head, mesh, "float32")
    _shard(critic, mesh, dtype)


def _shard_layers(model: nn.Module, mesh: DeviceMesh, dtype: Dtype) -> None:
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            _shard(module, mesh, dtype)


def _shard(module: nn.Module, mesh: DeviceMesh, dtype: Dtype) -> None:
    """Divide the weights of ``module`` among the ranks. Submodules that are already divided are left out.

    If ``dtype`` is "float32", no data type is converted: the module computes in the data type of its weights, and
    gradients are summed in the data type of the weights. With any other ``dtype``, the module computes in ``dtype``,
    and gradients are summed in float32.
    """
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

    The result has the data type and the device of ``target``. If ``target`` is not divided, return ``tensor``
    unchanged.
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
    memory: MemoryAgreement

    def call(self, model: PreTrainedModel, work: Work[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        return self.roots[model](work, *arguments, **options)

    def plan(self, blocks: Sequence[Block]) -> PassPlan:
        own = list(make_micro_batches(share_blocks(blocks, self.ranks)[self.rank], self.micro_tokens))
        count = torch.tensor(len(own))
        dist.all_reduce(count, dist.ReduceOp.MAX)
        padding = repeat(padding_micro_batch(), int(count) - len(own))
        return PassPlan(torch.zeros(0, dtype=torch.int64), self.memory.micro_batches(chain(own, padding)))

    def largest_micro_batch(self, blocks: Sequence[Block], micro_tokens: int) -> int:
        """Return the size, in tokens with padding, of the largest micro-batch of any rank in a pass over ``blocks``."""
        shares = share_blocks(blocks, self.ranks)
        return max(micro.padded_size for share in shares for micro in make_micro_batches(share, micro_tokens))


class PaddingModelSet(ShardedModelSet):
    """The sharded models of one rank. Each pass reads a single padding token, instead of the sequences.

    A rank runs such a pass if its memory ran out in a micro-batch. The only purpose is to take part in the exchanges of
    tensors: the other ranks cannot finish the micro-batch without these exchanges.
    """

    def plan(self, blocks: Sequence[Block]) -> PassPlan:
        return PassPlan(torch.zeros(0, dtype=torch.int64), iter([padding_micro_batch().to(self.policy.device)]))
