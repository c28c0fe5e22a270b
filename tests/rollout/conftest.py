from engine_fixtures import tiny_model  # noqa: F401
