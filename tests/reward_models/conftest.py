from learning_fixtures import make  # noqa: F401
