"""The networks of reward models, and the losses for training the networks.

A trace is a recorded attempt. Shapes: a batch has R traces, S turns with action tokens, and N action tokens. A
micro-batch is a part of the batch, and has s turns with action tokens and n action tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import atomic_dir
from agent_r1.core.task import Task
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import RewardValue, Scores, Trajectory, Unscored
from agent_r1.data.sequences import MicroBatch, PrefixSharing, by_sequence, plan_passes
from agent_r1.model.forward import PrefixStates, backbone_of, hidden_states, supports_tree_mask, token_logprobs
from agent_r1.model.load import load_model, load_tokenizer, quiet_transformers
from agent_r1.model.value_head import ValueModel, load_value_model, save_value_model
from agent_r1.reward_models.config import ImplicitReward, Kind, LossName, RewardModelConfig
from agent_r1.reward_models.evaluation import Evaluation, PackedTraces, pack_traces, without_nan

LARGE_MODEL = 400_000
"""The minimum number of parameters at which a model uses prefix sharing. With prefix sharing, equal first tokens of
several traces are computed only once. In a model with fewer parameters, prefix sharing saves no time."""

Prefixes = tuple[PrefixStates, ...]
"""The attention keys and values of a prefix: the first tokens, which are equal in all sequences of a batch.

The tuple has one entry for each language model. An implicit reward model consists of two language models: the trained
model and the reference model. Any other reward model has one."""


class Network(Protocol):
    """The neural network of a reward model. It computes one score for each turn with action tokens."""

    @property
    def backbones(self) -> tuple[PreTrainedModel, ...]:
        """The models of the network, without their heads."""
        ...

    @property
    def sharing(self) -> PrefixSharing | None:
        """The settings of prefix sharing: equal first tokens of several traces are computed once. None: no sharing."""
        ...

    def turn_scores(self, micro: MicroBatch, turn_of_token: Tensor, prefixes: Prefixes) -> Tensor:
        """Return the scores of the s turns in a micro-batch: (s,), in the order of ``micro.turns``."""
        ...

    def trace_scores(self, scores: Tensor, packed: PackedTraces) -> Tensor:
        """Return the scores of the R traces in ``packed``: (R,). A trace is a recorded attempt."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HeadNetwork:
    """A transformer with a scalar head: the score of a turn is the value at the last token of its action.

    The value depends on all tokens of the trace up to this token. The score of a trace is the score of its last turn.
    """

    model: ValueModel
    sharing: PrefixSharing | None = None

    @property
    def backbones(self) -> tuple[PreTrainedModel, ...]:
        return (self.model.backbone,)

    def turn_scores(self, micro: MicroBatch, turn_of_token: Tensor, prefixes: Prefixes) -> Tensor:
        micro, (prefix,) = micro.to(self.model.head.weight.device), prefixes
        values = self.model(micro.ids, micro.position_ids, micro.subtree_end, prefix=prefix)  # (B, T)
        return values.flatten()[micro.post_action_states].cpu()

    def trace_scores(self, scores: Tensor, packed: PackedTraces) -> Tensor:
        return scores[packed.last_turn]


@dataclass(frozen=True, slots=True, eq=False)
class ImplicitNetwork:
    """Two language models: ``model``, which is trained, and ``reference``, the model before the training.

    Let p be the probability of an action token by ``model``, and p_ref by ``reference``. The score of a turn is the sum
    of beta * log(p / p_ref) over the action tokens of the turn, as in iStar (arXiv:2509.19199). PRIME
    (arXiv:2502.01456), unlike this class, gives each token its own reward. The score of a trace is the sum of the
    scores of its turns.
    """

    model: PreTrainedModel
    reference: PreTrainedModel
    beta: float
    sharing: PrefixSharing | None = None

    @property
    def backbones(self) -> tuple[PreTrainedModel, ...]:
        return backbone_of(self.model), backbone_of(self.reference)

    def turn_scores(self, micro: MicroBatch, turn_of_token: Tensor, prefixes: Prefixes) -> Tensor:
        micro, (prefix, reference_prefix) = micro.to(self.model.device), prefixes
        with torch.no_grad():
            reference = self._logprobs(self.reference, micro, reference_prefix)
        ratio = self.beta * (self._logprobs(self.model, micro, prefix) - reference)  # (n,)
        sums = torch.zeros(int(turn_of_token.max()) + 1, device=ratio.device, dtype=ratio.dtype)
        turns = turn_of_token[micro.tokens].to(ratio.device)
        return sums.index_add(0, turns, ratio)[micro.turns.to(ratio.device)].cpu()

    def _logprobs(self, model: PreTrainedModel, micro: MicroBatch, prefix: PrefixStates) -> Tensor:
        hidden = hidden_states(model, micro.ids, micro.position_ids, micro.subtree_end, prefix).flatten(0, 1)
        targets = micro.ids.flatten()[micro.token_positions]
        return token_logprobs(model, hidden[micro.logit_positions], targets, temperature=1.0)

    def trace_scores(self, scores: Tensor, packed: PackedTraces) -> Tensor:
        return scores.new_zeros(len(packed.last_turn)).index_add(0, packed.trace_of_turn, scores)


def find_sharing(*models: PreTrainedModel) -> PrefixSharing | None:
    """Return the settings of prefix sharing: equal first tokens of several sequences are computed only once."""
    if any(model.num_parameters() < LARGE_MODEL or not supports_tree_mask(model) for model in models):
        return None
    return PrefixSharing(models[0].config.get_text_config().hidden_size, across_micro_batches=True)


def _plan(network: Network, packed: PackedTraces, micro_tokens: int) -> tuple[Iterator[MicroBatch], Prefixes]:
    prefix, micro_batches = plan_passes(by_sequence(packed.sequences), micro_tokens, network.sharing)
    return micro_batches, tuple(PrefixStates(model, prefix.to(model.device)) for model in network.backbones)


def score_turns(network: Network, packed: PackedTraces, micro_tokens: int) -> Tensor:
    """Return the scores of the S turns with action tokens: (S,). The scores have no gradient.

    One pass through the network has at most ``micro_tokens`` tokens.
    """
    scores = torch.zeros(len(packed.trace_of_turn))
    with torch.no_grad():
        micro_batches, prefixes = _plan(network, packed, micro_tokens)
        for micro in micro_batches:
            scores[micro.turns] = network.turn_scores(micro, packed.turn_of_token, prefixes).float()
    return scores


TurnLoss = Callable[[Tensor], Tensor]
"""A function that computes the loss of a batch from the scores (S,) of the S turns in the batch."""


def backward(network: Network, packed: PackedTraces, loss: TurnLoss, micro_tokens: int) -> float:
    """Return the loss of a batch. Add the gradient of the loss to the ``grad`` of the weights.

    The loss L can compare traces of different micro-batches, so L needs the scores of the whole batch. If the batch has
    more than ``micro_tokens`` tokens, the scores of all micro-batches are computed first, without an autograd graph.
    L and dL/dscore are computed from these scores. Then each micro-batch is run again, with the loss
    sum(score * dL/dscore) over its turns. The gradients of these losses add up to the gradient of L.
    """
    micro_batches, prefixes = _plan(network, packed, micro_tokens)
    micros = list(micro_batches)
    if sum(micro.padded_size for micro in micros) <= micro_tokens:
        turns = torch.cat([micro.turns for micro in micros])
        computed = torch.cat([network.turn_scores(micro, packed.turn_of_token, prefixes) for micro in micros]).float()
        value = loss(torch.zeros(len(packed.trace_of_turn)).index_copy(0, turns, computed))
        value.backward()
    else:
        scores = score_turns(network, packed, micro_tokens).requires_grad_()
        value = loss(scores)
        value.backward()
        assert scores.grad is not None
        for micro in micros:
            again = network.turn_scores(micro, packed.turn_of_token, prefixes).float()
            (again * scores.grad[micro.turns]).sum().backward()
    for prefix in prefixes:
        prefix.backward()
    return float(value.detach())


def trace_loss(
    network: Network, packed: PackedTraces, targets: Tensor, groups: Sequence[object], kind: Kind, loss: LossName
) -> TurnLoss:
    """Return the loss function of a batch of R traces. The loss function takes the scores (S,) of all S turns.

    Args:
        targets: (R,) one number per trace. For the loss "outcome", the number is 1 for a success and 0 for a failure.
            For any other loss, the number is the reward.
        groups: (R,) the group of each trace.
    """

    def pointwise(scores: Tensor, aims: Tensor) -> Tensor:
        if loss == "regression":
            return (scores - aims).square()
        return functional.binary_cross_entropy_with_logits(scores, aims, reduction="none")

    def of_turns(scores: Tensor) -> Tensor:
        turns = torch.bincount(packed.trace_of_turn, minlength=len(targets))  # (R,)
        each = pointwise(scores, targets[packed.trace_of_turn]) / turns[packed.trace_of_turn]  # (S,)
        return each.sum() / len(targets)

    def of_traces(scores: Tensor) -> Tensor:
        return pointwise(network.trace_scores(scores, packed), targets).mean()

    def of_pairs(scores: Tensor) -> Tensor:
        return bradley_terry(network.trace_scores(scores, packed), targets, groups)

    return of_pairs if loss == "pairs" else of_turns if kind == "turns" else of_traces


def bradley_terry(scores: Tensor, targets: Tensor, groups: Sequence[object]) -> Tensor:
    """Return the mean of -log sigmoid(score_i - score_j) over all pairs (i, j) of traces.

    A pair is two traces of one group with target_i > target_j. Without a pair, the result is 0. Each argument has one
    entry per trace.
    """
    number = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    group = torch.tensor([number[one] for one in groups])  # (R,)
    better = (targets[:, None] > targets[None, :]) & (group[:, None] == group[None, :])  # (R, R)
    differences = (scores[:, None] - scores[None, :])[better]
    return -functional.logsigmoid(differences).sum() / max(len(differences), 1)


@dataclass(frozen=True, slots=True, eq=False)
class RewardModel:
    """A trained reward model.

    ``kind`` is the form of the reward (see :class:`RewardModelConfig`). ``implicit_reward`` is used only for the kind
    "implicit".
    """

    network: Network
    kind: Kind
    loss: LossName
    implicit_reward: ImplicitReward = "probability"

    def score(self, trajectories: Sequence[Trajectory], micro_tokens: int) -> list[tuple[float, tuple[float, ...]]]:
        """Return a pair for each trajectory: its score, and the scores of its turns that have action tokens."""
        packed = pack_traces(trajectories)
        turns = score_turns(self.network, packed, micro_tokens)
        traces = self.network.trace_scores(turns, packed).tolist()
        sizes = torch.bincount(packed.trace_of_turn, minlength=len(trajectories)).tolist()
        return list(zip(traces, (tuple(part.tolist()) for part in turns.split(sizes)), strict=True))

    def prediction(self, score: float) -> float:
        """Return the prediction for the score of a trajectory: sigmoid(score), a probability."""
        return score if self.loss == "regression" else float(torch.sigmoid(torch.tensor(score, dtype=torch.float64)))


DESCRIPTION = "reward_model.json"
"""The name of the file with the settings and the evaluation of a reward model."""

REFERENCE = "reference"
"""The subfolder with the reference model of an implicit reward model."""

FORMAT = 1


class Description(BaseModel):
    """The part of ``reward_model.json`` that is needed to use the reward model."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    format: int
    kind: Kind
    loss: LossName
    beta: float
    implicit_reward: ImplicitReward = "log_ratio"  # the reward in folders that were made before this setting


def is_reward_model(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def save_reward_model(
    folder: Path,
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    config: RewardModelConfig,
    runs: tuple[str, ...],
    evaluation: Evaluation,
) -> None:
    """Write a reward model to a new folder, which appears only when all its files are written.

    ``runs`` are the names of the runs whose attempts the reward model was trained on.

    Raise InvalidInput if the folder cannot be written.
    """
    about: dict[str, Any] = {
        "format": FORMAT,
        **config.model_dump(mode="json", exclude={"out"}),
        "runs": list(runs),
        "evaluation": without_nan(asdict(evaluation)),
    }
    try:
        with atomic_dir(folder) as temporary:
            with quiet_transformers():
                _save_network(model.network, temporary)
            tokenizer.save_pretrained(temporary)
            (temporary / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput("out", got=f"{folder}: {error.strerror}", do="name a folder that can be written") from error


def _save_network(network: Network, folder: Path) -> None:
    match network:
        case HeadNetwork(model):
            save_value_model(model, folder)
        case ImplicitNetwork(model, reference):
            model.save_pretrained(folder)
            reference.save_pretrained(folder / REFERENCE)


def load_reward_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> RewardModel:
    """Return the reward model in ``folder``, on the CPU, in float32.

    Raise InvalidInput if the folder holds no reward model, or if its vocabulary differs from the policy's
    ``tokenizer``.
    """
    try:
        about = Description.model_validate_json((folder / DESCRIPTION).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        do = f"name a folder that agent-r1 train-reward made: its {DESCRIPTION} cannot be read"
        raise InvalidInput("reward model", got=folder, do=do) from error
    if about.format != FORMAT:
        raise InvalidInput("reward model", got=f"{folder}, of format {about.format}", do="train it again")
    if load_tokenizer(str(folder)).get_vocab() != tokenizer.get_vocab():
        do = "train one on runs of this policy: a reward model reads the policy's tokens"
        raise InvalidInput("reward model", got=f"{folder}, with another vocabulary than the policy", do=do)
    if about.kind == "implicit":
        model, reference = (load_model(str(path), torch.float32) for path in (folder, folder / REFERENCE))
        network = ImplicitNetwork(model, reference, about.beta, find_sharing(model, reference))
        return RewardModel(network, about.kind, about.loss, about.implicit_reward)
    head = load_value_model(folder, torch.float32)
    return RewardModel(HeadNetwork(head, find_sharing(head.backbone)), about.kind, about.loss)


MICRO_TOKENS = 16384
"""The maximum number of tokens in one forward pass."""


@dataclass(frozen=True, slots=True, eq=False)
class RewardModelScorer:
    """A scorer with one reward, called ``name``, from a reward model.

    The prediction of the model is a reward if the model was trained with the loss "regression", otherwise a probability
    of success. The kind of the model determines what the scorer returns:

    - trajectory: the prediction for the whole trajectory.
    - turns: for each turn, the prediction after the turn minus the prediction before the turn. The prediction before
      the first turn counts as 0.
    - implicit: for each turn, the number that ``ImplicitReward`` describes.
    """

    name: str
    model: RewardModel

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        refusals = [_refusal(trajectory) for trajectory in group]
        readable = [trajectory for trajectory, refusal in zip(group, refusals, strict=True) if refusal is None]
        values = iter(await run_in_thread(self._values, readable) if readable else [])
        return tuple({self.name: next(values) if refusal is None else refusal} for refusal in refusals)

    def _values(self, trajectories: Sequence[Trajectory]) -> list[RewardValue]:
        scores = self.model.score(trajectories, MICRO_TOKENS)
        if self.model.kind == "trajectory":
            return [self.model.prediction(score) for score, _ in scores]
        return [self._of_turns(one, turns) for one, (_, turns) in zip(trajectories, scores, strict=True)]

    def _of_turns(self, trajectory: Trajectory, scores: tuple[float, ...]) -> tuple[float, ...]:
        values = scores
        if self.model.kind == "turns":
            values = _rises(map(self.model.prediction, scores))
        elif self.model.implicit_reward == "probability":
            values = _rises(map(self.model.prediction, accumulate(scores)))  # V_k = sigma(S_k)
        remaining = iter(values)
        return tuple(next(remaining) if turn.action_ids else 0.0 for turn in trajectory.turns)


def _rises(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(after - before for before, after in pairwise((0.0, *values)))


def _refusal(trajectory: Trajectory) -> Unscored | None:
    if trajectory.has_images:
        return Unscored("the policy saw images, and reward models read only text")
    if not any(turn.action_ids for turn in trajectory.turns):
        return Unscored("there is no sampled token to read")
    return None
