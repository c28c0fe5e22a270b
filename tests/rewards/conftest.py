from environment_fixtures import call, context, make_action, make_trajectory, sandbox, task  # noqa: F401
