"""Inference engines: the embedded engine, a client of vLLM servers, and guidance by values of a critic."""
