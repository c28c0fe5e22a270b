"""Placement of a run on a Ray cluster: an actor starts each vLLM server, and each rank of the trainer."""
