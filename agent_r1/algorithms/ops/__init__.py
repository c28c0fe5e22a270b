"""Pure functions that several algorithms share, over flat tensors.

A ``unit`` (or ``key``) gives for each element of a flat tensor the unit it belongs to: the turn, trajectory or group
of a token, or the group of a trajectory. Units are numbered from 0. The tensors hold action tokens only (or turns, or
trajectories), so nothing has to be masked here.
"""
