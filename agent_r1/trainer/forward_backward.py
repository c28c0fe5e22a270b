"""Forward and backward passes of the models over a batch, in micro-batches.

Shapes: N tokens and S turns in the batch; n tokens and s turns in a micro-batch of B sequences padded to T tokens;
hidden size H.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.types import StateValues, TokenOutputs, TokenWeights, TopTokens, ValueTargets
from agent_r1.core.errors import InvalidInput
from agent_r1.core.profile import measure
from agent_r1.data.batch import TrainingBatch, unique_ids
from agent_r1.data.micro_batches import MicroBatch, PassPlan, by_sequence, by_trajectory, plan_passes
from agent_r1.data.sequences import Block, PrefixSharing, TokenSequence
from agent_r1.model.forward import PrefixStates, backbone_of, hidden_states, token_scores, top_tokens
from agent_r1.model.value_head import ValueModel
from agent_r1.model.vision import ImageProcessor, PassImages
from agent_r1.trainer.protocol import CRITIC, MODULES, POLICY, Module, PassStats, PreparedBatch, Role

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[Concatenate[PreTrainedModel, P], T]


@dataclass(frozen=True, slots=True, eq=False)
class ModelSet:
    """The models that an algorithm uses, on one device. A model that the algorithm does not need is None.

    Attributes:
        temperature: the temperature at which the engine sampled. All log-probabilities are computed at this
            temperature.
        sharing: determines which common prefixes of sequences are computed only once; None to share no prefix. Sharing
            changes results only by rounding errors.
        images: the image processor of the models; None if the models cannot read images.
    """

    policy: PreTrainedModel
    temperature: float
    micro_tokens: int
    critic: ValueModel | None = None
    reference: PreTrainedModel | None = None
    teacher: PreTrainedModel | None = None
    sharing: PrefixSharing | None = None
    images: ImageProcessor | None = None

    @torch.no_grad()
    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        """Return the log-probability that the model ``role`` gives to each token: (N,) float64 on the CPU.

        The log-probability is 0 for a token that is in none of ``batch.sequences``. The methods :meth:`entropy`,
        :meth:`top_tokens` and :meth:`values` return 0 for such a token, too.
        """
        model = {"policy": self.policy, "reference": self.reference, "teacher": self.teacher}[role]
        if model is None:
            raise ValueError(f"this algorithm has no {role}")
        logprobs = torch.zeros(len(batch.ids), dtype=torch.float64)
        for micro, prefix in self._passes(batch, backbone_of(model)):
            images = self.read_images(micro)
            scored, _ = self.call(model, score_tokens, batch, micro, self.temperature, prefix, images=images)
            logprobs[micro.tokens] = scored.double().cpu()
        return logprobs

    @torch.no_grad()
    def entropy(self, batch: TrainingBatch) -> Tensor:
        """Return the policy's entropy at each token, in nats: (N,) float64 on the CPU."""
        entropy = torch.zeros(len(batch.ids), dtype=torch.float64)
        for micro, prefix in self._passes(batch, backbone_of(self.policy)):
            images = self.read_images(micro)
            _, scored = self.call(self.policy, score_tokens, batch, micro, self.temperature, prefix, images=images)
            entropy[micro.tokens] = scored.double().cpu()
        return entropy

    @torch.no_grad()
    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        """Return the teacher's k most likely tokens at the position of each of the batch's N tokens: (N, k).

        k is the smallest of three numbers: ``count``, the policy's vocabulary size, the teacher's vocabulary size.
        """
        if self.teacher is None:
            raise ValueError("this algorithm has no teacher")
        vocabulary = self.policy.get_output_embeddings().weight.shape[0]
        shape = (len(batch.ids), min(count, vocabulary, self.teacher.get_output_embeddings().weight.shape[0]))
        top = TopTokens(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.float64))
        for micro, prefix in self._passes(batch, backbone_of(self.teacher)):
            arguments = (micro, prefix, self.read_images(micro), count, self.temperature, vocabulary)
            ids, logprobs = self.call(self.teacher, _top_tokens, *arguments)
            top.ids[micro.tokens], top.logprobs[micro.tokens] = ids.cpu(), logprobs.double().cpu()
        return top

    @torch.no_grad()
    def values(self, batch: TrainingBatch) -> StateValues:
        """Return the critic's values before each token and after each action of the batch, in float64 on the CPU."""
        if self.critic is None:
            raise ValueError("this algorithm has no critic")
        before_token = torch.zeros(len(batch.ids), dtype=torch.float64)
        after_action = torch.zeros(len(batch.turn_trajectory), dtype=torch.float64)
        for micro, prefix in self._passes(batch, self.critic.backbone):
            values = _critic_values(self.critic, batch, micro, prefix, self.read_images(micro))
            before_token[micro.tokens] = values.before_token.double().cpu()
            after_action[micro.turns] = values.after_action.double().cpu()
        return StateValues(before_token, after_action)

    def read_images(self, micro: MicroBatch) -> PassImages | None:
        if not micro.media:
            return None
        if self.images is None:
            raise InvalidInput("model", got="a sequence with images", do="name a model with vision")
        return PassImages.of(micro.media, micro.ids.shape[1], self.images, micro.ids.device)

    def call(self, model: PreTrainedModel, work: Work[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Return ``work(model, *arguments, **options)``. A subclass first gathers the weights of a sharded model."""
        return work(model, *arguments, **options)

    def plan(self, blocks: Sequence[Block]) -> PassPlan:
        """Return the common prefix of all sequences in ``blocks``, and micro-batches of the tokens after the prefix."""
        with measure("packing"):
            plan = plan_passes(blocks, self.micro_tokens, self.sharing)
        return PassPlan(plan.prefix.to(self.policy.device), self._on_device(plan.micro_batches))

    def _on_device(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        while True:
            with measure("packing"):
                micro = next(micro_batches, None)
                if micro is None:
                    return
                micro = micro.to(self.policy.device)
            yield micro

    def _passes(self, batch: TrainingBatch, backbone: PreTrainedModel) -> Iterator[tuple[MicroBatch, PrefixStates]]:
        plan = self.plan(by_sequence(batch.sequences))
        with measure("forward"):
            prefix = PrefixStates(backbone, plan.prefix)
        for micro in plan.micro_batches:
            with measure("forward"):  # the caller runs the model before it takes the next micro-batch
                yield micro, prefix


def blocks_of(sequences: Sequence[TokenSequence], algorithm: Algorithm) -> list[tuple[TokenSequence, ...]]:
    """Group ``sequences`` into blocks, and return the blocks. A block is never divided between micro-batches.

    If the algorithm needs whole trajectories, a block holds all sequences of a trajectory. Otherwise a block holds one
    sequence.
    """
    return by_trajectory(sequences) if algorithm.needs_whole_trajectories else by_sequence(sequences)


def score_tokens(
    model: PreTrainedModel,
    batch: TrainingBatch,
    micro: MicroBatch,
    temperature: float,
    prefix: PrefixStates | None = None,
    entropy_gradient: bool = False,
    others: Tensor | None = None,
    images: PassImages | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities, entropies) at the n tokens of a micro-batch, in nats: (n,) each.

    With ``others``, k more tokens are scored at each position. The log-probabilities then have the shape (n, 1 + k).
    Column 0 is for the token of the batch, and columns 1 to k are for the tokens in ``others``.

    Args:
        prefix: the keys and values of the tokens with which all sequences begin. These tokens are not in ``micro``.
            None: all tokens are in ``micro``.
        entropy_gradient: whether the entropies have a gradient.
        others: the ids of the k other tokens at the position of each of the N tokens of the batch: (N, k).
    """
    hidden = hidden_states(model, micro.ids, micro.position_ids, micro.subtree_end, prefix, images).flatten(0, 1)
    hidden = hidden[micro.logit_positions]  # (n, H)
    targets = batch.ids[micro.tokens].to(hidden.device)  # (n,)
    if others is not None:
        targets = torch.cat([targets[:, None], others[micro.tokens].to(hidden.device)], dim=1)  # (n, 1 + k)
    return token_scores(model, hidden, targets, temperature, entropy_gradient=entropy_gradient)


def _top_tokens(
    model: PreTrainedModel,
    micro: MicroBatch,
    prefix: PrefixStates,
    images: PassImages | None,
    count: int,
    temperature: float,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    hidden = hidden_states(model, micro.ids, micro.position_ids, micro.subtree_end, prefix, images).flatten(0, 1)
    return top_tokens(model, hidden[micro.logit_positions], count, temperature, vocabulary)


def forward_backward(
    models: ModelSet,
    algorithm: Algorithm,
    prepared: PreparedBatch,
    scale: float = 1.0,
    modules: Collection[Module] = MODULES,
) -> PassStats:
    """Accumulate the gradient of the loss, multiplied by ``scale``, in the parameters' ``grad``. Return statistics.

    Only parameters of ``modules`` get a gradient. If "policy" is not in ``modules``, the loss is only the value loss of
    the critic. The batch must have at least one sequence.
    """
    plan = models.plan(blocks_of(prepared.batch.sequences, algorithm))
    backbones = {POLICY: backbone_of(models.policy)}
    if models.critic is not None:
        backbones[CRITIC] = models.critic.backbone
    with measure("forward"):
        prefixes = {module: PrefixStates(backbones[module], plan.prefix) for module in backbones if module in modules}
    one_pass = _micro_batch_pass if POLICY in modules else _critic_pass
    parts = [one_pass(models, algorithm, prepared, micro, scale, prefixes) for micro in plan.micro_batches]
    with measure("backward"):
        for prefix in prefixes.values():
            prefix.backward()
    return join_passes(parts, len(plan.prefix))


def join_passes(parts: Sequence[PassStats], prefix: int = 0) -> PassStats:
    """Return the statistics of several passes as one PassStats, on the CPU. Losses and metrics are summed.

    ``prefix`` is the number of tokens in a common prefix, which was read only once for all passes. No two passes may
    predict the same token.
    """
    return PassStats(
        loss=torch.stack([part.loss for part in parts]).sum().cpu(),
        metrics={name: torch.stack([part.metrics[name] for part in parts]).sum().cpu() for name in parts[0].metrics},
        tokens=torch.cat([part.tokens for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]).cpu(),
        ratios=torch.cat([part.ratios for part in parts]).cpu(),
        entropy=torch.cat([part.entropy for part in parts]).cpu(),
        num_tokens=prefix + sum(part.num_tokens for part in parts),
        num_padded_tokens=prefix + sum(part.num_padded_tokens for part in parts),
    )


def _critic_pass(
    models: ModelSet,
    algorithm: Algorithm,
    prepared: PreparedBatch,
    micro: MicroBatch,
    scale: float,
    prefixes: Mapping[Module, PrefixStates],
) -> PassStats:
    targets, old_values = prepared.weights.value_targets, prepared.outputs.values
    if models.critic is None or targets is None or old_values is None:
        raise ValueError("this algorithm has no critic")
    with measure("forward"):
        images = models.read_images(micro)
        values = _critic_values(models.critic, prepared.batch, micro, prefixes[CRITIC], images)
        like = values.before_token.detach()
        scaled = _scaled_targets(targets, micro, scale, like)
        loss = algorithm.compute_value_loss(values, _state_values_at(old_values, micro, like), scaled)
    with measure("backward"):
        loss.backward()
    none = like[:0]  # (0,): the policy does not run
    return PassStats(
        loss=loss.detach(),
        metrics={"value_loss": loss.detach()},
        tokens=micro.tokens[:0],
        logprobs=none,
        ratios=none,
        entropy=none,
        num_tokens=micro.num_tokens,
        num_padded_tokens=micro.ids.numel(),
    )


def _micro_batch_pass(
    models: ModelSet,
    algorithm: Algorithm,
    prepared: PreparedBatch,
    micro: MicroBatch,
    scale: float,
    prefixes: Mapping[Module, PrefixStates],
) -> PassStats:
    with measure("forward"):
        tokens = _token_outputs(models, algorithm, prepared, micro, prefixes)
        weights, targets, like = prepared.weights, prepared.weights.value_targets, tokens.logprobs
        scaled = TokenWeights(
            advantage=micro.gather(weights.advantage, like),
            loss_weight=scale * micro.gather(weights.loss_weight, like),
            importance_weight=micro.gather(weights.importance_weight, like),
            sft_weight=None if weights.sft_weight is None else scale * micro.gather(weights.sft_weight, like),
            value_targets=None if targets is None else _scaled_targets(targets, micro, scale, like),
            kl_coef=weights.kl_coef,
            drift_weight=None if weights.drift_weight is None else micro.gather(weights.drift_weight, like),
        )
        loss, metrics = algorithm.compute_loss(tokens, scaled)
    with measure("backward"):
        loss.backward()
    return PassStats(
        loss=loss.detach(),
        metrics=metrics,
        tokens=micro.tokens,
        logprobs=tokens.logprobs.detach(),
        ratios=(tokens.logprobs.detach() - tokens.old_logprobs).exp(),
        entropy=tokens.entropy.detach(),
        num_tokens=micro.num_tokens,
        num_padded_tokens=micro.ids.numel(),
    )


def _token_outputs(
    models: ModelSet,
    algorithm: Algorithm,
    prepared: PreparedBatch,
    micro: MicroBatch,
    prefixes: Mapping[Module, PrefixStates],
) -> TokenOutputs:
    batch, outputs, tokens = prepared.batch, prepared.outputs, micro.tokens
    reference = outputs.reference_logprobs

    # log pi(token | context) at the sampler's temperature, and the entropy of pi( . | context): (n,) each. With a
    # teacher's top tokens also their log pi: (n, k)
    top = outputs.teacher_top
    others = None if top is None else top.ids
    with_gradient, images = algorithm.entropy_coef > 0, models.read_images(micro)
    scored, entropy = models.call(
        models.policy, score_tokens, batch, micro, models.temperature, prefixes[POLICY], with_gradient, others, images
    )
    logprobs = scored if top is None else scored[:, 0]

    # ratio = pi / pi_old. No policy sampled the observations, so their pi_old is set to pi, and their ratio is 1.
    old = logprobs.detach()
    action_mask = batch.action_mask[tokens]
    sampler = torch.where(action_mask.to(old.device), micro.gather(batch.sampler_logprobs, logprobs), old)
    if prepared.old_logprobs is not None:
        old = torch.where(action_mask.to(old.device), micro.gather(prepared.old_logprobs, logprobs), old)

    # All tokens of a unit (a turn or a trajectory) share one ratio. Observations form separate units: their ratios of 1
    # would draw the mean ratio of the actions towards 1.
    unit = algorithm.ratio_unit(batch)  # (N,)
    ratio_unit = None if unit is None else unique_ids(unit[tokens], action_mask).to(old.device)  # (n,)
    trajectory = None
    if algorithm.off_policy_mask is not None:
        trajectory = unique_ids(batch.token_trajectory[tokens], action_mask).to(old.device)  # (n,)

    values = old_values = None
    if CRITIC in prefixes and models.critic is not None and outputs.values is not None:
        values = _critic_values(models.critic, batch, micro, prefixes[CRITIC], images)
        old_values = _state_values_at(outputs.values, micro, logprobs)

    return TokenOutputs(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=old,
        ratio_unit=ratio_unit,
        reference_logprobs=None if reference is None else micro.gather(reference, logprobs),
        values=values,
        old_values=old_values,
        sampler_logprobs=sampler,
        trajectory=trajectory,
        top_logprobs=None if top is None else scored[:, 1:],
        teacher_top_logprobs=None if top is None else micro.gather(top.logprobs, logprobs),
    )


def _critic_values(
    critic: ValueModel, batch: TrainingBatch, micro: MicroBatch, prefix: PrefixStates, images: PassImages | None
) -> StateValues:
    logprobs = None
    if critic.logprob_input is not None:
        sampled = batch.sampler_logprobs[micro.tokens].nan_to_num(0.0).to(micro.ids.device, torch.float32)  # (n,)
        logprobs = sampled.new_zeros(micro.ids.numel()).index_put((micro.token_positions,), sampled).view_as(micro.ids)
    flat = critic(micro.ids, micro.position_ids, micro.subtree_end, logprobs, prefix, images).flatten()  # (B*T,)
    return StateValues(flat[micro.logit_positions], flat[micro.post_action_states])


def _state_values_at(values: StateValues, micro: MicroBatch, like: Tensor) -> StateValues:
    return StateValues(micro.gather(values.before_token, like), values.after_action[micro.turns].to(like))


def _scaled_targets(targets: ValueTargets, micro: MicroBatch, scale: float, like: Tensor) -> ValueTargets:
    weight = _state_values_at(targets.weight, micro, like)
    scaled = StateValues(scale * weight.before_token, scale * weight.after_action)
    return ValueTargets(_state_values_at(targets.target, micro, like), scaled)
