"""Algorithms as data: advantage estimators, policy losses, optional terms, and the presets that combine them."""
