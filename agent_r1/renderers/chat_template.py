"""The text that a tokenizer's chat template writes for a conversation, and the special tokens in such a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from agent_r1.core.errors import UnsupportedChat
from agent_r1.core.messages import ToolSpec


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool,
) -> str:
    """Return the text that the tokenizer's chat template writes for OpenAI-style messages and tools.

    With ``add_generation_prompt``, the text ends with the header of the assistant's next message.

    Raises:
        UnsupportedChat: the tokenizer has no default template, or the template is invalid or fails.
    """
    given: list[Any] = [*tools]
    try:
        text = tokenizer.apply_chat_template(
            [*messages], tools=given or None, add_generation_prompt=add_generation_prompt, tokenize=False
        )
    except Exception as error:  # a template is a program, and can raise an exception of any type
        raise UnsupportedChat(f"the chat template cannot render this conversation: {_describe(error)}") from error
    return str(text)


def _describe(error: Exception) -> str:
    # jinja2 adds the line in the template to its traceback, but only a syntax error has it as an attribute
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = frame.tb_lineno
        frame = frame.tb_next
    if isinstance(error, TemplateSyntaxError):
        line = error.lineno
    name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return f"{'' if line is None else f'line {line}: '}{name}{' '.join(str(error).split())[:300]}"


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, str]]:
    """Return the pair (id, text) of each special token, such as (151645, "<|im_end|>")."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return [(index, str(token)) for index, token in added.items() if token.special]


def token_at_end(text: str, tokens: Iterable[str]) -> str | None:
    """Return the longest of ``tokens`` at the end of ``text``, or None. White space at the end is ignored."""
    return max((token for token in tokens if text.rstrip().endswith(token)), key=len, default=None)


def first_token_in(text: str, tokens: Iterable[str]) -> str | None:
    """Return the token that occurs first in ``text``, or None. Of several at one position, return the longest."""
    found = [(text.find(token), -len(token), token) for token in tokens if token in text]
    return min(found)[2] if found else None


def break_tokens(text: str, tokens: Iterable[str]) -> str:
    """Return ``text`` in which each of ``tokens`` is broken by a space after its first character.

    So a user or a tool result cannot write a special token of the model.
    """
    for token in tokens:
        if token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def break_tokens_in_tool(tool: ToolSpec, tokens: Sequence[str]) -> ToolSpec:
    """Return a copy of a tool's description with a space in each special token (see :func:`break_tokens`)."""
    name, description = break_tokens(tool.name, tokens), break_tokens(tool.description, tokens)
    return ToolSpec(name, description, change_texts(tool.parameters, lambda text: break_tokens(text, tokens)))


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value in which ``change(text)`` replaces each text, including the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change_texts(key, change): change_texts(item, change) for key, item in value.items()}
    return [change_texts(item, change) for item in value] if isinstance(value, list | tuple) else value
