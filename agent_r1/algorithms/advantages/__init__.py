"""Advantage estimators. Each estimator is one class, whose docstring gives the formula and the paper."""
