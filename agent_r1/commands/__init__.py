"""The commands of ``agent-r1``."""
