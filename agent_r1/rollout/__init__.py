"""Rollouts: sessions, which make turns; the agent loop and other rollouts; context policies; and the collector."""
