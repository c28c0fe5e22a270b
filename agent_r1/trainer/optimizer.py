"""AdamW for several modules, with gradient clipping and learning-rate schedules."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from agent_r1.core.errors import InvalidInput, import_extra
from agent_r1.trainer.config import ScheduleConfig, TrainerConfig
from agent_r1.trainer.protocol import POLICY, Module, OptimStats


class Optimizer:
    """AdamW (arXiv:1711.05101), or with 8-bit moments (arXiv:2110.02861). Gradients are clipped module by module.

    Weight decay applies only to parameters with two or more dimensions.
    """

    def __init__(self, modules: Mapping[Module, nn.Module], config: TrainerConfig) -> None:
        self._max_norm = config.max_grad_norm
        self._parameters: dict[Module, dict[str, nn.Parameter]] = {
            name: {key: p for key, p in module.named_parameters() if p.requires_grad}
            for name, module in modules.items()
        }
        groups: list[dict[str, Any]] = []
        for name, named in self._parameters.items():
            rate = config.learning_rate if name == POLICY else config.critic_learning_rate
            matrices = [p for p in named.values() if p.ndim > 1]
            vectors = [p for p in named.values() if p.ndim <= 1]
            groups.append({"params": matrices, "lr": rate, "weight_decay": config.weight_decay})
            groups.append({"params": vectors, "lr": rate, "weight_decay": 0.0})
        self._learning_rates: list[float] = [group["lr"] for group in groups]
        self._adamw = (_adamw if config.optimizer == "adamw" else _adamw_8bit)(groups, config.betas)

    def step(self, loss: Tensor, modules: Collection[Module], learning_rate_factor: float = 1.0) -> OptimStats:
        """Clip gradients and update ``modules``, unless ``loss`` or a gradient is not finite. Clear all gradients."""
        for module, parameters in self._parameters.items():
            if module not in modules:
                for parameter in parameters.values():
                    parameter.grad = None  # without a gradient, AdamW applies no momentum either
        norms: dict[Module, Tensor] = {}  # of each module's gradient before clipping: ()
        for module in sorted(modules):
            trained = self._parameters[module].values()
            norms[module] = full_tensor(nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))
            nn.utils.clip_grads_with_norm_(trained, self._max_norm, norms[module])
        gradient_norms = dict(zip(norms, torch.stack([norm.double() for norm in norms.values()]).tolist(), strict=True))
        finite = math.isfinite(float(loss.detach())) and all(map(math.isfinite, gradient_norms.values()))
        if finite:
            _step(self._adamw, [learning_rate_factor * learning_rate for learning_rate in self._learning_rates])
        self.clear_gradients()
        return OptimStats(finite, gradient_norms)

    def clear_gradients(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments and step counters by name, such as ``policy.lm_head.weight.exp_avg``, without a copy."""
        return {
            f"{module}.{name}.{key}": tensor
            for module, parameters in self._parameters.items()
            for name, parameter in parameters.items()
            for moment, value in self._adamw.state[parameter].items()
            for key, tensor in _plain_tensors(moment, value)
        }


_DECAYS: Mapping[str, Callable[[float], float]] = {  # from 1 to 0
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def learning_rate_schedule(config: ScheduleConfig, steps: int) -> Callable[[int], float]:
    """Return the function of k by whose result the learning rates are multiplied in update k = 1 .. ``steps``.

    The schedules are those of transformers, but the warm-up is one step ahead: its first factor is 1/n, and not 0.
    """
    warmup, decay = config.lengths(steps)
    last, lowest = config.total(steps), config.min_ratio

    def factor(step: int) -> float:
        step = min(step, last)
        if step < warmup:
            return step / warmup * (1.0 - lowest) + lowest
        if config.name == "constant" or step <= last - decay:
            return 1.0
        return _DECAYS[config.name]((step - 1 - last + decay) / decay) * (1.0 - lowest) + lowest

    return factor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor if ``tensor`` is divided among ranks. All ranks must call this function together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _adamw(groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
    # Its moments exist before the first step, so that a saved state always has the same tensors.
    adamw = torch.optim.AdamW(groups, betas=betas, fused=True)
    for parameter in _parameters_of(adamw):
        adamw.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return adamw


def _adamw_8bit(groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns about kernels for other GPUs
    adamw: torch.optim.Optimizer = import_extra("torchao.optim", "8bit").AdamW8bit(groups, lr=0.0, betas=betas)
    # torchao makes the moments in the first step, so take a step that changes nothing
    for parameter in _parameters_of(adamw):
        parameter.grad = torch.zeros_like(parameter)
    _step(adamw, [0.0] * len(adamw.param_groups))
    adamw.zero_grad(set_to_none=True)
    for parameter in _parameters_of(adamw):
        adamw.state[parameter]["step"].zero_()
    return adamw


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _step(optimizer: torch.optim.Optimizer, learning_rates: Sequence[float]) -> None:
    # torchao compiles its steps. On a CPU they are not compiled, because a C++ compiler can be missing.
    on_cpu = True
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
        on_cpu &= all(parameter.device.type == "cpu" for parameter in group["params"])
    with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
        optimizer.step()


def _plain_tensors(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    # a moment in 8 bits is several tensors, such as exp_avg.codes
    if isinstance(value, DTensor) or not is_traceable_wrapper_subclass(value):
        yield name, value
        return
    for part in value.__tensor_flatten__()[0]:
        yield f"{name}.{part}", getattr(value, part)


@torch.no_grad()
def overwrite(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy each tensor of ``source`` into that of ``target``. Raise InvalidInput first if names or shapes differ."""
    do = "restore into the run that saved it"
    for name in sorted(target.keys() ^ source.keys()):
        raise InvalidInput("trainer state", got=f"{name} on one side only", do=do)
    for name, tensor in target.items():
        if tensor.shape != source[name].shape:
            shapes = f"{name} of shape {tuple(source[name].shape)}, not {tuple(tensor.shape)}"
            raise InvalidInput("trainer state", got=shapes, do=do)
    for name, tensor in target.items():
        tensor.copy_(source[name])
