"""Which tool-call format a tokenizer's template takes."""

from __future__ import annotations

import copy

from transformers import PreTrainedTokenizerBase

from agent_r1.core.errors import InvalidInput, UnsupportedChat
from agent_r1.renderers.config import TagsConfig
from agent_r1.renderers.formats.deepseek import DeepSeek
from agent_r1.renderers.formats.harmony import Harmony
from agent_r1.renderers.formats.hermes import Hermes
from agent_r1.renderers.formats.llama import Llama
from agent_r1.renderers.formats.response import Response
from agent_r1.renderers.formats.tags import PLAIN_TEMPLATE, Tags
from agent_r1.renderers.formats.tool_format import Format, Tools
from agent_r1.renderers.formats.xml import Glm, Qwen35
from agent_r1.renderers.renderer import Chat

AUTO = "auto"
KNOWN: tuple[type[Format], ...] = (Hermes, Qwen35, Glm, Llama, DeepSeek, Harmony)
"""The formats that a template is tried with, in this order."""

NAMES = (AUTO, *(known.name for known in KNOWN), Response.name, Tags.name)


def open_chat(
    tokenizer: PreTrainedTokenizerBase,
    name: str = AUTO,
    tags: TagsConfig | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> Chat:
    """The chat of a tokenizer in the tool format ``name``; its actions end with ``stop_ids`` too.

    With ``auto``: by the tokenizer's own response template where it brings one, else in the first format that reads
    back a call which the template wrote, else Hermes (which is as good as any where no tools are used). Raises
    InvalidInput where there is no such format, UnsupportedChat where the template cannot be used.
    """
    chat = _chosen(tokenizer, name, tags)
    return Chat(chat.tokenizer, chat.format, stop_token_ids) if stop_token_ids else chat


def _chosen(tokenizer: PreTrainedTokenizerBase, name: str, tags: TagsConfig | None) -> Chat:
    if name not in NAMES:
        raise InvalidInput("tool_format", got=repr(name), do=f"choose from {', '.join(NAMES)}")
    if name == Tags.name:
        return Chat(tokenizer if tokenizer.chat_template else _plain(tokenizer), Tags(tags))
    template = tokenizer.response_template
    if name == Response.name and template is None:
        got = f"{name}, and a tokenizer without a response_template"
        raise InvalidInput("tool_format", got=got, do=f"choose from {', '.join(NAMES)}")
    if template is not None and name in (AUTO, Response.name):
        return Chat(tokenizer, Response(template, _header(tokenizer)))
    if name == AUTO:
        return _fitting(tokenizer)
    return Chat(tokenizer, {known.name: known for known in KNOWN}[name]())


def require_tools(chat: Chat, tools: Tools) -> None:
    """Raise UnsupportedChat, saying what to supply, where tools cannot be used in this chat, and InvalidInput where
    the tags that were set do not fit ``tools``."""
    if isinstance(chat.format, Tags):
        chat.format.check(tools)
    found = chat.behaviour("tool", thinking=False)
    if found.kind == "unsupported":
        do = f"give another --tool_format ({', '.join(NAMES)}), or supply a template that renders tools the Hermes way"
        raise UnsupportedChat(f"{found.reason}; {do}")


def _fitting(tokenizer: PreTrainedTokenizerBase) -> Chat:
    refused: UnsupportedChat | None = None
    for known in KNOWN:
        try:
            chat = Chat(tokenizer, known())
        except UnsupportedChat as error:
            refused = refused or error
            continue
        if chat.behaviour("tool", thinking=False).kind != "unsupported":
            return chat
    if refused is not None:
        raise refused
    return Chat(tokenizer)


def _plain(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer without a template, with that of running text."""
    plain = copy.copy(tokenizer)
    plain.chat_template = PLAIN_TEMPLATE
    return plain


def _header(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a prompt ends with, after the last message."""
    asked = [{"role": "user", "content": "question"}]
    whole, said = (
        str(tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=speak))
        for speak in (True, False)
    )
    return whole.removeprefix(said)
