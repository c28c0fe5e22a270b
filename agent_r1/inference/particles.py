"""Sequential Monte Carlo: particles that are extended step by step, weighted, and resampled.

A particle is the beginning of a sequence. The policy pi samples the extensions. V(s) is the predicted reward after the
state s, and beta is a temperature. The extension from s to s' has the weight exp((V(s') - V(s)) / beta). Then the
weighted particles approximate the distribution pi(s) exp(V(s) / beta).

If V of each complete sequence is the true reward R, the particles approximate pi exp(R / beta), even if V is wrong for
incomplete sequences (twisted particle filters: arXiv:1903.07046; for language models: arXiv:2404.17546).
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

P = TypeVar("P")

Extend = Callable[[list[P]], Awaitable[tuple[list[P], list[float]]]]
"""A function that extends all particles by one step. It returns the extended particles, and a number log w for each.

The weight of the particle is then multiplied by w. A complete particle does not change, and its log w is 0.
"""


def normalize(log_weights: Sequence[float]) -> list[float]:
    """Return exp(x) for each number x in ``log_weights``, scaled so that the sum of the results is 1 (softmax).

    Example:
        >>> normalize([0.0, math.log(3.0)])
        [0.25, 0.75]
    """
    largest = max(log_weights)
    weights = [math.exp(log_weight - largest) for log_weight in log_weights]
    total = sum(weights)
    return [weight / total for weight in weights]


def effective_sample_size(log_weights: Sequence[float]) -> float:
    """Return (sum w)^2 / sum w^2 for the weights w = exp(``log_weights``).

    The result is N for N equal weights, and 1 if a single particle has all the weight.
    """
    return 1 / sum(weight * weight for weight in normalize(log_weights))


def systematic_resample(log_weights: Sequence[float], rng: random.Random) -> list[int]:
    """Draw indices of particles at random, with repetition. Return N indices for N particles.

    ``log_weights`` holds the logarithms of the weights of the N particles. Let w_i be the weight of particle i, scaled
    so that the sum of all weights is 1. Then index i occurs N w_i times, rounded up or down at random.
    """
    weights, count = normalize(log_weights), len(log_weights)
    chosen, total, index = [], weights[0], 0
    offset = rng.random()
    for number in range(count):
        while total * count <= number + offset and index < count - 1:
            index += 1
            total += weights[index]
        chosen.append(index)
    return chosen


async def sequential_monte_carlo(
    particles: Sequence[P],
    extend: Extend[P],
    is_complete: Callable[[P], bool],
    rng: random.Random,
    resample_below: float = 0.5,
) -> tuple[list[P], list[float]]:
    """Extend and resample ``particles`` until all are complete. Return (particles, logarithms of their weights).

    All weights are 1 at the start. The particles are resampled if the effective sample size falls below
    ``resample_below`` times the number of particles. After the resampling, all weights are 1 again.
    """
    current, log_weights = list(particles), [0.0] * len(particles)
    while not all(map(is_complete, current)):
        current, increments = await extend(current)
        log_weights = [w + increment for w, increment in zip(log_weights, increments, strict=True)]
        if effective_sample_size(log_weights) < resample_below * len(current):
            current = [current[index] for index in systematic_resample(log_weights, rng)]
            log_weights = [0.0] * len(current)
    return current, log_weights
