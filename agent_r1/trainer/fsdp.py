"""A trainer in several processes (ranks), among which FSDP2 divides the models."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import chain, repeat
from operator import methodcaller
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.registry import as_algorithm, own_modules
from agent_r1.algorithms.types import StateValues, TopTokens
from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import Dtype, PolicyVersion, WeightUpdate
from agent_r1.core.profile import measure
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.sequences import Block, MicroBatch, make_micro_batches
from agent_r1.model.adapter import has_adapter, load_trained_weights, without_adapter
from agent_r1.model.forward import supports_tree_mask
from agent_r1.model.value_head import ValueModel, build_value_model
from agent_r1.model.weights import (
    DTYPES,
    Rows,
    TensorFiles,
    cast_parameters,
    checkpoint_activations,
    compute_float32_logits,
    product_precision,
    set_product_precision,
    use_wide_products,
    weights_checksum,
    write_rows,
)
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.forward_backward import FreedMemory, ModelSet, Work, explain_oom, forward_backward, join_passes
from agent_r1.trainer.optimizer import Optimizer, full_tensor, overwrite
from agent_r1.trainer.protocol import (
    CRITIC,
    MODULES,
    POLICY,
    Module,
    OptimStats,
    PassStats,
    PreparedBatch,
    Role,
    TrainerState,
)
from agent_r1.trainer.rank_files import OwnFiles, fetch_file, send_files
from agent_r1.trainer.ranks import RankGroup
from agent_r1.trainer.single_process import (
    check_models,
    check_state,
    describe_arithmetic,
    make_reference,
    state_tensors,
)

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
    """Divide the weights of ``model`` among the ranks, and return the module by whose ``forward`` passes must run."""
    root = OneForward(model)
    if dtype != "float32":
        compute_float32_logits(model)
        use_wide_products(model)
    _shard_layers(model, mesh, dtype)
    _shard(root, mesh, dtype)
    return root


def shard_critic(critic: ValueModel, mesh: DeviceMesh, dtype: Dtype) -> None:
    """Divide the weights of ``critic`` among the ranks, in place."""
    if dtype != "float32":
        use_wide_products(critic, keep=("head",))
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


def own_rows(tensor: DTensor) -> Rows:
    """Return the rows of ``tensor``, divided by rows, that this rank holds, with their place in the whole tensor."""
    assert tensor.placements == (Shard(0),)
    rows, total = tensor.to_local().detach(), tensor.shape[0]
    size = math.ceil(total / tensor.device_mesh.size())
    return Rows(rows, min(tensor.device_mesh.get_local_rank() * size, total), total)


def read_part(saved: Mapping[str, Tensor], name: str, target: Tensor) -> Tensor:
    """Return the tensor ``name`` of ``saved``, divided among the ranks like ``target``."""
    if not isinstance(target, DTensor):
        return saved[name]
    mesh, placements = target.device_mesh, target.placements
    if not isinstance(saved, TensorFiles) or saved.shape(name) != target.shape:
        return distribute_tensor(saved[name].to(target.device, target.dtype), mesh, placements, src_data_rank=None)
    own = own_rows(target)  # each rank reads only its own rows from the files
    rows = saved.rows(name, own.first, own.first + len(own.tensor)).to(target.device, target.dtype)
    return DTensor.from_local(rows, mesh, placements, shape=target.shape, stride=target.stride())


def share_blocks(blocks: Sequence[Block], ranks: int) -> list[list[Block]]:
    """Divide blocks among the ranks, so that each has about the same number of tokens, perhaps none."""
    sizes = [sum(map(len, block)) for block in blocks]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    # each block, the longest first, goes to the rank with the fewest tokens so far
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
    """The sharded models of one rank. A pass reads only this rank's sequences, through the module in ``roots``."""

    roots: Mapping[nn.Module, OneForward]
    rank: int
    ranks: int

    def call(self, model: PreTrainedModel, work: Work[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        return self.roots[model](work, *arguments, **options)

    def plan(self, blocks: Sequence[Block]) -> tuple[Tensor, Iterator[MicroBatch]]:
        own = list(make_micro_batches(share_blocks(blocks, self.ranks)[self.rank], self.micro_tokens))
        # FSDP exchanges weights and gradients in each micro-batch, so all ranks need the same number of them
        count = torch.tensor(len(own))
        dist.all_reduce(count, dist.ReduceOp.MAX)
        padding = repeat(padding_micro_batch(), int(count) - len(own))
        device = self.policy.device
        return torch.zeros(0, dtype=torch.int64), (micro.to(device) for micro in chain(own, padding))


class RankTrainer:
    """The part of a trainer that one rank runs. All ranks must call the same methods together.

    A pass over a batch reads only this rank's share of the sequences. The result of a pass is 0 at each token that this
    rank did not read. So the sum of the results of all ranks is the result for the batch.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        algorithm: Mapping[str, object],
        modules: Sequence[str],
        config: TrainerConfig,
        temperature: float,
        teacher: PreTrainedModel | None,
        device: str,
        threads: int,
        random_state: Tensor,
        tf32: bool,
    ) -> None:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)  # all ranks draw the same new weights of a critic
        set_product_precision(device, tf32)
        for module in modules:  # they define components of the algorithm
            _import(module)
        self._algorithm, self._rank, ranks = as_algorithm(algorithm, ""), dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh(device, (ranks,))
        # the device that the rank chose when it joined: its index counts the GPUs that this process sees
        place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        # order: copy the models, then switch on checkpointing, then shard, then make the optimizer
        model = model.eval().to(place)
        critic: ValueModel | None = None
        reference: PreTrainedModel | None = None
        if "critic" in self._algorithm.needs:  # copied, because modules with common weights cannot be sharded
            critic = copy.deepcopy(build_value_model(model, config.critic_reads_logprobs))
        if "reference" in self._algorithm.needs:
            plain = without_adapter(model) if has_adapter(model) else model
            reference = copy.deepcopy(plain).requires_grad_(False)
            if not self._algorithm.syncs_reference:
                cast_parameters(reference, config.dtype)
        if teacher is not None:
            teacher = cast_parameters(teacher.eval().requires_grad_(False), config.dtype).to(place)
        if config.activation_checkpointing:
            for trained in filter(None, (model, critic)):
                checkpoint_activations(trained, type(model).__name__)

        roots: dict[nn.Module, OneForward] = {}
        for one in (model, reference, teacher):
            if one is not None:
                roots[one] = shard_model(one, mesh, config.dtype)
        trained_modules: dict[Module, nn.Module] = {POLICY: model}
        if critic is not None:
            shard_critic(critic, mesh, config.dtype)
            trained_modules[CRITIC] = critic
        self._models = ShardedModelSet(
            policy=model,
            temperature=temperature,
            micro_tokens=config.micro_tokens,
            critic=critic,
            reference=reference,
            teacher=teacher,
            roots=roots,
            rank=self._rank,
            ranks=ranks,
        )
        self._optimizer = Optimizer(trained_modules, config)
        self._freed_memory = FreedMemory()
        self.files, self._sees = OwnFiles(), True

    def run(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method. A rank without memory cannot repeat a pass alone, because ranks exchange tensors in every
        layer.
        """
        work = f"rank {self._rank} of the trainer, in passes of {self._models.micro_tokens} tokens"
        do = "give a smaller --trainer.micro_tokens, and continue the run from its last checkpoint with --resume"
        with explain_oom(work, do):
            result = methodcaller(method, *arguments)(self)
        self._freed_memory.give_back()
        return result

    def run_files(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of this rank's files."""
        return methodcaller(method, *arguments)(self.files)

    def read(self, method: str, *arguments: object) -> Any:
        """Call a method of the models, which reads a batch without gradients."""
        return methodcaller(method, *arguments)(self._models)

    def forward_backward(self, batch: PreparedBatch, scale: float, modules: Collection[Module]) -> PassStats:
        return forward_backward(self._models, self._algorithm, batch, scale, modules)

    def optim_step(self, loss: Tensor, modules: Collection[Module], learning_rate_factor: float) -> OptimStats:
        """Take an optimizer step on this rank's part of the weights. ``loss`` is the loss of the whole batch."""
        return self._optimizer.step(loss, modules, learning_rate_factor)

    def sync_reference(self, alpha: float) -> None:
        assert self._models.reference is not None
        pairs = zip(self._models.reference.parameters(), self._models.policy.parameters(), strict=True)
        with torch.no_grad():
            for reference, policy in pairs:
                reference.mul_(1 - alpha).add_(policy.detach(), alpha=alpha)

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights of the policy on the CPU, by name. All ranks except rank 0 return {}."""
        gathered = {}
        for name, tensor in self._trained_weights().items():
            whole = full_tensor(tensor.detach())  # all ranks take part
            if self._rank == 0:
                gathered[name] = whole.to("cpu", copy=True)
        return gathered

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the policy's trained weights by ``weights``, which are not divided among the ranks."""
        self._overwrite(self._trained_weights(), weights)

    def save_state(self, folder: Path) -> Path:
        """Write this rank's parts of the trainer's state to a file, and return its path.

        The file is in ``folder``, or in an own folder if this machine does not see ``folder``.
        """
        tensors = self._tensors()
        # rank 0 also writes the tensors that are not divided
        divided = {name: own_rows(tensor) for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        whole = {name: tensor for name, tensor in tensors.items() if self._rank == 0 and name not in divided}
        place = folder if folder.is_dir() else self.files.folder()
        path = place / f"trainer-{self._rank + 1:05}-of-{dist.get_world_size():05}.safetensors"
        write_rows(path, divided, whole)
        return path

    def sees(self, files: Mapping[Path, tuple[int, int]]) -> bool:
        """Return whether this machine sees the files, given with their sizes and times: no others of their names."""
        self._sees = all(path.is_file() and file_stamp(path) == stamp for path, stamp in files.items())
        return self._sees

    def load_state(self, tensors: Mapping[str, Tensor], micro_tokens: int) -> None:
        """Replace the state. Files that this machine does not see (:meth:`sees`) were sent before."""
        if isinstance(tensors, TensorFiles) and not self._sees:
            tensors = TensorFiles([self.files.folder() / path.name for path in tensors.files])
        self._overwrite(self._tensors(), tensors)
        self.files.drop()
        self._models = replace(self._models, micro_tokens=micro_tokens)

    def _trained_weights(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in self._models.policy.named_parameters() if weight.requires_grad}

    def _tensors(self) -> dict[str, Tensor]:
        reference = self._models.reference if self._algorithm.syncs_reference else None
        return state_tensors(self._models.critic, reference, self._optimizer)

    def _overwrite(self, target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
        parts = {name: read_part(source, name, target[name]) if name in target else source[name] for name in source}
        overwrite(target, parts)


def _import(module: str) -> None:
    try:
        import_module(module)
    except Exception as error:  # the module can raise any error
        got = f"components of the module {module}, which a rank cannot import ({type(error).__name__}: {error})"
        do = "define them in a module that python -c 'import ..' finds, or give trainer.ranks 1"
        raise InvalidInput("algorithm", got=got, do=do) from error


class FsdpTrainer:
    """A trainer in several processes, called ranks. See :class:`agent_r1.trainer.protocol.TrainerBackend`.

    Each rank keeps a part of every weight, gradient and optimizer moment. Each rank computes the loss on a part of the
    sequences. The process that creates the trainer is not a rank. This process keeps ``model`` whole, and
    :meth:`publish` copies the trained weights into ``model``.
    """

    def __init__(
        self,
        ranks: RankGroup[RankTrainer],
        model: PreTrainedModel,
        algorithm: Algorithm,
        config: TrainerConfig,
        *,
        temperature: float,
        teacher: PreTrainedModel | None = None,
        threads: int = 1,
    ) -> None:
        check_models(algorithm, temperature, teacher)
        if torch.__version__ < "2.13":  # FSDP2 changes much, and no earlier version was tested
            raise InvalidInput("trainer.ranks", got=f"several, with torch {torch.__version__}", do="install torch 2.13")
        self._ranks, self._model, self._algorithm, self._config = ranks, model.eval(), algorithm, config
        self._tree_attention = supports_tree_mask(model)
        self._checksum: str | None = None  # of the policy's current weights; None: not computed
        self._micro_tokens = config.micro_tokens
        self._is_copied = True  # whether the model in this process has the current weights
        self._last_pass: tuple[Tensor, frozenset[Module]] | None = None  # the loss and the modules of the gradients
        self._reference_checksum = ""
        if "reference" in algorithm.needs:
            reference = make_reference(model, algorithm, config.dtype).weights
            self._reference_checksum = weights_checksum(reference)
            del reference  # the ranks have their own
        make = partial(
            RankTrainer,
            model=_on_cpu(model),
            algorithm=algorithm.model_dump(mode="json"),
            modules=own_modules(algorithm),
            config=config,
            temperature=temperature,
            teacher=None if teacher is None else _on_cpu(teacher),
            device=model.device.type,
            threads=threads,
            random_state=torch.get_rng_state(),
            tf32=product_precision("float32") == "tf32",
        )
        ranks.start(make)

    @property
    def micro_tokens(self) -> int:
        return self._micro_tokens

    @property
    def supports_tree_attention(self) -> bool:
        return self._tree_attention

    @property
    def arithmetic(self) -> str:
        return describe_arithmetic(False, None, self._config.dtype)

    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        return _sum(self._call("read", "logprobs", batch, role))

    def entropy(self, batch: TrainingBatch) -> Tensor:
        return _sum(self._call("read", "entropy", batch))

    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        parts = self._call("read", "top_tokens", batch, count)
        return TopTokens(_sum([part.ids for part in parts]), _sum([part.logprobs for part in parts]))

    def values(self, batch: TrainingBatch) -> StateValues:
        parts = self._call("read", "values", batch)
        return StateValues(_sum([part.before_token for part in parts]), _sum([part.after_action for part in parts]))

    def forward_backward(
        self, batch: PreparedBatch, *, scale: float = 1.0, modules: Collection[Module] = MODULES
    ) -> PassStats:
        stats = join_passes(self._call("forward_backward", batch, scale, frozenset(modules)))
        # several passes can accumulate their gradients for one optimizer step
        loss, before = self._last_pass or (0.0, frozenset())
        self._last_pass = (loss + stats.loss, before | frozenset(modules))
        return stats

    def optim_step(self, learning_rate_factor: float = 1.0) -> OptimStats:
        if self._last_pass is None:
            raise RuntimeError("optim_step needs the gradients of a forward_backward")
        loss, modules = self._last_pass
        self._last_pass = None
        first, *others = self._call("optim_step", loss, modules, learning_rate_factor)
        assert all(other.applied == first.applied for other in others), "the ranks took different optimizer steps"
        if first.applied and POLICY in modules:
            self._is_copied, self._checksum = False, None
        return first

    def sync_reference(self, alpha: float) -> None:
        self._call("sync_reference", alpha)

    def publish(self, number: int, step: int) -> WeightUpdate:
        every = self._config.checksum_every
        checksum = self._current_checksum() if every > 0 and step % every == 0 else None
        return WeightUpdate(PolicyVersion(number, step, checksum), "shared_memory", self._current_model())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        load_trained_weights(self._model, weights)
        self._is_copied, self._checksum = True, None
        trained = {name: p.detach().cpu() for name, p in self._model.named_parameters() if p.requires_grad}
        self._call("load_weights", trained)

    def state(self, folder: Path | None = None, *, copy: bool = True) -> TrainerState:
        """Return a copy of the trainer's state: each rank writes its parts of the tensors to a file in ``folder``."""
        scalars: dict[str, int | float | str] = {
            "policy": self._current_checksum(),
            "reference": self._reference_checksum,
            "micro_tokens": self.micro_tokens,
        }
        place = Path(tempfile.mkdtemp(prefix="agent-r1-")) if folder is None else folder.absolute()
        place.mkdir(parents=True, exist_ok=True)
        written: list[Path] = self._call("save_state", place)
        for rank, path in enumerate(written):
            if path.parent != place:  # the rank's machine does not see the folder
                fetch_file(partial(self._call_files, rank, "read"), place / path.name)
                self._call_files(rank, "drop")
        tensors = TensorFiles([place / path.name for path in written])
        if folder is None:
            weakref.finalize(tensors, shutil.rmtree, place, ignore_errors=True)
        return TrainerState(tensors, scalars)

    def load_state(self, state: TrainerState) -> None:
        check_state(state, self._algorithm, self._current_checksum(), self._reference_checksum)
        # a smaller saved maximum stays in force, for the reason given in SingleProcessTrainer.load_state
        self._micro_tokens = min(int(state.scalars["micro_tokens"]), self._config.micro_tokens)
        tensors = state.tensors if isinstance(state.tensors, TensorFiles) else dict(state.tensors)
        if isinstance(tensors, TensorFiles):
            for rank, sees in enumerate(self._call("sees", {path: file_stamp(path) for path in tensors.files})):
                if not sees:
                    send_files(partial(self._call_files, rank, "write"), tensors.files)
        self._call("load_state", tensors, self._micro_tokens)

    def close(self) -> None:
        self._ranks.close()

    def _call(self, method: str, *arguments: object) -> list[Any]:
        with measure("ranks"):
            return self._ranks.call(methodcaller("run", method, arguments))

    def _call_files(self, rank: int, method: str, *arguments: object) -> Any:
        return self._ranks.call_one(rank, methodcaller("run_files", method, arguments))

    def _current_model(self) -> PreTrainedModel:
        if not self._is_copied:
            weights = self._call("weights")[0]
            with torch.no_grad():
                parameters = dict(self._model.named_parameters())
                for name, weight in weights.items():
                    parameters[name].copy_(weight)
            self._is_copied = True
        return self._model

    def _current_checksum(self) -> str:
        if self._checksum is None:
            self._checksum = weights_checksum(self._current_model())
        return self._checksum


def file_stamp(path: Path) -> tuple[int, int]:
    """Return the size of a file in bytes, and the time of its last change in nanoseconds."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _on_cpu(model: PreTrainedModel) -> PreTrainedModel:
    return model if model.device.type == "cpu" else copy.deepcopy(model).cpu()
