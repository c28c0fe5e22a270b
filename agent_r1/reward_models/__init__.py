"""Reward models: transformers that score whole traces. They are trained on recorded runs, for use in other runs.

A trace is a recorded attempt. Each name of this package is imported when it is first used.
"""
