"""The learning-rate schedules of transformers, as a function of the step."""

from __future__ import annotations

import torch
from transformers import get_scheduler

from agent_r1.trainer.config import ScheduleConfig


def learning_rate_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the factor by which all learning rates are multiplied in one update.

    The factor depends only on the arguments, so a resumed run continues with exactly the same learning rates. Decays
    are equal to the decays in transformers. A warm-up is one step ahead of the warm-up in transformers, which begins
    with the factor 0.

    Args:
        config: the form and the lengths of the schedule.
        step: the number of the update, from 1.
        steps: the number of updates of the run.

    Example:
        learning_rate_factor(ScheduleConfig(name="linear", warmup_steps=2), step=1, steps=12) == 0.5
    """
    warmup, decay = config.warmup_length(steps), config.decay_length(steps)
    # transformers needs an optimizer for a schedule. This optimizer only holds the learning rate 1 and takes no step.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    if config.name == "constant":
        schedule = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=warmup)
    else:
        shape = {
            "decay_type": config.name,
            "min_lr_ratio": config.min_ratio,
            "num_decay_steps": decay,
            "num_stable_steps": max(0, steps - warmup - decay),
        }
        schedule = get_scheduler(
            "warmup_stable_decay", optimizer, num_warmup_steps=warmup, scheduler_specific_kwargs=shape
        )
    return float(schedule.lr_lambdas[0](step if step <= warmup else step - 1))
