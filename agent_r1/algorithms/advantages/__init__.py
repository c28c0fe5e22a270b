"""Advantage estimators: one small class per estimator, with its formula and its paper."""
