"""Render chat templates as transformers does, but with limits on steps, characters and time.

The limits are needed because a template is a program from a model's folder.
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
from agent_r1.renderers.template_locality import find_locality

MAX_TEMPLATE = 200_000
"""The largest number of characters of a template. The templates of current models have up to 30,000 characters."""

KEPT_TEXTS = 512
"""The largest number of rendered conversations that a template caches."""

KEPT_CHARACTERS = 16_384
"""A rendered text is cached only if the variables of the template, as JSON, have at most this many characters."""


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool,
) -> str:
    """Return the text that the tokenizer's chat template writes for a conversation.

    Messages and tools are OpenAI-style dictionaries. With ``add_generation_prompt``, the text ends with the header of
    the assistant's next message.

    Raises:
        UnsupportedChat: the tokenizer has no default template, or the template is invalid or fails.
        InvalidInput: the template is too long, or needs too many steps, too many characters or too much time.
    """
    variables = {
        **tokenizer.special_tokens_map,
        # templates read the reasoning of a message in one of two fields
        "messages": [
            message if (reasoning := message.get("reasoning_content")) is None else {"thinking": reasoning, **message}
            for message in messages
        ],
        "tools": [*tools] or None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return chat_template(tokenizer, with_tools=bool(tools)).render(variables)


def chat_template(tokenizer: PreTrainedTokenizerBase, *, with_tools: bool) -> ChatTemplate:
    """Return the chat template of the tokenizer. Some tokenizers have two templates, with and without tools.

    Raises:
        UnsupportedChat: the tokenizer has no default template, or the template is invalid.
        InvalidInput: the template is too long.
    """
    try:
        source = tokenizer.get_chat_template(tools=[{}] if with_tools else None)
    except ValueError as error:
        raise UnsupportedChat(f"the tokenizer has several chat templates and no default: {error}") from error
    if not isinstance(source, str):
        raise UnsupportedChat(f"the tokenizer's chat_template is not a text but of type {type(source).__name__}")
    return _compile(source)


@lru_cache(maxsize=64)
def _compile(source: str) -> ChatTemplate:
    return ChatTemplate(source)


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        locality: how far the text of a message can depend on other messages; None if unknown.

    Raises:
        UnsupportedChat: the template cannot be compiled.
        InvalidInput: the template has more than MAX_TEMPLATE characters.
    """

    def __init__(self, source: str) -> None:
        self._environment = LimitedEnvironment()
        if len(source) > MAX_TEMPLATE:
            raise InvalidInput("chat template", got=f"{len(source)} characters", do=f"use at most {MAX_TEMPLATE}")
        try:
            self._template = self._environment.from_string(source)
            self.locality = find_locality(self._environment.syntax_tree(source))
        except Exception as error:  # a template that is nested too deeply causes exceptions of several types
            raise UnsupportedChat(f"the chat template is not valid: {_describe(error)}") from error
        # Attempts at one task have the same opening, and often the same first actions and results. The text of a
        # template that reads the clock is not kept, because it changes.
        self._render = lru_cache(0 if "strftime_now" in source else KEPT_TEXTS)(self._render_json)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text that the template writes for its variables.

        Raises:
            UnsupportedChat: the template fails.
            InvalidInput: the template needs too many steps, too many characters or too much time.
        """
        try:
            data = json.dumps(variables, default=_placeholder)
            return self._render(data) if len(data) <= KEPT_CHARACTERS else self._render_json(data)
        except BudgetExceeded as error:
            do = "use another template (chat_template.jinja in the model's folder), or shorten the conversation"
            raise InvalidInput("chat template", got=_describe(error), do=do) from error
        except Exception as error:  # a template can raise an exception of any type
            raise UnsupportedChat(f"the chat template cannot render this conversation: {_describe(error)}") from error

    def _render_json(self, variables: str) -> str:
        self._environment.budget = Budget(len(variables))
        return "".join(self._template.generate(json.loads(variables)))


def _describe(error: Exception) -> str:
    message = " ".join(str(error).split())[:300]
    name = "" if isinstance(error, TemplateError | BudgetExceeded) else f"{type(error).__name__}: "
    line = error.lineno if isinstance(error, TemplateSyntaxError) else _template_line(error)
    return f"{'' if line is None else f'line {line}: '}{name}{message}"


def _template_line(error: Exception) -> int | None:
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def _placeholder(value: object) -> object:
    # Return a dictionary for a mapping, and the name of the type for any other value that JSON cannot represent.
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"
