"""Conversion of trajectories to model inputs: training samples, the training batch, packing and micro-batches."""
