"""The conversion of messages to tokens and of tokens to messages: renderers, tool-call formats and stop strings."""

from typing import TYPE_CHECKING

from agent_r1.core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_r1.renderers.config import TagsConfig
    from agent_r1.renderers.formats.detect import FORMAT_NAMES, open_renderer, require_tools
    from agent_r1.renderers.formats.tool_format import ParsedCall, ParsedOutput, ToolFormat
    from agent_r1.renderers.probes import TemplateBehavior
    from agent_r1.renderers.protocol import RenderedPrompt, Renderer
    from agent_r1.renderers.template_renderer import TemplateRenderer

__all__ = [
    "FORMAT_NAMES",
    "ParsedCall",
    "ParsedOutput",
    "RenderedPrompt",
    "Renderer",
    "TagsConfig",
    "TemplateBehavior",
    "TemplateRenderer",
    "ToolFormat",
    "open_renderer",
    "require_tools",
]

# lazy, so that an import of agent_r1.renderers.config does not load transformers
__getattr__ = lazy_names(
    __name__,
    {
        "config": ("TagsConfig",),
        "formats.detect": ("FORMAT_NAMES", "open_renderer", "require_tools"),
        "formats.tool_format": ("ParsedCall", "ParsedOutput", "ToolFormat"),
        "protocol": ("RenderedPrompt", "Renderer"),
        "probes": ("TemplateBehavior",),
        "template_renderer": ("TemplateRenderer",),
    },
)
