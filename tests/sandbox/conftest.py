from environment_fixtures import make_trajectory, call, context, sandbox, make_action, task  # noqa: F401
