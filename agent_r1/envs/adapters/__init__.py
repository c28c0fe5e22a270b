"""Adapters for environments of other projects. An adapter imports its package when the adapter is first used."""
