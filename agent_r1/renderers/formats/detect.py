"""Detection of the tool-call format that a tokenizer's chat template uses."""

from __future__ import annotations

import copy

from transformers import PreTrainedTokenizerBase

from agent_r1.core.errors import InvalidInput, UnsupportedChat
from agent_r1.renderers.chat_template import apply_chat_template, special_tokens
from agent_r1.renderers.config import TagsConfig
from agent_r1.renderers.formats.json_formats import DeepSeek, Harmony, Hermes, Llama
from agent_r1.renderers.formats.lfm2 import Lfm2
from agent_r1.renderers.formats.response import Response
from agent_r1.renderers.formats.tags import PLAIN_TEMPLATE, Tags
from agent_r1.renderers.formats.tool_format import ToolFormat, Tools
from agent_r1.renderers.formats.xml import Glm, Qwen35
from agent_r1.renderers.protocol import ImageExpander
from agent_r1.renderers.template_renderer import TemplateRenderer

AUTO = "auto"
TEMPLATE_FORMATS: tuple[type[ToolFormat], ...] = (Hermes, Qwen35, Glm, Llama, DeepSeek, Harmony, Lfm2)
"""The tool formats that :func:`detect_format` tries, in this order."""

FORMAT_NAMES = (AUTO, *(known.name for known in TEMPLATE_FORMATS), Response.name, Tags.name)


def open_renderer(
    tokenizer: PreTrainedTokenizerBase,
    name: str = AUTO,
    tags: TagsConfig | None = None,
    stop_token_ids: tuple[int, ...] = (),
    images: ImageExpander | None = None,
) -> TemplateRenderer:
    """Return a renderer for a tokenizer and the tool format ``name``.

    Otherwise :func:`detect_format` selects the format.

    Args:
        tokenizer: the tokenizer, with its chat template. Without a chat template, only the format ``tags`` works.
        name: one of FORMAT_NAMES.
        tags: the tags of the format ``tags``. Other formats ignore this argument.
        stop_token_ids: tokens that end an action, in addition to the end tokens of the chat template and the tokenizer.
        images: converts images to placeholder tokens; None if the model has no vision.

    Raises:
        InvalidInput: ``name`` is not one of FORMAT_NAMES, or is ``response`` although the tokenizer has no response
            template.
        UnsupportedChat: the chat template cannot be used.
    """
    if name not in FORMAT_NAMES:
        raise InvalidInput("tool_format", got=repr(name), do=f"choose from {', '.join(FORMAT_NAMES)}")
    if name == Tags.name:
        if not tokenizer.chat_template:
            tokenizer = _with_plain_template(tokenizer)
        return TemplateRenderer(tokenizer, Tags(tags), stop_token_ids, images)
    response_template = tokenizer.response_template
    if name == Response.name and response_template is None:
        got = f"{name}, and a tokenizer without a response_template"
        raise InvalidInput("tool_format", got=got, do=f"choose from {', '.join(FORMAT_NAMES)}")
    if response_template is not None and name in (AUTO, Response.name):
        return TemplateRenderer(tokenizer, Response(response_template, _header(tokenizer)), stop_token_ids, images)
    if name == AUTO:
        return TemplateRenderer(tokenizer, detect_format(tokenizer, images), stop_token_ids, images)
    return TemplateRenderer(
        tokenizer, {known.name: known for known in TEMPLATE_FORMATS}[name](), stop_token_ids, images
    )


def detect_format(tokenizer: PreTrainedTokenizerBase, images: ImageExpander | None = None) -> ToolFormat:
    """Return the first format that can parse tool calls as the tokenizer's chat template writes them.

    If no format can parse them, return Hermes, which works for an agent without tools.

    Raises:
        UnsupportedChat: no renderer can use the template, for example because it writes no special token after a turn.
    """
    refused: UnsupportedChat | None = None
    tokens = {text for _, text in special_tokens(tokenizer)}
    for known in TEMPLATE_FORMATS:
        if not tokens.issuperset(known.required_tokens):
            continue
        try:
            renderer = TemplateRenderer(tokenizer, known(), images=images)
        except UnsupportedChat as error:
            refused = refused or error
            continue
        if renderer.probe_behavior("tool", thinking=False).kind != "unsupported":
            return renderer.tool_format
    if refused is not None:
        raise refused
    return Hermes()


def require_tools(renderer: TemplateRenderer, tools: Tools) -> None:
    """Check that the renderer can be used with the tools.

    Raises:
        UnsupportedChat: the chat template cannot show tools, or the format cannot parse tool calls as the template
            writes them.
        InvalidInput: the settings of the format ``tags`` do not fit the tools (see :meth:`Tags.check`).
    """
    if isinstance(renderer.tool_format, Tags):
        renderer.tool_format.check(tools)
    behavior = renderer.probe_behavior("tool", thinking=False)
    if behavior.kind == "unsupported":
        names = ", ".join(name for name in FORMAT_NAMES if name != Tags.name)
        other = f"another --tool_format ({names}), or a template that renders tools the Hermes way"
        if isinstance(renderer.tool_format, Tags):
            raise UnsupportedChat(f"{behavior.reason}; give {other}")
        tags = "give --tool_format tags, which describes tools in a system message and needs no calls in the template"
        raise UnsupportedChat(f"{behavior.reason}; {tags}, or {other}")


def _with_plain_template(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    plain = copy.copy(tokenizer)
    plain.chat_template = PLAIN_TEMPLATE
    return plain


def _header(tokenizer: PreTrainedTokenizerBase) -> str:
    messages = [{"role": "user", "content": "question"}]
    with_header, without = (
        apply_chat_template(tokenizer, messages, (), add_generation_prompt=added) for added in (True, False)
    )
    return with_header.removeprefix(without)
