"""Correction of the rounding difference between an engine and a trainer that compute in different data types."""

from __future__ import annotations

from collections.abc import Iterable

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.loss_terms import Correction
from agent_r1.algorithms.validation import incompatibilities
from agent_r1.core.events import LogEvent
from agent_r1.core.inference import Dtype

PRECISION = "precision"


def with_correction(algorithm: Algorithm, trainer: Dtype, engine: Dtype, given: Iterable[str]) -> Algorithm:
    """Return ``algorithm``, with a correction if trainer and engine compute in different data types.

    No correction is added if ``algorithm`` already has a correction, if ``algorithm`` cannot have a correction, or if
    the user gave a setting of the correction.
    """
    if trainer == engine or any(key.startswith("algorithm.correction") for key in given):
        return algorithm
    corrected = algorithm.model_copy(update={"correction": Correction()})
    if algorithm.correction is not None or next(incompatibilities(corrected), None) is not None:
        return algorithm
    return corrected


def precision_events(algorithm: Algorithm, trainer: Dtype, engine: Dtype) -> tuple[LogEvent, ...]:
    """Return an event that tells how the algorithm treats the different data types of engine and trainer.

    Return () if both data types are equal.
    """
    if trainer == engine:
        return ()
    if algorithm.correction is not None:
        treatment = f"{algorithm.correction.formula} (--algorithm.correction none: off)"
    elif algorithm.ratio_denominator == "sampler":
        treatment = "ratios are taken to the engine's log-probabilities"
    else:
        treatment = "the difference of their log-probabilities, logprob_gap, is not corrected"
    return (LogEvent(PRECISION, f"the engine computes in {engine} and the trainer in {trainer}: {treatment}"),)
