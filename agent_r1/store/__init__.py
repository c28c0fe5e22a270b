"""A run on disk: its database, files and configuration."""
