"""One small batch, for which advantages and loss of each algorithm were computed by hand.

Five attempts at two tasks; nine tokens t0 .. t8 in seven turns (| between turns), with the rewards of each turn:

    task  attempt  tokens          rewards                                   R     tool results
    0     a        t0 t1 | t2      0.5 (a call that ends with t0), 0.5       1.0   after t1
    0     b        t3 | t4         0, 0                                      0.0   after t3
    0     c        t5              0.2                                       0.2   -
    1     d        t6              3                                         3.0   -
    1     e        t7 t8           1                                         1.0   -

All but the call's reward (named tool) are outcomes (named score). The returns of the greedy attempts are 0.25 and 2.
The state before a's second turn equals the opening messages, word for word; that before b's second turn does not.

    token                 t0    t1   t2   t3   t4   t5   t6   t7   t8
    pi                    0.45  0.2  0.5  0.8  0.6  0.4  0.8  0.4  0.45
    pi_old = sampler      0.3   0.4  0.5  0.2  0.5  0.8  0.4  0.8  0.3
    r = pi / pi_old       1.5   0.5  1    4    1.2  0.5  2    0.5  1.5
    reference / pi        1     2    1    0.5  1    0.5  1    1    0.5
    teacher / pi_old      2     1    0.5  1    1    1    2    0.5  1
    V before the update   0.2   0.4  0.6  0.1  0.3  0.5  1    0.5  0.7
    V now                 0.3   0.5  0.7  0.2  0.4  0.6  1.8  0.6  0.8
    entropy               0.5   0.9  0.1  0.3  0.2  1.2  0.4  0.6  0.7

The two most likely tokens of the teacher have p 0.5 and 0.25 everywhere. pi gives them 0.25 and 0.25 at t0 .. t4,
and 0.5 and 0.25 at t5 .. t8.

Algorithms that compare the sampler with the policy before the update see pi as that policy.

Between t1 and t2 one token was observed (pi 0.5), between t3 and t4 two (pi 0.25 each). The coefficient of
the KL is 0.1.
Standard deviations are Bessel's. log pi: -0.798508 -1.609438 -0.693147 -0.223144 -0.510826 -0.916291 -0.223144
-0.916291 -0.798508.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PI = (0.45, 0.2, 0.5, 0.8, 0.6, 0.4, 0.8, 0.4, 0.45)
OLD = (0.3, 0.4, 0.5, 0.2, 0.5, 0.8, 0.4, 0.8, 0.3)
REFERENCE = (0.45, 0.4, 0.5, 0.4, 0.6, 0.2, 0.8, 0.4, 0.225)
TEACHER = (0.6, 0.4, 0.25, 0.2, 0.5, 0.8, 0.8, 0.4, 0.3)
OLD_VALUES = (0.2, 0.4, 0.6, 0.1, 0.3, 0.5, 1.0, 0.5, 0.7)
VALUES = (0.3, 0.5, 0.7, 0.2, 0.4, 0.6, 1.8, 0.6, 0.8)
ENTROPY = (0.5, 0.9, 0.1, 0.3, 0.2, 1.2, 0.4, 0.6, 0.7)
TEACHER_TOP = (0.5, 0.25)
PI_TOP = ((0.25, 0.25),) * 5 + (TEACHER_TOP,) * 4
OBSERVED_PI = (0.5, 0.25, 0.25)
GREEDY = {0: 0.25, 1: 2.0}
KL_COEFFICIENT = 0.1


@dataclass(frozen=True)
class Case:
    """The advantage of each token and the loss of the batch, for a preset with ``settings`` laid over it."""

    algorithm: str
    advantage: tuple[float, ...]
    loss: float
    settings: Mapping[str, object] = field(default_factory=dict)
