"""The always-on doctor of a run: what may be learned from, what the numbers may be, and when to stop."""
