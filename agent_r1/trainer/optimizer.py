"""AdamW for several modules, with gradient clipping and a check that loss and gradients are finite."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agent_r1.core.errors import InvalidInput
from agent_r1.trainer.protocol import Module, OptimStats


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A module to train, and its learning rate."""

    module: nn.Module
    learning_rate: float


class Optimizer:
    """An AdamW optimizer (1711.05101) for several modules. Each module's gradient is clipped by its own norm.

    Weight decay applies only to parameters with two or more dimensions. The moments exist before the first step, so
    that the saved state has the same tensors after every step.
    """

    def __init__(
        self,
        groups: Mapping[Module, ParameterGroup],
        betas: tuple[float, float],
        weight_decay: float,
        max_norm: float,
    ) -> None:
        self._max_norm = max_norm
        self._parameters: dict[Module, dict[str, nn.Parameter]] = {
            module: {name: p for name, p in group.module.named_parameters() if p.requires_grad}
            for module, group in groups.items()
        }
        adamw_groups = []
        for module, group in groups.items():
            parameters = self.parameters(module)
            matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
            adamw_groups.append({"params": matrices, "lr": group.learning_rate, "weight_decay": weight_decay})
            adamw_groups.append({"params": vectors, "lr": group.learning_rate, "weight_decay": 0.0})
        self._adamw = torch.optim.AdamW(adamw_groups, betas=betas, fused=True)
        self._learning_rates = [group["lr"] for group in self._adamw.param_groups]
        for parameter in (p for module in groups for p in self.parameters(module)):
            self._adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, loss: Tensor, modules: Collection[Module], learning_rate_factor: float = 1.0) -> OptimStats:
        """Clip the gradients of ``modules`` and apply them. Then clear the gradients of all modules.

        If ``loss`` or a gradient is not finite, no weight and no moment changes. The learning rates of this step are
        the configured learning rates times ``learning_rate_factor``.
        """
        for module, parameters in self._parameters.items():
            if module not in modules:
                for parameter in parameters.values():
                    parameter.grad = None  # without a gradient, AdamW applies no momentum either
        norms = {
            module: nn.utils.clip_grad_norm_(self.parameters(module), self._max_norm) for module in sorted(modules)
        }
        gradient_norms = dict(zip(norms, torch.stack([norm.double() for norm in norms.values()]).tolist(), strict=True))
        finite = math.isfinite(float(loss.detach())) and all(map(math.isfinite, gradient_norms.values()))
        if finite:
            for group, learning_rate in zip(self._adamw.param_groups, self._learning_rates, strict=True):
                group["lr"] = learning_rate_factor * learning_rate
            self._adamw.step()
        self.clear_gradients()
        return OptimStats(finite, gradient_norms)

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        self._adamw.zero_grad(set_to_none=True)

    def parameters(self, module: Module) -> list[nn.Parameter]:
        """Return the trained parameters of a module."""
        return list(self._parameters[module].values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments and step counters by name (``policy.lm_head.weight.exp_avg``), without copying them."""
        return {
            f"{module}.{name}.{moment}": tensor
            for module, parameters in self._parameters.items()
            for name, parameter in parameters.items()
            for moment, tensor in self._adamw.state[parameter].items()
        }


@torch.no_grad()
def overwrite(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy each tensor of ``source`` into the tensor of the same name in ``target``.

    Raise InvalidInput, before the first copy, if names or shapes differ.
    """
    do = "restore into the run that saved it"
    for name in sorted(target.keys() ^ source.keys()):
        raise InvalidInput("trainer state", got=f"{name} on one side only", do=do)
    for name, tensor in target.items():
        if tensor.shape != source[name].shape:
            shapes = f"{name} of shape {tuple(source[name].shape)}, not {tuple(tensor.shape)}"
            raise InvalidInput("trainer state", got=shapes, do=do)
    for name, tensor in target.items():
        tensor.copy_(source[name])
