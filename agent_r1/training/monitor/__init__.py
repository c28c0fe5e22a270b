"""Health monitoring of a training run: checks of groups and steps, and a circuit breaker for failing attempts."""

from agent_r1.training.monitor.config import MonitorConfig

__all__ = ["MonitorConfig"]
