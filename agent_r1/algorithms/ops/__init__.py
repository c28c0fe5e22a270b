"""Pure functions over flat tensors, which several algorithms use.

The argument ``unit`` (or ``key``) is a tensor with the number of the unit of each element: the turn, trajectory or
group of a token, or the group of a trajectory. Units are numbered from 0. The functions use every element that they
get, so the caller must first remove the elements that a mask excludes.
"""
