"""AdamW over named modules: clipping, refusal of what is not finite, and state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agent_r1.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Trained:
    """A module to train, and its own learning rate."""

    module: nn.Module
    learning_rate: float


class Optimizer:
    """One AdamW (1711.05101) for several modules, each clipped by its own norm. Vectors do not decay.

    Moments exist from the beginning, so that saving and restoring never depends on what has run.
    """

    def __init__(
        self, trained: Mapping[str, Trained], betas: tuple[float, float], weight_decay: float, max_norm: float
    ) -> None:
        self._max_norm = max_norm
        self._parameters = {name: _trainable(one.module) for name, one in trained.items()}
        groups = [
            {"params": parameters, "lr": one.learning_rate, "weight_decay": decay}
            for name, one in trained.items()
            for parameters, decay in _by_decay(list(self._parameters[name].values()), weight_decay)
        ]
        self._adamw = torch.optim.AdamW(groups, betas=betas, fused=True)
        for parameter in self._all():
            self._adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, loss: Tensor, moving: Collection[str]) -> dict[str, float] | None:
        """Apply the gradients that ``loss`` left behind to the modules ``moving``, and clear all of them.

        Gives the gradients' norms before clipping, by module. None, and no weight or moment changed, where the loss
        or a gradient is not finite.
        """
        for module, parameters in self._parameters.items():
            if module not in moving:
                for parameter in parameters.values():
                    parameter.grad = None  # AdamW leaves alone what has no gradient, momentum included
        norms = {
            module: nn.utils.clip_grad_norm_(list(self._parameters[module].values()), self._max_norm)
            for module in sorted(moving)
        }
        found = torch.stack([loss.detach().double(), *(norm.double() for norm in norms.values())]).tolist()
        finite = all(map(math.isfinite, found))
        if finite:
            self._adamw.step()
        self.forget()
        return dict(zip(norms, found[1:], strict=True)) if finite else None

    def forget(self) -> None:
        """Clear all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The moments, by names such as ``policy.lm_head.weight.exp_avg``: those in use, not copies."""
        return {
            f"{module}.{name}.{moment}": tensor
            for module, parameters in self._parameters.items()
            for name, parameter in parameters.items()
            for moment, tensor in self._adamw.state[parameter].items()
        }

    def _all(self) -> list[nn.Parameter]:
        return [parameter for parameters in self._parameters.values() for parameter in parameters.values()]


@torch.no_grad()
def overwrite(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy ``given`` into ``own``, all or nothing; InvalidInput unless names and shapes are the same."""
    for name in sorted(own.keys() ^ given.keys()):
        raise InvalidInput("learner state", got=f"{name} on one side only", do="restore into the run that saved it")
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            shapes = f"{name} of shape {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
            raise InvalidInput("learner state", got=shapes, do="restore into the run that saved it")
    for name, tensor in own.items():
        tensor.copy_(given[name])


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _by_decay(parameters: list[nn.Parameter], decay: float) -> list[tuple[list[nn.Parameter], float]]:
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    return [(matrices, decay), (vectors, 0.0)]
