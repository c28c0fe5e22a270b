"""Rollouts: sessions, which make turns; the agent loop and other rollouts; context policies; and the collector.

Each name is imported on first use, so that ``agent_r1.rollout.config`` does not load torch.
"""
