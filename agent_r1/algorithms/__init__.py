"""Algorithms as data: each algorithm consists of an advantage estimator, a policy loss and optional terms.

``ALGORITHMS`` holds the algorithms with a name (presets). The methods of ``Algorithm`` compute the loss.
"""
