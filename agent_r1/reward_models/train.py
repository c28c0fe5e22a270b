"""The training of a reward model on recorded runs, and its evaluation on held-out tasks."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_r1.core.errors import InvalidInput
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.model.value_head import build_value_model
from agent_r1.model.weights import MixedPrecision, cast_parameters, choose_device, mixed_precision
from agent_r1.reward_models.config import RewardModelConfig
from agent_r1.reward_models.evaluation import (
    BASELINES,
    Evaluation,
    Trace,
    TraceSplit,
    auc,
    batches,
    draw_traces,
    evaluate_scores,
    pack_traces,
    read_traces,
    split_by_task,
    with_contrast,
)
from agent_r1.reward_models.network import (
    HeadNetwork,
    ImplicitNetwork,
    RewardModel,
    backward,
    find_sharing,
    save_reward_model,
    trace_loss,
)
from agent_r1.store.reader import RunReader
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.optimizer import Optimizer
from agent_r1.trainer.protocol import CRITIC

WARMUP = 0.1
"""The share of the optimizer steps in which the learning rate rises."""

SCORED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class RewardModelReport:
    """The result of ``agent-r1 train-reward``. ``losses`` has the mean loss of each epoch."""

    out: Path
    training_traces: int
    training_tasks: int
    losses: tuple[float, ...]
    evaluation: Evaluation


def train_reward_model(
    runs: Sequence[Path], config: RewardModelConfig, say: Callable[[str], None]
) -> RewardModelReport:
    """Train a reward model on the attempts of ``runs``, write the model to ``config.out``, and return a report.

    ``say`` prints a line about the progress. Raise InvalidInput if the runs, the model or the settings cannot be used.
    """
    _require_new_folder(config.out)
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    split = split_by_task(read_traces(runs, config.reward), config.held_out, config.seed)
    split = replace(split, training=draw_traces(split.training, config.max_attempts, config.seed))
    _require_both_outcomes(split, config)
    name, tokenizer = _find_model(runs, config)
    start = load_model(name, torch.float32).to(choose_device(config.device))  # type: ignore[arg-type]
    model, computing, weights = _build(start, config)
    losses = _fit(computing, weights, split.training, config, say)
    evaluation = _evaluate(computing, split, config)
    save_reward_model(config.out, model, tokenizer, config, tuple(run.name for run in runs), evaluation)
    tasks = len({trace.trajectory.task_id for trace in split.training})
    return RewardModelReport(config.out, len(split.training), tasks, losses, evaluation)


def _require_new_folder(out: Path) -> None:
    # Without this check, training could fail at its end.
    try:
        out.lstat()
        found = "which exists"
    except FileNotFoundError:
        parent = next(parent for parent in out.absolute().parents if parent.exists())
        found = "" if parent.is_dir() and os.access(parent, os.W_OK) else f"and {parent} cannot be written"
    except (OSError, ValueError) as error:  # ValueError: a null character
        found = f"which cannot be made: {error}"
    if found:
        raise InvalidInput("out", got=f"{out}, {found}", do="name a new folder")


def _find_model(runs: Sequence[Path], config: RewardModelConfig) -> tuple[str, PreTrainedTokenizerBase]:
    used: list[str] = []
    for run in runs:
        with closing(RunReader(run)) as reader:
            used.append(str(reader.config().get("model", "")))
    name = config.model or used[0]
    tokenizer = load_tokenizer(name)
    for run, own in zip(runs, used, strict=True):
        if own != name and load_tokenizer(own).get_vocab() != tokenizer.get_vocab():
            do = f"give runs of one tokenizer, or another --model: {run} was made by {own}"
            raise InvalidInput("model", got=f"{name}, with another vocabulary than a run", do=do)
    return name, tokenizer


def _require_both_outcomes(split: TraceSplit, config: RewardModelConfig) -> None:
    for what, traces in (("for training", split.training), ("held out", split.held_out)):
        if len({trace.target > config.success for trace in traces}) < 2:
            got = f"{len(traces)} attempts {what}, which are all successes or all failures"
            do = f"give runs with both: a success has a reward above {config.success:g}"
            raise InvalidInput("runs", got=got, do=do)


def _build(model: PreTrainedModel, config: RewardModelConfig) -> tuple[RewardModel, RewardModel, MixedPrecision[Any]]:
    if config.kind != "implicit":
        head = mixed_precision(build_value_model(model), config.dtype, keep=("head",))
        sharing = find_sharing(head.compute.backbone)
        networks = [HeadNetwork(one, sharing) for one in (head.weights, head.compute)]
        kept, computing = (RewardModel(network, config.kind, config.loss) for network in networks)
        return kept, computing, head
    reference = cast_parameters(copy.deepcopy(model).requires_grad_(False), config.dtype)
    pair = mixed_precision(model, config.dtype)
    sharing = find_sharing(pair.compute, reference)
    implicit = [ImplicitNetwork(one, reference, config.beta, sharing) for one in (pair.weights, pair.compute)]
    kept, computing = (RewardModel(one, config.kind, config.loss, config.implicit_reward) for one in implicit)
    return kept, computing, pair


def _fit(
    model: RewardModel,
    weights: MixedPrecision[Any],
    traces: Sequence[Trace],
    config: RewardModelConfig,
    say: Callable[[str], None],
) -> tuple[float, ...]:
    settings = TrainerConfig(critic_learning_rate=config.learning_rate, weight_decay=config.weight_decay)
    optimizer = Optimizer({CRITIC: weights.weights}, settings)
    # Attempts of a group begin alike: in one batch, the tokens that they share are computed once.
    by_group = config.loss == "pairs" or model.network.sharing is not None
    traces = with_contrast(traces) if config.loss == "pairs" else traces
    per_epoch = len(list(batches(traces, config.batch_size, by_group, random.Random(0))))
    if not per_epoch:
        do = "give runs with groups that hold a success and a failure, or loss outcome"
        raise InvalidInput("loss", got="pairs, and no group has two different rewards", do=do)
    warmup, step, means = max(1, round(WARMUP * per_epoch * config.epochs)), 0, []
    for epoch in range(config.epochs):
        losses = []
        for batch in batches(traces, config.batch_size, by_group, random.Random(f"{config.seed}|{epoch}")):
            step += 1
            losses.append(_train_batch(model, batch, config))
            done = optimizer.step(torch.tensor(losses[-1]), (CRITIC,), min(1.0, step / warmup))
            if not done.applied:
                do = "give a lower learning rate, or --dtype float32"
                raise InvalidInput(
                    "learning_rate", got=f"{config.learning_rate:g}, and a loss that is not finite", do=do
                )
            weights.refresh()
        means.append(fmean(losses))
        say(f"epoch {epoch + 1}/{config.epochs}  loss {means[-1]:.4f}  {len(losses)} steps")
    return tuple(means)


def _train_batch(model: RewardModel, batch: Sequence[Trace], config: RewardModelConfig) -> float:
    packed = pack_traces([trace.trajectory for trace in batch])
    is_number = config.loss == "regression" or config.loss == "pairs"
    aims = [trace.target if is_number else float(trace.target > config.success) for trace in batch]
    groups = [trace.group for trace in batch]
    loss = trace_loss(model.network, packed, torch.tensor(aims), groups, config.kind, config.loss)
    return backward(model.network, packed, loss, config.micro_tokens)


def _evaluate(model: RewardModel, split: TraceSplit, config: RewardModelConfig) -> Evaluation:
    trajectories = [trace.trajectory for trace in split.held_out]
    successes = [trace.target > config.success for trace in split.held_out]
    predictions: list[float] = []
    for start in range(0, len(trajectories), SCORED_AT_ONCE):
        scores = model.score(trajectories[start : start + SCORED_AT_ONCE], config.micro_tokens)
        predictions += [model.prediction(score) for score, _ in scores]
    trained = torch.tensor([trace.target > config.success for trace in split.training])
    baselines = {}
    for name, compute in BASELINES.items():
        known = torch.tensor([float(compute(trace.trajectory)) for trace in split.training], dtype=torch.float64)
        sign = 1.0 if auc(known, trained) >= 0.5 else -1.0
        baselines[name] = [sign * compute(trajectory) for trajectory in trajectories]
    tasks = [trajectory.task_id for trajectory in trajectories]
    return evaluate_scores(predictions, successes, tasks, baselines, config)
