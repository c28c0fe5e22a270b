"""Chat templates, rendered as transformers renders them, with limits: a template is a program from a model's folder.

Steps and characters are counted, so that the same template is refused on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from agent_r1.core.errors import InvalidInput, UnsupportedChat
from agent_r1.renderers.template_budget import Budget, BudgetExceeded
from agent_r1.renderers.template_environment import LimitedEnvironment

MAX_TEMPLATE = 200_000
"""Characters of a template. Those of current models have up to 30,000."""


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool,
) -> str:
    """Return a conversation as the tokenizer's chat template writes it.

    Messages and tools are OpenAI-style dictionaries. Raises UnsupportedChat if the template fails, and InvalidInput if
    it takes too much time or memory; both name the line of the template.
    """
    try:
        source = tokenizer.get_chat_template(tools=[*tools] or None)
    except ValueError as error:
        raise UnsupportedChat(f"the tokenizer has several chat templates and no default: {error}") from error
    if not isinstance(source, str):
        raise UnsupportedChat(f"the tokenizer's chat_template is not a text but of type {type(source).__name__}")
    variables = {
        **tokenizer.special_tokens_map,
        "messages": [_with_thinking(message) for message in messages],
        "tools": [*tools] or None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return _compile(source).render(variables)


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning under both names that templates read."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


@lru_cache(maxsize=64)
def _compile(source: str) -> ChatTemplate:
    return ChatTemplate(source)


class ChatTemplate:
    """A compiled chat template. Raises UnsupportedChat if it cannot be compiled."""

    def __init__(self, source: str) -> None:
        self._environment = LimitedEnvironment()
        if len(source) > MAX_TEMPLATE:
            raise InvalidInput("chat template", got=f"{len(source)} characters", do=f"use at most {MAX_TEMPLATE}")
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:  # a template that is nested too deeply fails in several ways
            raise UnsupportedChat(f"the chat template is not valid: {_describe(error)}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text of the template.

        Raises UnsupportedChat if the template fails, and InvalidInput if it takes too much time or memory; both name
        the line of the template.
        """
        try:
            data = json.dumps(variables, default=_placeholder)
            self._environment.budget = Budget(len(data))
            return "".join(self._template.generate(json.loads(data)))
        except BudgetExceeded as error:
            do = "use another template (chat_template.jinja in the model's folder), or shorten the conversation"
            raise InvalidInput("chat template", got=_describe(error), do=do) from error
        except Exception as error:  # a template may raise anything
            raise UnsupportedChat(f"the chat template cannot render this conversation: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    """Return one line about an error: the line of the template, and the message."""
    message = " ".join(str(error).split())[:300]
    name = "" if isinstance(error, TemplateError | BudgetExceeded) else f"{type(error).__name__}: "
    line = error.lineno if isinstance(error, TemplateSyntaxError) else _template_line(error)
    return f"{'' if line is None else f'line {line}: '}{name}{message}"


def _template_line(error: Exception) -> int | None:
    """Return the innermost line of the template in the traceback of an error; jinja2 puts template lines there."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def _placeholder(value: object) -> object:
    """Return what a template sees of an object that JSON cannot hold; its methods do not reach the template."""
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"
