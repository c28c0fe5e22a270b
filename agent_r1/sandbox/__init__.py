"""Isolated execution of code written by a model. By default, each program runs in a container without network."""
