"""The pure functions that algorithms are made of: over flat tensors, for any unit of credit.

A ``unit`` (or ``key``) names for each element of a flat tensor what it belongs to: the turn, the
trajectory or the group of a token, the group of a trajectory. Units are numbered from 0.
Everything here sees action tokens (or turns, or trajectories) only: there are no others to skip.
"""
