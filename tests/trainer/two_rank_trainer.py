"""A trainer of two processes, for tests: data parallelism behind the same protocol as the trainer of one process.

Each rank holds all models, computes the loss on its share of the trajectories, and sums the gradients with the other
rank. Loss weights are normalized over the whole batch, so the sum over the ranks is the loss of the batch. Both ranks
then take the same optimizer step.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from preloaded import FORKSERVER
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.types import StateValues, TopTokens
from agent_r1.core.weights import WeightUpdate
from agent_r1.data.batch import TrainingBatch
from agent_r1.model.forward import supports_tree_mask
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.forward_backward import join_passes
from agent_r1.trainer.protocol import MODULES, Module, OptimStats, PassStats, PreparedBatch, Role, TrainerState
from agent_r1.trainer.single_process import SingleProcessTrainer

RANKS = 2
TIMEOUT = timedelta(seconds=60)
"""A rank that waits longer than this for the other one fails."""


class RankTrainer(SingleProcessTrainer):
    """One rank: its passes are over its own share of the trajectories, its optimizer step sums the gradients."""

    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        return super().logprobs(own_share(batch), role)

    def entropy(self, batch: TrainingBatch) -> Tensor:
        return super().entropy(own_share(batch))

    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        return super().top_tokens(own_share(batch), count)

    def values(self, batch: TrainingBatch) -> StateValues:
        return super().values(own_share(batch))

    def own_pass(self, batch: PreparedBatch, scale: float, modules: Collection[Module]) -> PassStats | None:
        """Run the pass over this rank's share; None if it has no trajectory."""
        share = replace(batch, batch=own_share(batch.batch))
        if share.batch.sequences:
            return super().forward_backward(share, scale=scale, modules=modules)
        self._last_pass = (torch.zeros(()), frozenset(modules))
        return None

    def optim_step(self, learning_rate_factor: float = 1.0) -> OptimStats:
        assert self._last_pass is not None
        loss, modules = self._last_pass
        loss = loss.double()
        dist.all_reduce(loss)
        self._last_pass = (loss, modules)
        for module in sorted(modules):
            for parameter in self._optimizer.parameters(module):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        return super().optim_step(learning_rate_factor)


def own_share(batch: TrainingBatch) -> TrainingBatch:
    """Return the batch with the sequences of every second trajectory; a trajectory is never divided."""
    trajectories = sorted({sequence.trajectory for sequence in batch.sequences})[dist.get_rank() :: RANKS]
    return replace(batch, sequences=tuple(one for one in batch.sequences if one.trajectory in trajectories))


class TwoRankTrainer:
    """Drives two :class:`RankTrainer` processes as one trainer. Takes the arguments of SingleProcessTrainer."""

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: Algorithm,
        config: TrainerConfig,
        *,
        temperature: float,
        teacher: PreTrainedModel | None = None,
    ) -> None:
        self._model, self._config = model.eval(), config
        self._tree_attention = supports_tree_mask(model)
        self._folder = tempfile.TemporaryDirectory()
        self._ranks: list[Connection] = []
        for rank in range(RANKS):
            here, there = FORKSERVER.Pipe()
            # A daemon ends with this process; a rank whose pipe is closed ends by itself.
            FORKSERVER.Process(target=_serve, args=(rank, f"{self._folder.name}/store", there), daemon=True).start()
            there.close()
            self._ranks.append(here)
        self._end = weakref.finalize(self, _close, self._ranks)
        arguments = {"temperature": temperature, "teacher": teacher}
        for pipe in self._ranks:
            _send(pipe, ((model, algorithm, config), arguments))
        self._results()

    @property
    def micro_tokens(self) -> int:
        return self._config.micro_tokens

    @property
    def supports_tree_attention(self) -> bool:
        return self._tree_attention

    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        return sum(self._call(methodcaller("logprobs", batch, role)), torch.zeros(()))  # 0 outside a rank's share

    def entropy(self, batch: TrainingBatch) -> Tensor:
        return sum(self._call(methodcaller("entropy", batch)), torch.zeros(()))

    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        first, second = self._call(methodcaller("top_tokens", batch, count))
        return TopTokens(first.ids + second.ids, first.logprobs + second.logprobs)

    def values(self, batch: TrainingBatch) -> StateValues:
        first, second = self._call(methodcaller("values", batch))
        return StateValues(first.before_token + second.before_token, first.after_action + second.after_action)

    def forward_backward(
        self, batch: PreparedBatch, *, scale: float = 1.0, modules: Collection[Module] = MODULES
    ) -> PassStats:
        parts = self._call(methodcaller("own_pass", batch, scale, modules))
        return join_passes([part for part in parts if part is not None])

    def optim_step(self, learning_rate_factor: float = 1.0) -> OptimStats:
        first, second = self._call(methodcaller("optim_step", learning_rate_factor))
        assert first == second, "the ranks took different optimizer steps"
        return first

    def sync_reference(self, alpha: float) -> None:
        self._call(methodcaller("sync_reference", alpha))

    def publish(self, number: int, step: int) -> WeightUpdate:
        first, second = self._call(methodcaller("publish", number, step))
        assert first.version == second.version, "the ranks hold different weights"
        self._model.load_state_dict(first.handle.state_dict())
        return replace(first, handle=self._model)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(dict(weights))
        self._call(methodcaller("load_weights", dict(weights)))

    def state(self) -> TrainerState:
        return self._call(methodcaller("state"))[0]

    def load_state(self, state: TrainerState) -> None:
        self._call(methodcaller("load_state", state))

    def save(self, folder: Path) -> None:
        self._call(methodcaller("save", folder), ranks=1)

    def load(self, folder: Path) -> None:
        self._call(methodcaller("load", folder))

    def close(self) -> None:
        """End the ranks."""
        self._end()

    def _call(self, request: Callable[[RankTrainer], Any], ranks: int = RANKS) -> list[Any]:
        """Return the result of ``request(trainer)`` of the first ranks."""
        for pipe in self._ranks[:ranks]:
            _send(pipe, request)
        return self._results(ranks)

    def _results(self, ranks: int = RANKS) -> list[Any]:
        results = [pickle.loads(pipe.recv_bytes()) for pipe in self._ranks[:ranks]]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def _serve(rank: int, store: str, pipe: Connection) -> None:
    """Answer requests until the pipe is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    trainer: RankTrainer | None = None
    while True:
        try:
            request = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            if trainer is None:
                arguments, options = request
                trainer = RankTrainer(*arguments, **options)
                _send(pipe, None)
            else:
                _send(pipe, request(trainer))
        except Exception as error:
            _send(pipe, RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))


def _send(pipe: Connection, value: object) -> None:
    # Pickled here, because a pipe would share the memory of tensors between the processes instead of copying them.
    pipe.send_bytes(pickle.dumps(value))


def _close(pipes: list[Connection]) -> None:
    for pipe in pipes:
        pipe.close()
