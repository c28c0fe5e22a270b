from environment_fixtures import sandbox  # noqa: F401
