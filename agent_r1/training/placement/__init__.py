"""Placement of a run on a Ray cluster: one Ray actor for each vLLM server, and one for each rank of the trainer."""
