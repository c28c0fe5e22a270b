"""Inference engines: the embedded engine, clients of vLLM and SGLang servers, and guidance by values of a critic."""
