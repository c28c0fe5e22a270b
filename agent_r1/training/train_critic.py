"""Train a critic on recorded attempts. A critic is a model with a value head that predicts the value of each state.

There is a state before the first token of each action, and after each token of the action. The training target of a
state is the return: the sum of the attempt's rewards, without rewards for turns before the state's turn. The state
after the last token of an action belongs to the turn of the action, so the return of this state includes the reward of
the turn. Let ``s`` be the state before the action, and ``a`` the action. The value of the state after the action is
therefore an estimate of Q(s, a).
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import atomic_replace_dir
from agent_r1.core.trajectory import Trajectory, Turn, total_reward, weighted_rewards
from agent_r1.model.load import load_model, load_tokenizer, quiet_transformers
from agent_r1.model.value_head import ValueModel, build_value_model, save_value_model
from agent_r1.model.weights import choose_device
from agent_r1.store.reader import RunReader
from agent_r1.store.saved_weights import find_folder
from agent_r1.training.config import CriticConfig
from agent_r1.training.progress import Progress

REPORT = "critic.json"

MAX_GRAD_NORM = 1.0
MEASURED_ROWS = 16

MEASURED = ("of all states", "after actions")


@dataclass(frozen=True, slots=True)
class RecordedReturns:
    """One branch of an attempt, with T tokens and n states, and the return (the sum of rewards) after each state."""

    task_id: str
    token_ids: tuple[int, ...]  # the tokens of the branch up to the end of the last action: (T,)
    logprobs: tuple[float, ...]  # the log-probability of each sampled token, and 0 for other tokens: (T,)
    states: tuple[int, ...]  # the index of the last token before each state: (n,)
    returns: tuple[float, ...]  # the return after each state: (n,)
    is_end: tuple[bool, ...]  # whether each state follows the last token of an action: (n,)


@dataclass(frozen=True, slots=True)
class CriticFit:
    """How well values V predict the returns G of held-out tasks."""

    states: int  # the number of states
    explained_variance: float  # 1 - Var(G - V) / Var(G). NaN if all returns are equal
    error: float  # the mean of (G - V)^2
    mean_error: float  # the mean of (G - m)^2, with the mean return m of the training tasks as baseline


@dataclass(frozen=True, slots=True)
class CriticReport:
    """The result of ``train-critic``: how well the critic predicts the returns of the held-out tasks."""

    folder: str
    attempts: int
    tasks: int
    held_out_attempts: int
    held_out_tasks: int
    all_states: CriticFit  # the fit in all states: before each action, and after each token of the action
    after_actions: CriticFit  # the fit in the states after the last token of an action


def train_critic(run: Path, config: CriticConfig, progress: Progress) -> CriticReport:
    """Train a critic on the attempts of a run, save it, and return its errors on held-out tasks."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    with closing(RunReader(run)) as reader:
        weights: Mapping[str, float] = reader.config().get("reward_weights", {})
        recorded: list[RecordedReturns] = []
        for attempt in reader.trajectories("train"):
            if attempt.has_images:
                got, do = f"{run}, whose attempts have images", "name a run without: this critic reads only text"
                raise InvalidInput("run", got=got, do=do)
            recorded += recorded_returns(attempt, weights)
    train, held_out = split_tasks(recorded[-config.attempts :], config.held_out, config.seed)
    if not train or not held_out:
        do = "give a run whose attempts of at least two tasks have rewards"
        raise InvalidInput("run", got=f"{run}, with {len(recorded)} usable attempts", do=do)
    name = find_folder(config.model or str(run))
    policy, tokenizer = load_model(name, torch.float32), load_tokenizer(name)
    model = build_value_model(policy.to(choose_device(config.device)), config.reads_logprobs)  # type: ignore[arg-type]
    all_states, after_actions = fit(model, train, held_out, config, progress)
    folder = config.out or run / "critic"
    report = CriticReport(
        str(folder), len(train), len(_tasks(train)), len(held_out), len(_tasks(held_out)), all_states, after_actions
    )
    with quiet_transformers(), atomic_replace_dir(folder) as temporary:
        save_value_model(model, temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


def recorded_returns(trajectory: Trajectory, weights: Mapping[str, float]) -> Iterator[RecordedReturns]:
    """Yield the tokens and returns of each branch: a path of turns, each of which continues the turn before.

    Yield nothing if the attempt failed or was not scored.
    """
    total = total_reward(trajectory, weights)
    if total is None:
        return
    earned = [0.0] * len(trajectory.turns)
    for reward in weighted_rewards(trajectory, weights):
        if reward.turn is not None:
            earned[reward.turn] += reward.value
    continued = {turn.parent for turn in trajectory.turns}
    for leaf in trajectory.turns:
        if leaf.index in continued or not leaf.action_ids:
            continue
        path: list[Turn] = [leaf]
        while path[0].parent is not None:
            path.insert(0, trajectory.turns[path[0].parent])
        ids: list[int] = []
        logprobs: list[float] = []
        states: list[int] = []
        returns: list[float] = []
        is_end: list[bool] = []
        for turn in path:
            ids += [*turn.new_ids, *turn.action_ids]
            logprobs += [*(0.0 for _ in turn.new_ids), *turn.logprobs]
            count = len(turn.action_ids)
            states += range(len(ids) - count - 1, len(ids))  # before the first token, and after each token
            returns += [total - math.fsum(earned[: turn.index])] * (count + 1)
            is_end += [False] * count + [True]
        yield RecordedReturns(
            trajectory.task_id, tuple(ids), tuple(logprobs), tuple(states), tuple(returns), tuple(is_end)
        )


def split_tasks(
    recorded: Sequence[RecordedReturns], share: float, seed: int
) -> tuple[list[RecordedReturns], list[RecordedReturns]]:
    """Return (training attempts, held-out attempts). The attempts at a random ``share`` of the tasks are held out."""
    tasks = sorted(_tasks(recorded))
    random.Random(seed).shuffle(tasks)
    held_out = set(tasks[: max(1, round(share * len(tasks)))])
    return [one for one in recorded if one.task_id not in held_out], [
        one for one in recorded if one.task_id in held_out
    ]


def fit(
    model: ValueModel,
    train: Sequence[RecordedReturns],
    held_out: Sequence[RecordedReturns],
    config: CriticConfig,
    progress: Progress,
) -> tuple[CriticFit, CriticFit]:
    """Train ``model`` on the attempts ``train``; measure it on ``held_out`` in all states, and after actions.

    The loss is the mean of (V(s) - G)^2 over the states s of a batch. V(s) is the predicted value of s, and G is the
    return after s. Before the first step, every V(s) is the mean return of ``train``.
    """
    mean = statistics.fmean(value for one in train for value in one.returns)
    with torch.no_grad():
        model.head.bias.fill_(mean)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    steps = config.epochs * math.ceil(len(train) / config.batch_size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, total_iters=steps)
    found = measure_fit(model, held_out, mean)
    for epoch in range(config.epochs):
        order = random.Random(f"{config.seed} {epoch}").sample(train, len(train))
        for start in range(0, len(order), config.batch_size):
            values, returns, _ = predict(model, order[start : start + config.batch_size])
            (values - returns).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        found = measure_fit(model, held_out, mean)
        shown = ", ".join(f"{one.explained_variance:z.2f} {where}" for one, where in zip(found, MEASURED, strict=True))
        progress.print_line(f"epoch {epoch + 1}/{config.epochs}: explained variance on held-out tasks {shown}")
    return found


def predict(model: ValueModel, recorded: Sequence[RecordedReturns]) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each of the n states: the predicted value, the return, and whether it follows an action; (n,) each."""
    device, width = model.head.weight.device, max(len(one.token_ids) for one in recorded)
    ids = torch.zeros(len(recorded), width, dtype=torch.long)  # (B, T), padded on the right
    logprobs = torch.zeros(len(recorded), width)
    for row, one in enumerate(recorded):
        ids[row, : len(one.token_ids)] = torch.tensor(one.token_ids)
        logprobs[row, : len(one.token_ids)] = torch.tensor(one.logprobs)
    values = model(ids.to(device), logprobs=logprobs.to(device))  # (B, T)
    rows = torch.tensor([row for row, one in enumerate(recorded) for _ in one.states])
    columns = torch.tensor([state for one in recorded for state in one.states])
    returns = torch.tensor([value for one in recorded for value in one.returns], device=device)
    is_end = torch.tensor([end for one in recorded for end in one.is_end], device=device)
    return values[rows.to(device), columns.to(device)], returns, is_end


@torch.no_grad()
def measure_fit(model: ValueModel, recorded: Sequence[RecordedReturns], mean: float) -> tuple[CriticFit, CriticFit]:
    """Return the fit to ``recorded`` in all states, and in the states after an action. ``mean``: see
    :class:`CriticFit`.
    """
    parts = [predict(model, recorded[i : i + MEASURED_ROWS]) for i in range(0, len(recorded), MEASURED_ROWS)]
    values, returns, is_end = (torch.cat(column).double() for column in zip(*parts, strict=True))

    def make(mask: Tensor) -> CriticFit:
        v, g = values[mask], returns[mask]
        explained = 1 - (g - v).var() / g.var()
        error, mean_error = (g - v).square().mean(), (g - mean).square().mean()
        return CriticFit(len(g), float(explained), float(error), float(mean_error))

    return make(torch.ones_like(is_end).bool()), make(is_end.bool())


def _tasks(recorded: Sequence[RecordedReturns]) -> set[str]:
    return {one.task_id for one in recorded}
