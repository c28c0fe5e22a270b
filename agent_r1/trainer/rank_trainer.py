"""One rank of :class:`agent_r1.trainer.fsdp.FsdpTrainer`, with its parts of the models and of the optimizer's state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agent_r1.algorithms.registry import as_algorithm
from agent_r1.algorithms.types import StateValues, TopTokens
from agent_r1.core.errors import InvalidInput
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.micro_batches import by_sequence
from agent_r1.data.sequences import Block
from agent_r1.model.adapter import has_adapter, without_adapter
from agent_r1.model.device import set_product_precision
from agent_r1.model.tensor_files import write_rows
from agent_r1.model.value_head import ValueModel, build_value_model
from agent_r1.model.weights import cast_parameters, checkpoint_activations
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.forward_backward import blocks_of, forward_backward
from agent_r1.trainer.oom_retry import TokenBudget
from agent_r1.trainer.optimizer import Optimizer, ParameterGroup, full_tensor, overwrite
from agent_r1.trainer.protocol import CRITIC, POLICY, Module, OptimStats, PassStats, PreparedBatch, Role
from agent_r1.trainer.rank_memory import MemoryAgreement
from agent_r1.trainer.sharding import (
    OneForward,
    PaddingModelSet,
    ShardedModelSet,
    own_rows,
    read_part,
    shard_critic,
    shard_model,
)
from agent_r1.trainer.single_process import syncs_reference

T = TypeVar("T")


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
        called = [*roots.values(), *([] if self._critic is None else [self._critic])]
        self._memory = MemoryAgreement(called, device)
        self._models, self._padding = (
            model_set(
                policy=model,
                temperature=settings.temperature,
                micro_tokens=config.micro_tokens,
                critic=self._critic,
                reference=self._reference,
                teacher=teacher,
                roots=roots,
                rank=self._rank,
                ranks=dist.get_world_size(),
                memory=self._memory,
            )
            for model_set in (ShardedModelSet, PaddingModelSet)
        )
        self._budget = TokenBudget(config.micro_tokens)
        groups = {POLICY: ParameterGroup(model, config.learning_rate)}
        if self._critic is not None:
            groups[CRITIC] = ParameterGroup(self._critic, config.critic_learning_rate)
        self._optimizer = Optimizer(groups, config.betas, config.weight_decay, config.max_grad_norm, config.optimizer)

    def logprobs(self, batch: TrainingBatch, role: Role) -> Tensor:
        return self._within_memory(by_sequence(batch.sequences), lambda models: models.logprobs(batch, role))

    def entropy(self, batch: TrainingBatch) -> Tensor:
        return self._within_memory(by_sequence(batch.sequences), lambda models: models.entropy(batch))

    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        return self._within_memory(by_sequence(batch.sequences), lambda models: models.top_tokens(batch, count))

    def values(self, batch: TrainingBatch) -> StateValues:
        return self._within_memory(by_sequence(batch.sequences), lambda models: models.values(batch))

    def forward_backward(self, batch: PreparedBatch, scale: float, modules: Collection[Module]) -> PassStats:
        """Compute the gradient of the batch's loss, multiplied by ``scale``, for the parameters of ``modules``.

        All ranks together compute the gradient. This rank keeps only its own part of the gradient. Return statistics of
        this rank's share of the sequences.
        """
        return self._within_memory(
            blocks_of(batch.batch.sequences, self._algorithm),
            lambda models: forward_backward(models, self._algorithm, batch, scale, modules),
        )

    def micro_tokens(self) -> int:
        return self._budget.tokens

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
        """Replace the policy's trained weights by ``weights``, which are not divided among the ranks.

        This rank copies only its own part of each tensor.
        """
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
        """Replace the trainer's state.

        Args:
            tensors: the new tensors, which are not divided among the ranks. This rank copies only its own part of each
                tensor. If the tensors are in files (:class:`TensorFiles`), this rank also reads only its own parts.
            micro_tokens: the new maximum number of tokens in a micro-batch.
        """
        self._overwrite(self._tensors(), tensors)
        self._budget.tokens = micro_tokens

    def _within_memory(self, blocks: Sequence[Block], work: Callable[[ShardedModelSet], T]) -> T:
        """Return ``work(models)``, the result of a pass over this rank's share of ``blocks``.

        If memory runs out on a rank, all ranks repeat the pass with smaller micro-batches.
        """
        return self._budget.run(
            lambda tokens: self._memory.run(
                lambda: work(replace(self._models, micro_tokens=tokens)), lambda: work(self._padding)
            ),
            lambda tokens: self._models.largest_micro_batch(blocks, tokens),
            self._optimizer.clear_gradients,
        )

    def _tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors of the trainer's state by name, without copying them."""
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
        """Gather one tensor after another from all ranks. Return the whole tensors on rank 0, and {} on other ranks."""
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
