"""Checkpoints: saving during training, and continuing a run from its newest intact checkpoint."""
