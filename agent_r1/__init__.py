"""Train LLM agents end to end by reinforcement learning."""
