"""A trainer in several processes (ranks), among which FSDP2 divides the models."""

from __future__ import annotations

import copy
import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.registry import own_modules
from agent_r1.algorithms.types import StateValues, TopTokens
from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import PolicyVersion, WeightUpdate
from agent_r1.core.profile import measure
from agent_r1.data.batch import TrainingBatch
from agent_r1.model.adapter import load_trained_weights
from agent_r1.model.forward import supports_tree_mask
from agent_r1.model.weights import TensorFiles, product_precision, weights_checksum
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.protocol import (
    MODULES,
    POLICY,
    Module,
    OptimStats,
    PassStats,
    PreparedBatch,
    Role,
    TrainerState,
)
from agent_r1.trainer.rank_trainer import RankSettings, RankTrainer
from agent_r1.trainer.ranks import RankGroup
from agent_r1.trainer.forward_backward import join_passes
from agent_r1.trainer.single_process import describe_arithmetic, make_reference, syncs_reference


class FsdpTrainer:
    """A trainer that runs in several processes, called ranks. See :class:`agent_r1.trainer.protocol.Trainer`.

    Each rank keeps a part of every weight, gradient and optimizer moment. Each rank computes the loss on a part of the
    sequences. The process that creates the trainer is not a rank. This process keeps ``model`` whole, and
    :meth:`publish` copies the trained weights into ``model``.

    See :class:`agent_r1.trainer.single_process.SingleProcessTrainer` for the other arguments and errors.

    Args:
        ranks: the processes of the ranks. :meth:`close` ends these processes.
        threads: the number of torch threads of each rank.

    Raises:
        InvalidInput: the settings cannot be used with several ranks.
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
        if temperature <= 0:
            raise InvalidInput("temperature", got=temperature, do="train on samples drawn at a temperature above 0")
        if "teacher" in algorithm.needs and teacher is None:
            raise InvalidInput("teacher", got="none", do=f"name a model: {algorithm.name} learns from one")
        if torch.__version__ < "2.13":  # the first version that is known to have FSDPModule.reset_iter_state
            raise InvalidInput("trainer.ranks", got=f"several, with torch {torch.__version__}", do="install torch 2.13")
        self._ranks, self._model, self._config = ranks, model.eval(), config
        self._tree_attention = supports_tree_mask(model)
        self._checksum: str | None = None  # of the policy's current weights; None: not computed
        self._micro_tokens = config.micro_tokens
        self._is_copied = True  # whether the model in this process has the current weights
        self._last_pass: tuple[Tensor, frozenset[Module]] | None = None  # the loss and the modules of the gradients
        self._reference_checksum = ""
        if "reference" in algorithm.needs:
            reference = make_reference(model, config.dtype, syncs_reference(algorithm)).weights
            self._reference_checksum = weights_checksum(reference)
            del reference  # the ranks have their own
        self._reference_is_fixed = not syncs_reference(algorithm)
        settings = RankSettings(
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
        ranks.start(partial(RankTrainer, settings))

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
        return _sum(self._call("logprobs", batch, role))

    def entropy(self, batch: TrainingBatch) -> Tensor:
        return _sum(self._call("entropy", batch))

    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        parts = self._call("top_tokens", batch, count)
        return TopTokens(_sum([part.ids for part in parts]), _sum([part.logprobs for part in parts]))

    def values(self, batch: TrainingBatch) -> StateValues:
        parts = self._call("values", batch)
        return StateValues(_sum([part.before_token for part in parts]), _sum([part.after_action for part in parts]))

    def forward_backward(
        self, batch: PreparedBatch, *, scale: float = 1.0, modules: Collection[Module] = MODULES
    ) -> PassStats:
        stats = join_passes(self._call("forward_backward", batch, scale, frozenset(modules)))
        self._last_pass = (stats.loss, frozenset(modules))
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
        """Copy the weights of the ranks into the model of this process. The WeightUpdate holds this very model."""
        every = self._config.checksum_every
        checksum = self._current_checksum() if every > 0 and step % every == 0 else None
        return WeightUpdate(PolicyVersion(number, step, checksum), "shared_memory", self._current_model())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        load_trained_weights(self._model, weights)
        self._is_copied, self._checksum = True, None
        trained = {name: p.detach().cpu() for name, p in self._model.named_parameters() if p.requires_grad}
        self._call("load_weights", trained)

    def state(self, folder: Path | None = None) -> TrainerState:
        """Return a copy of the trainer's state. Each rank writes its parts of the tensors to a file in ``folder``.

        A trainer with a different number of ranks can load the state. Without a folder, the files are temporary.
        """
        scalars: dict[str, int | float | str] = {
            "policy": self._current_checksum(),
            "reference": self._reference_checksum,
            "micro_tokens": self.micro_tokens,
        }
        place = Path(tempfile.mkdtemp(prefix="agent-r1-")) if folder is None else folder.absolute()
        place.mkdir(parents=True, exist_ok=True)
        tensors = TensorFiles(self._call("save_state", place))
        if folder is None:
            weakref.finalize(tensors, shutil.rmtree, place, ignore_errors=True)
        return TrainerState(tensors, scalars)

    def load_state(self, state: TrainerState) -> None:
        if state.scalars["policy"] != self._current_checksum():
            raise InvalidInput(
                "trainer state", got="a state saved with other weights", do="load the model saved beside it first"
            )
        if self._reference_is_fixed and state.scalars["reference"] != self._reference_checksum:
            do = "make the trainer of the model that the run began with, then load the saved weights into it"
            raise InvalidInput("trainer state", got="a state saved with another reference policy", do=do)
        # a smaller saved maximum stays in force, for the reason given in SingleProcessTrainer.load_state
        self._micro_tokens = min(int(state.scalars["micro_tokens"]), self._config.micro_tokens)
        tensors = state.tensors if isinstance(state.tensors, TensorFiles) else dict(state.tensors)
        self._call("load_state", tensors, self._micro_tokens)

    def close(self) -> None:
        self._ranks.close()

    def _call(self, method: str, *arguments: object) -> list[Any]:
        with measure("ranks"):
            return self._ranks.call(methodcaller(method, *arguments))

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


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _on_cpu(model: PreTrainedModel) -> PreTrainedModel:
    return model if model.device.type == "cpu" else copy.deepcopy(model).cpu()
