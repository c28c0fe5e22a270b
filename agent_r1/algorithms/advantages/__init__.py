"""Advantage estimators. The docstring of each class gives the formula and the paper."""
