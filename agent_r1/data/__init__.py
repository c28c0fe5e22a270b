"""Conversion of trajectories to model inputs: training samples, the training batch, packing and micro-batches."""

from agent_r1.data.batch import NamedReward, TokenScope, TrainingBatch, assemble_batch
from agent_r1.data.micro_batches import MicroBatch, by_sequence, by_trajectory, make_micro_batches
from agent_r1.data.sequences import (
    Packing,
    TokenSequence,
    TurnPlace,
    pack_causal,
    pack_per_turn,
    pack_prefix_tree,
    with_length_limit,
)
from agent_r1.data.training_sample import Excluded, Selection, TrainingSample, describe_status, select_trainable

__all__ = [
    "Excluded",
    "MicroBatch",
    "NamedReward",
    "Packing",
    "Selection",
    "TokenScope",
    "TokenSequence",
    "TrainingBatch",
    "TrainingSample",
    "TurnPlace",
    "assemble_batch",
    "by_sequence",
    "by_trajectory",
    "describe_status",
    "make_micro_batches",
    "pack_causal",
    "pack_per_turn",
    "pack_prefix_tree",
    "select_trainable",
    "with_length_limit",
]
