"""Tiny vision models with random weights, made here from nothing, and their pretraining for the task set shapes."""
