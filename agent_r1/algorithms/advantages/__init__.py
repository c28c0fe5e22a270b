"""Advantage estimators. Each estimator is a class whose docstring gives the formula and the paper."""
