from environment_fixtures import (  # noqa: F401
    call,
    context,
    has_ended,
    make_action,
    make_trajectory,
    sandbox,
    serve_script,
    task,
)
