"""The policy update: the trainer protocol, two trainers, and the updater that calls a trainer.

Public names are imported at their first use, so ``agent_r1.trainer.config`` loads neither torch nor transformers.
"""
