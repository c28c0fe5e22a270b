from environment_fixtures import attempt_of, call, context, sandbox, says, task  # noqa: F401
