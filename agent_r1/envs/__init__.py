"""Environments: the tool environment, a simulated user, games of several agents, and adapters."""
