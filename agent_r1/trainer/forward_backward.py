"""Forward and backward passes of the models over a batch, in micro-batches, and the memory that the passes use.

Shapes: N tokens and S turns in the batch; n tokens and s turns in a micro-batch of B sequences padded to T tokens;
hidden size H.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.types import StateValues, TokenOutputs, TokenWeights, TopTokens, ValueTargets
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.profile import measure
from agent_r1.data.batch import TrainingBatch, unique_ids
from agent_r1.data.sequences import (
    Block,
    MicroBatch,
    PrefixSharing,
    TokenSequence,
    by_sequence,
    by_trajectory,
    plan_passes,
)
from agent_r1.model.forward import PrefixStates, backbone_of, hidden_states, token_scores, top_tokens
from agent_r1.model.value_head import ValueModel
from agent_r1.model.vision import ImageProcessor, PassImages
from agent_r1.trainer.protocol import CRITIC, MODULES, POLICY, Module, PassStats, PreparedBatch, Role

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[Concatenate[PreTrainedModel, P], T]

OOM_MESSAGES = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts in the RuntimeError that PyTorch's CPU allocator or cuBLAS raises if memory runs out."""

STATM = Path("/proc/self/statm")

KEPT = 2**30
"""Bytes by which the process may grow before it gives memory back. After each pass, this would take an eighth of a
step."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelSet:
    """The models that an algorithm uses, on one device. A model that the algorithm does not need is None."""

    policy: PreTrainedModel
    temperature: float  # at which the engine sampled; all log-probabilities are computed at it
    micro_tokens: int
    critic: ValueModel | None = None
    reference: PreTrainedModel | None = None
    teacher: PreTrainedModel | None = None
    sharing: PrefixSharing | None = None  # which common prefixes are computed only once; changes only rounding errors
    images: ImageProcessor | None = None  # None if the models cannot read images

    @torch.no_grad()
    def logprobs(self, batch: TrainingBatch, role: Role = "policy") -> Tensor:
        """Return the log-probability that the model ``role`` gives to each token: (N,) float64 on the CPU.

        As in the methods below, the number is 0 for a token that is in none of ``batch.sequences``.
        """
        model = {"policy": self.policy, "reference": self.reference, "teacher": self.teacher}[role]
        if model is None:
            raise ValueError(f"this algorithm has no {role}")
        logprobs = torch.zeros(len(batch.ids), dtype=torch.float64)
        for micro, scored, _ in self._scores(batch, model):
            logprobs[micro.tokens] = scored.double().cpu()
        return logprobs

    @torch.no_grad()
    def entropy(self, batch: TrainingBatch) -> Tensor:
        """Return the policy's entropy at each token, in nats: (N,) float64 on the CPU."""
        entropy = torch.zeros(len(batch.ids), dtype=torch.float64)
        for micro, _, scored in self._scores(batch, self.policy):
            entropy[micro.tokens] = scored.double().cpu()
        return entropy

    def _scores(self, batch: TrainingBatch, model: PreTrainedModel) -> Iterator[tuple[MicroBatch, Tensor, Tensor]]:
        for micro, prefix in self._passes(batch, backbone_of(model)):
            images = self.read_images(micro)
            logprobs, entropy = self.call(model, score_tokens, batch, micro, self.temperature, prefix, images=images)
            yield micro, logprobs, entropy  # (n,) each

    @torch.no_grad()
    def top_tokens(self, batch: TrainingBatch, count: int) -> TopTokens:
        """Return the teacher's k most likely tokens at the position of each of the batch's N tokens: (N, k)."""
        if self.teacher is None:
            raise ValueError("this algorithm has no teacher")
        # a teacher can embed more tokens than the policy, whose vocabulary bounds the tokens
        vocabulary = self.policy.get_output_embeddings().weight.shape[0]
        shape = (len(batch.ids), min(count, vocabulary, self.teacher.get_output_embeddings().weight.shape[0]))  # (N, k)
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

    def plan(self, blocks: Sequence[Block]) -> tuple[Tensor, Iterator[MicroBatch]]:
        """Return the common prefix of all sequences in ``blocks``, and micro-batches of the tokens after the prefix."""
        with measure("packing"):
            prefix, micro_batches = plan_passes(blocks, self.micro_tokens, self.sharing)
        return prefix.to(self.policy.device), self._on_device(micro_batches)

    def _on_device(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        while True:
            with measure("packing"):
                micro = next(micro_batches, None)
                if micro is None:
                    return
                micro = micro.to(self.policy.device)
            yield micro

    def _passes(self, batch: TrainingBatch, backbone: PreTrainedModel) -> Iterator[tuple[MicroBatch, PrefixStates]]:
        ids, micro_batches = self.plan(by_sequence(batch.sequences))
        with measure("forward"):
            prefix = PrefixStates(backbone, ids)
        for micro in micro_batches:
            with measure("forward"):  # the caller runs the model before it takes the next micro-batch
                yield micro, prefix


def blocks_of(sequences: Sequence[TokenSequence], algorithm: Algorithm) -> list[tuple[TokenSequence, ...]]:
    """Group ``sequences`` into blocks, which are never divided between micro-batches: trajectories or sequences."""
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

    With ``others`` (N, k), the ids of k more tokens at each position, the log-probabilities have the shape (n, 1 + k):
    column 0 is for the token of the batch, and columns 1 to k are for ``others``. ``prefix`` holds the keys and values
    of the tokens with which all sequences begin, and which are not in ``micro``.
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
    """Accumulate the gradient of the loss, multiplied by ``scale``, in ``grad`` of the parameters of ``modules``."""
    ids, micro_batches = models.plan(blocks_of(prepared.batch.sequences, algorithm))  # ids: (S,) the common prefix
    backbones = {POLICY: backbone_of(models.policy)}
    if models.critic is not None:
        backbones[CRITIC] = models.critic.backbone
    with measure("forward"):
        prefixes = {module: PrefixStates(backbones[module], ids) for module in backbones if module in modules}
    one_pass = _micro_batch_pass if POLICY in modules else _critic_pass
    parts = [one_pass(models, algorithm, prepared, micro, scale, prefixes) for micro in micro_batches]
    with measure("backward"):
        for prefix in prefixes.values():
            prefix.backward()
    return join_passes(parts, len(ids))


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

    turn = None
    if algorithm.llds is not None:
        turn = unique_ids(batch.token_turn[tokens], action_mask).to(old.device)  # (n,)

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
        turn=turn,
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


def join_passes(parts: Sequence[PassStats], prefix: int = 0) -> PassStats:
    """Return the statistics of passes over different tokens as one, on the CPU. A common ``prefix`` counts once."""
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


# Memory of the passes


class OutOfMemory(AgentR1Error):
    """Memory ran out in an update, and smaller micro-batches cannot help."""


class TokenBudget:
    """The maximum number of tokens in a micro-batch, lowered each time memory runs out. It changes only rounding."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._freed_memory = FreedMemory()

    def run(self, work: Callable[[int], T], largest: Callable[[int], int], undo: Callable[[], None]) -> T:
        """Return ``work(self.tokens)``. Each time memory runs out, repeat the work with a smaller ``self.tokens``.

        ``largest`` returns the size of the largest micro-batch of the pass for a maximum number of tokens. ``undo``
        clears the gradients of a failed pass. Raise OutOfMemory if the largest micro-batch was a single block, which is
        never divided.
        """
        while True:
            try:
                return work(self.tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
                message = first_line(error)
            finally:
                self._freed_memory.give_back()
            # not in the except block, because the traceback of the error keeps the tensors of the pass in memory
            undo()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            failed, longest_block = largest(self.tokens), largest(1)  # 1: each block is a micro-batch by itself
            if failed <= longest_block:
                raise OutOfMemory(
                    f"memory ran out in passes of {self.tokens} tokens, the longest sequence alone has "
                    f"{longest_block}: {message}; lower --context or --max_tokens, or take a smaller model"
                )
            self.tokens = failed // 2  # not self.tokens // 2: the micro-batch can be far below its maximum


@contextmanager
def explain_oom(work: str, do: str = "take a smaller model or more memory") -> Iterator[None]:
    """Raise OutOfMemory if memory runs out in the ``with`` block. Its message has ``work`` and ``do``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        raise OutOfMemory(f"memory ran out in {work}: {first_line(error)}; {do}") from error


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def is_oom(error: RuntimeError | MemoryError) -> bool:
    known = any(message in str(error) for message in OOM_MESSAGES)
    return known or isinstance(error, MemoryError | torch.OutOfMemoryError)


class FreedMemory:
    """Gives freed memory of the process back to the operating system, if the C library is glibc.

    glibc keeps freed memory, but tensors of new sizes often do not fit into the freed memory. So the process would grow
    with each step: a run of SmolLM2-135M held 20 GB after 16 steps.
    """

    def __init__(self) -> None:
        # bytes that the process held at first, or after the last return
        self._resident = 0 if _malloc_trim() is None else _resident_bytes()

    def give_back(self) -> None:
        """Give freed memory back if the process has grown by ``KEPT`` bytes. Call this method after each pass."""
        trim = _malloc_trim()
        if trim is not None and _resident_bytes() > self._resident + KEPT:
            trim(0)  # 0: keep no freed memory at the ends of the heaps
            self._resident = _resident_bytes()


def _resident_bytes() -> int:
    return int(STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim if STATM.exists() else None
    except (OSError, AttributeError):
        return None
