"""Reward functions (exact match, F1, format) and the scorer that runs reward functions."""
