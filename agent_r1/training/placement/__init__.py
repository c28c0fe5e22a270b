"""Placement of the processes of a run: ranks of the trainer and vLLM servers in the actors of a Ray cluster."""
