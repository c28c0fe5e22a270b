"""Learning: from groups of trajectories to new weights. Batch, algebra, rows, learner."""
