"""Reward functions (exact match, F1, format) and the scorer that runs reward functions."""

from agent_r1.rewards.answers import (
    calls_are_valid,
    exact_match,
    f1,
    final_answer,
    final_text,
    gated_exact_match,
    gold_answers,
    sub_match,
)
from agent_r1.rewards.scoring import FunctionScorer, RewardFunction, functions_by_name
from agent_r1.rewards.shuffled import ShuffledScorer
from agent_r1.rewards.terms import TERMS

__all__ = [
    "TERMS",
    "FunctionScorer",
    "RewardFunction",
    "ShuffledScorer",
    "calls_are_valid",
    "exact_match",
    "f1",
    "final_answer",
    "final_text",
    "functions_by_name",
    "gated_exact_match",
    "gold_answers",
    "sub_match",
]
