"""Predict how busy an engine is if the durations of tools have a long tail, by staleness.

    python -m benchmarks.staleness

It uses the discrete-event simulation behind ``agent-r1 plan``, which follows the rules of the training loop, so the
results do not depend on the machine: ``benchmarks/plan.py`` compares this simulation with measured runs. Each attempt
has three turns of 50 to 150 tokens, and after each but the last a tool with a log-normal duration: median 50 ms, 99th
percentile 5 s. An engine decodes at most ``PLACES`` sequences at a time, and a decode step takes 20 ms for all of them,
as on a GPU that reads the weights of a model in each step. An update takes 3 s, in which the engine works on.

The utilization is the share of the engine's places in which tokens were sampled: the ideal is 1. Printed are means over
seeds, with 95 % intervals. Beside them are instant tools, which show how much the order of attempts alone costs.
"""

from __future__ import annotations

import argparse
import math
import random

from agent_r1.training.simulation import (
    Cluster,
    EngineCost,
    GroupLoad,
    Schedule,
    TrainerCost,
    TurnLoad,
    simulate,
)
from research.paper.intervals import estimate

MEDIAN, P99 = 0.05, 5.0
"""The median and the 99th percentile of the duration of a tool, in seconds."""

SPREAD = math.log(P99 / MEDIAN) / 2.326
"""The standard deviation of the logarithm of the duration. The 99th percentile is 2.326 of them above the median."""

PLACES, DECODE_SECONDS, UPDATE_SECONDS = 64, 0.02, 3.0
GROUP_SIZE, TURNS, STEPS = 8, 3, 60


def draw_seconds(draw: random.Random, limit: float) -> float:
    """Return the random duration of a tool in seconds, at most ``limit``."""
    return min(limit, MEDIAN * math.exp(SPREAD * draw.gauss(0, 1)))


def draw_groups(count: int, limit: float, seed: int) -> list[GroupLoad]:
    """Return the loads of ``count`` groups. No tool takes longer than ``limit`` seconds."""
    draw = random.Random(seed)

    def turn(number: int) -> TurnLoad:
        seconds = draw_seconds(draw, limit)
        return TurnLoad(0, draw.randint(50, 150), seconds if number < TURNS - 1 else 0.0)

    return [tuple(tuple(turn(n) for n in range(TURNS)) for _ in range(GROUP_SIZE)) for _ in range(count)]


def utilization(groups_per_step: int, staleness: int, limit: float, seed: int) -> float:
    """Return the share of the engine's places in which tokens were sampled, in a run of ``STEPS`` steps."""
    engine = EngineCost(step=DECODE_SECONDS, slots=PLACES)
    cluster = Cluster(1, engine, TrainerCost(update=UPDATE_SECONDS))
    groups = draw_groups(groups_per_step * STEPS, limit, seed)
    timeline = simulate(groups, cluster, Schedule(groups_per_step, staleness))
    return timeline.work.tokens * DECODE_SECONDS / (PLACES * timeline.step_ends[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 16], help="groups per step")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    tools = {"instant": 0.0, "at most 10 s": 10.0, "no limit": math.inf}
    print(f"{options.seeds} seeds, {STEPS} steps, groups of {GROUP_SIZE}")
    print("groups  seconds of decoding  staleness  " + "".join(f"{name:<18}" for name in tools))
    for groups in options.groups:
        work = groups * GROUP_SIZE * TURNS * 100 * DECODE_SECONDS / PLACES
        for staleness in options.staleness:
            cells = ""
            for limit in tools.values():
                found = [utilization(groups, staleness, limit, seed) for seed in range(options.seeds)]
                mean = estimate(found)
                cells += f"{f'{mean.mean:.3f} +- {mean.half or math.nan:.3f}':<18}"
            print(f"{groups:<8}{work:<21.1f}{staleness:<11}{cells}", flush=True)


if __name__ == "__main__":
    main()
