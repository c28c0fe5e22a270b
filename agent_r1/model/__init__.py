"""Torch: loading causal language models, token log-probabilities, values, and the generation step."""
