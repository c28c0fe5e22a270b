"""A policy behind the gateway, with scripted answers."""

import pytest
from agent_episodes import Episodes
from tests_tokenizer import hermes_tokenizer

from agent_r1.renderers.template_renderer import TemplateRenderer


@pytest.fixture(scope="session")
def renderer():
    return TemplateRenderer(hermes_tokenizer())


@pytest.fixture
def episodes(renderer):
    return Episodes(renderer)


@pytest.fixture(autouse=True)
def no_request_fails_inside_the_gateway(caplog):
    yield
    assert not [
        record
        for record in caplog.get_records("call")
        if record.name.startswith("agent_r1.gateway") and record.exc_info
    ]
