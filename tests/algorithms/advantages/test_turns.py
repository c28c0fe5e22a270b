"""Turn-level advantages: comparison by histories of states, and summaries as parts of the actions they prepare."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from tensors import close, numbers

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import ModelOutputs, StateValues
from agent_r1.core.messages import Message, ToolResult
from agent_r1.core.trajectory import Trajectory
from agent_r1.data.batch import TrainingBatch, assemble_batch, select_trainable
from agent_r1.data.sequences import pack_prefix_tree

# HGPO

EPSILON = 1e-6


def attempt(make: Any, member: int, states: str, rewards: Sequence[float]) -> Trajectory:
    """Return an attempt that passes through ``states``, one letter per turn."""
    turns = [
        make.turn(
            index,
            [1],
            [2],
            parent=index - 1 if index else None,
            rewards={"step": reward},
            observation=(Message.user(states[index + 1 : index + 2]),),
        )
        for index, reward in enumerate(rewards)
    ]
    trajectory: Trajectory = make.trajectory(turns, member=member, start=[Message.user(states[0])])
    return trajectory


def history_advantages(
    attempts: Sequence[tuple[str, Sequence[float]]], gamma: float, history: int, alpha: float
) -> list[float]:
    """Return the advantage of each turn, turn by turn, as the paper's recipe groups and weighs them."""
    returns: dict[tuple[int, int], float] = {}
    for number, (_, rewards) in enumerate(attempts):
        following = 0.0
        for turn in reversed(range(len(rewards))):
            following = rewards[turn] + gamma * following
            returns[number, turn] = following
    groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, turn in sorted(returns):
        for states in range(1, min(history + 1, turn + 1) + 1):  # the last so many states, as far as there are any
            groups[attempts[number][0][turn - states + 1 : turn + 1]].append((number, turn))
    found: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for key, members in groups.items():
        compared = [returns[member] for member in members]
        if len(members) > 1 and pstdev(compared) > 1e-6:
            for member in members:
                relative = (returns[member] - fmean(compared)) / (pstdev(compared) + EPSILON)
                found[member].append(((len(key) + 1) ** alpha, relative))
    return [
        sum(weight * value for weight, value in found[member]) / max(sum(weight for weight, _ in found[member]), 1e-9)
        for member in sorted(returns)
    ]


@pytest.mark.parametrize(("history", "alpha"), [(0, 1.0), (3, 2.0)])
def test_histories_are_compared_and_weighted_as_in_the_recipe(history: int, alpha: float, make: Any) -> None:
    randomly = random.Random(history)
    attempts = []
    for _ in range(12):
        length = randomly.randint(1, 5)
        states = "".join(randomly.choice("ab") for _ in range(length))
        attempts.append((states, [randomly.random() for _ in range(length)]))
    trajectories = [attempt(make, member, *one) for member, one in enumerate(attempts)]
    batch = assemble_batch(select_trainable(make.groups(*trajectories), {}).samples, pack_prefix_tree)
    algorithm = build_algorithm("hgpo", {"advantage.history": history, "advantage.alpha": alpha})
    advantage = algorithm.compute_token_weights(batch, ModelOutputs()).advantage
    assert close(advantage, numbers(*history_advantages(attempts, 0.95, history, alpha)), 1e-5)


# Summaries

TURN_LEVEL = (
    "gigpo", "hgpo", "process-grpo", "mt-grpo", "gtpo", "reinforce", "ppo-turn", "steppo", "turn-ppo", "bi-level-gae"
)  # fmt: skip
PAGE, RESULT = Message.tool("Alba: mayor Bruno.", "call_0_0"), ToolResult((), ok=True)


def acting(make: Any, member: int, *, summarize: bool, last: float, found: float) -> Trajectory:
    """Return an attempt of three actions; with ``summarize`` a summary precedes the second and follows the third."""
    turns = [make.turn(0, [1], [2, 3], observation=(PAGE,), results=(RESULT,), rewards={"found": found})]
    if summarize:
        turns.append(make.turn(1, [4], [5, 6, 7], parent=0, kind="summary"))
    second = len(turns)
    turns.append(make.turn(second, [1], [8], observation=(PAGE, PAGE), results=(RESULT,)))
    turns.append(make.turn(second + 1, [1], [9, 10], parent=second, rewards={"score": last}))
    if summarize:
        turns.append(make.turn(second + 2, [4], [11], parent=second + 1, kind="summary"))
    trajectory: Trajectory = make.trajectory(turns, member=member, start=[Message.user("Where?")])
    return trajectory


def batch_of(make: Any, *, summarize: bool) -> TrainingBatch:
    """Return a group of three attempts, of which the first two have summaries."""
    attempts = (
        acting(make, 0, summarize=summarize, last=1.0, found=0.3),
        acting(make, 1, summarize=summarize, last=0.0, found=0.0),
        acting(make, 2, summarize=False, last=0.4, found=0.1),
    )
    return assemble_batch(select_trainable(make.groups(*attempts), {}).samples, pack_prefix_tree)


def outputs_of(batch: TrainingBatch) -> ModelOutputs:
    """Return values that depend on the token, and after actions on the turn's last token."""
    before = torch.where(batch.ids == 5, 8.0, batch.ids.double()) / 20  # a summary is valued as the action after it
    last = [int((batch.token_turn == turn).nonzero().max()) for turn in range(len(batch.turn_trajectory))]
    return ModelOutputs(values=StateValues(before, batch.ids[last].double() / 30))


@pytest.mark.parametrize("name", TURN_LEVEL)
def test_a_summary_changes_no_other_advantage_and_shares_that_of_the_action_it_prepares(name: str, make: Any) -> None:
    algorithm = build_algorithm(name, {})
    if name == "bi-level-gae":  # tokens of a summary are time steps of the lower level: at 1 they cancel
        algorithm = build_algorithm(name, {"advantage.turn_gamma": 0.9})
    plain, summarized = batch_of(make, summarize=False), batch_of(make, summarize=True)
    expected = algorithm.compute_token_weights(plain, outputs_of(plain)).advantage
    found = algorithm.compute_token_weights(summarized, outputs_of(summarized)).advantage
    if name == "bi-level-gae":
        expected, found = expected.sign(), found.sign()
    # the first attempt: two tokens | summary of three | one | two | summary of one
    first, second, third = expected[0:2].tolist(), expected[2:3].tolist(), expected[3:5].tolist()
    assert found[:9].tolist() == pytest.approx([*first, *second * 3, *second, *third, third[-1]])
    assert found[18:].tolist() == pytest.approx(expected[10:].tolist())  # the attempt without summaries


@pytest.mark.parametrize("name", ["steppo", "ppo", "bi-level-gae"])
def test_a_critic_has_no_target_after_a_summary_that_an_action_follows(name: str, make: Any) -> None:
    algorithm = build_algorithm(name, {"advantage.bootstrap": True})
    batch = batch_of(make, summarize=True)
    targets = algorithm.compute_token_weights(batch, outputs_of(batch)).value_targets
    assert targets is not None
    known = targets.weight.after_action > 0
    # act, summary, act, act, summary: the state after the trailing summary is the end of the episode
    assert known.tolist() == [True, False, True, False, True] * 2 + [True] * 3
    assert float(targets.weight.after_action.sum()) == pytest.approx(1.0)


def test_the_penalty_for_turns_counts_no_summaries(make: Any) -> None:
    algorithm = build_algorithm("dr-grpo", {"shaping.turns": 0.5})
    plain, summarized = batch_of(make, summarize=False), batch_of(make, summarize=True)
    one, other = (algorithm.compute_token_weights(batch, ModelOutputs()).advantage for batch in (plain, summarized))
    assert one[0] == other[0] and one[-1] == other[-1]


def test_replayed_advantages_sum_to_the_return_minus_that_of_the_others(make: Any) -> None:
    chain = [make.turn(0, [1], [2]), make.turn(1, [3], [4], parent=0, kind="summary"), make.turn(2, [1, 4], [5, 6])]
    chain.append(make.turn(3, [7], [8], parent=2, rewards={"step": 0.5}))
    groups = make.groups(
        make.trajectory(chain, {"score": 1.0}),
        make.trajectory(make.chain(([1], [2]), ([3], [4])), {"score": 0.25}, member=1),
        make.trajectory(make.chain(([1], [2]), ([3], [4])), {"score": 1.0}, group=1),  # without others
    )
    algorithm = build_algorithm("vineppo-turn", {})
    batch = assemble_batch(select_trainable(groups, {}).samples, pack_prefix_tree)
    advantage = algorithm.compute_token_weights(batch, ModelOutputs()).advantage
    # the continuations have the step's 0.5 too: V 1.1 before the summary and after it, 0.2 for the second attempt
    assert close(advantage, numbers(1.1 - 0.25, 0, 0, 0, 1.5 - 1.1, 0.2 - 1.5, 0.25 - 0.2, 0, 1.0 - 0.6))
    values = algorithm.advantage.state_values(batch)
    assert close(values.before_token, numbers(0.25, 1.1, 1.1, 1.1, 1.1, 1.5, 0.2, 0.6, 0.6))


def test_a_turn_without_tokens_hands_its_value_on(make: Any) -> None:
    silent = [make.turn(0, [1], [2]), make.turn(1, [3], [], parent=0, kind="summary"), make.turn(2, [1], [5])]
    groups = make.groups(
        make.trajectory(silent, {"score": 1.0}), make.trajectory(make.chain(([1], [2])), {"score": 0.0}, member=1)
    )
    batch = assemble_batch(select_trainable(groups, {}).samples, pack_prefix_tree)
    advantage = build_algorithm("vineppo-turn", {}).compute_token_weights(batch, ModelOutputs()).advantage
    assert close(advantage, numbers(0.6, 0.4, -1.0))
