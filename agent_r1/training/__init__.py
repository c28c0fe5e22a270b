"""Training: the services of a run, the training loop, evaluation, checkpoints, the monitor, and the Python API."""
