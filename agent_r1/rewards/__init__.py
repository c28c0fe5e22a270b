"""Reward functions (exact match, F1, format) and the scorer that runs them."""

from agent_r1.rewards.answers import exact_match, f1, final_answer, gated_exact_match, sub_match
from agent_r1.rewards.scoring import FunctionScorer

__all__ = ["FunctionScorer", "exact_match", "f1", "final_answer", "gated_exact_match", "sub_match"]
