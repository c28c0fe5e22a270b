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
from agent_r1.renderers.formats.tool_format import ToolFormat, Tools
from agent_r1.renderers.formats.xml import Glm, Qwen35
from agent_r1.renderers.template_renderer import TemplateRenderer

AUTO = "auto"
TEMPLATE_FORMATS: tuple[type[ToolFormat], ...] = (Hermes, Qwen35, Glm, Llama, DeepSeek, Harmony)
"""The formats that a template is tried with, in this order."""

FORMAT_NAMES = (AUTO, *(known.name for known in TEMPLATE_FORMATS), Response.name, Tags.name)


def open_renderer(
    tokenizer: PreTrainedTokenizerBase,
    name: str = AUTO,
    tags: TagsConfig | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> TemplateRenderer:
    """The chat of a tokenizer in the tool format ``name``; its actions end with ``stop_ids`` too.

    With ``auto``: by the tokenizer's own response template where it brings one, else in the first format that reads
    back a call which the template wrote, else Hermes (which is as good as any where no tools are used). Raises
    InvalidInput where there is no such format, UnsupportedChat where the template cannot be used.
    """
    renderer = _chosen(tokenizer, name, tags)
    return TemplateRenderer(renderer.tokenizer, renderer.format, stop_token_ids) if stop_token_ids else renderer


def _chosen(tokenizer: PreTrainedTokenizerBase, name: str, tags: TagsConfig | None) -> TemplateRenderer:
    if name not in FORMAT_NAMES:
        raise InvalidInput("tool_format", got=repr(name), do=f"choose from {', '.join(FORMAT_NAMES)}")
    if name == Tags.name:
        return TemplateRenderer(tokenizer if tokenizer.chat_template else _plain(tokenizer), Tags(tags))
    template = tokenizer.response_template
    if name == Response.name and template is None:
        got = f"{name}, and a tokenizer without a response_template"
        raise InvalidInput("tool_format", got=got, do=f"choose from {', '.join(FORMAT_NAMES)}")
    if template is not None and name in (AUTO, Response.name):
        return TemplateRenderer(tokenizer, Response(template, _header(tokenizer)))
    if name == AUTO:
        return _fitting(tokenizer)
    return TemplateRenderer(tokenizer, {known.name: known for known in TEMPLATE_FORMATS}[name]())


def require_tools(renderer: TemplateRenderer, tools: Tools) -> None:
    """Raise UnsupportedChat, saying what to supply, where tools cannot be used in this chat, and InvalidInput where
    the tags that were set do not fit ``tools``."""
    if isinstance(renderer.format, Tags):
        renderer.format.check(tools)
    found = renderer.probe_behavior("tool", thinking=False)
    if found.kind == "unsupported":
        do = f"give another --tool_format ({', '.join(FORMAT_NAMES)}), or supply a template that renders tools the Hermes way"
        raise UnsupportedChat(f"{found.reason}; {do}")


def _fitting(tokenizer: PreTrainedTokenizerBase) -> TemplateRenderer:
    refused: UnsupportedChat | None = None
    for known in TEMPLATE_FORMATS:
        try:
            renderer = TemplateRenderer(tokenizer, known())
        except UnsupportedChat as error:
            refused = refused or error
            continue
        if renderer.probe_behavior("tool", thinking=False).kind != "unsupported":
            return renderer
    if refused is not None:
        raise refused
    return TemplateRenderer(tokenizer)


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
