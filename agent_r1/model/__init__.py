"""Torch models: loading, token log-probabilities, LoRA adapters, value heads, sentence encoders, checksums of weights.

Public names are imported at their first use, so that ``agent_r1.model.config`` does not import torch.
"""
