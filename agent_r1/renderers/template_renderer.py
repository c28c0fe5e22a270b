"""A renderer for any chat template. It renders a few test conversations to find out how the template behaves.

After an action, new messages follow, such as a tool result. To find the text of the new messages, the renderer renders
the conversation twice: first without the action, and then with the action and the new messages. In the second text,
everything after the action is the text of the new messages. If the second text does not begin with the first text, the
next turn starts a new branch of the trajectory.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Literal

from transformers import PreTrainedTokenizerBase

from agent_r1.core.errors import UnsupportedChat
from agent_r1.core.inference import StopCondition
from agent_r1.core.messages import Action, Message, Text, ToolCall, ToolSpec
from agent_r1.core.profile import measure
from agent_r1.renderers.chat_template import (
    apply_chat_template,
    break_tokens,
    break_tokens_in_tool,
    first_token_in,
    special_tokens,
    token_at_end,
)
from agent_r1.renderers.formats.json_formats import Hermes
from agent_r1.renderers.formats.tags import PLAIN_BREAK, PLAIN_TEMPLATE
from agent_r1.renderers.formats.tool_format import THINK_OPEN, ParsedOutput, ToolFormat, Tools
from agent_r1.renderers.images import PromptEncoder
from agent_r1.renderers.protocol import ImageExpander, RenderedPrompt
from agent_r1.renderers.text_decoding import GrowingText, StopStringMatcher

MARKER = "AGENTR1MARK"
"""A text that occurs in no usual chat template. Test messages contain this text, so that it can be found."""

PROBE_TOOL = ToolSpec(
    "probe_search",
    "Look something up.",
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)


@dataclass(frozen=True, slots=True)
class TemplateBehavior:
    """The behavior of a chat template when a message is added after an action."""

    # append: the earlier text stays unchanged; rewrite: the template changes earlier text;
    # unsupported: the messages cannot be rendered, or the rendered calls cannot be parsed
    kind: Literal["append", "rewrite", "unsupported"]
    reason: str  # an explanation for users


Messages = tuple[Message, ...]
Boundary = Literal["tool", "user"]
"""The role of the message after an action: a tool result, or a message of the user."""


class TemplateRenderer:
    """A :class:`~agent_r1.renderers.protocol.Renderer` that uses a tool format and a tokenizer's chat template.

    Args:
        tokenizer: the tokenizer, with its chat template.
        tool_format: parses tool calls, and converts messages for the template. The default is Hermes.
        stop_token_ids: tokens that end an action, in addition to the end tokens of the chat template and the tokenizer.
        images: converts images to placeholder tokens; None if the model has no vision.

    Raises:
        UnsupportedChat: the tokenizer has no chat template, or the template writes no special token after a turn.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tool_format: ToolFormat | None = None,
        stop_token_ids: tuple[int, ...] = (),
        images: ImageExpander | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise UnsupportedChat(
                f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template; "
                "set tokenizer.chat_template (chat_template.jinja in the model's folder), or give --tool_format tags"
            )
        self.tokenizer, self.tool_format = tokenizer, tool_format or Hermes()
        self._special = {token: index for index, token in special_tokens(tokenizer)}
        # the tools as given, and the tools as shown, with broken special tokens; one tuple, because all threads read it
        self._newest_tools: tuple[Tools, Tools] = ((), ())
        self._extra_stop_ids = stop_token_ids
        self._encoder = PromptEncoder(tokenizer, images)
        self.encode = self._encoder.encode
        self._result_tags: tuple[str, ...] = ()
        question, marked = Message.user("question"), Message.user(MARKER)
        self._needs_parts = False  # whether the template reads only lists of parts, as those of some vision models
        self._needs_parts = images is not None and MARKER not in self._apply_template((marked,), ())
        self._renders_tools = PROBE_TOOL.name in self._apply_template((question,), (PROBE_TOOL,))
        self._turn_ends = self._find_turn_ends()
        # inside a conversation, the plain template writes an empty line after an action, and no special token
        self._breaks = (*self._turn_ends, *([PLAIN_BREAK] if tokenizer.chat_template == PLAIN_TEMPLATE else []))
        with_reasoning = Message.assistant("a", (), MARKER)
        self._renders_reasoning = MARKER in self.render_text((question, with_reasoning))
        self._opens_reasoning = self.render_text((question,), add_generation_prompt=True).rstrip().endswith(THINK_OPEN)
        self._result_tags = self._find_result_tags()
        # Several methods decode the same action, and all attempts at one task have the same first prompt.
        self._decode = lru_cache(512)(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))
        self._to_prompt: Callable[[str], RenderedPrompt] = lru_cache(4096)(lambda t: RenderedPrompt(t, self.encode(t)))
        self._stop_matcher = cache(lambda strings: StopStringMatcher(strings, self.decode))

    # ---- messages to tokens

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        written = [self._special[text] for text in self._turn_ends]
        # some models end actions with a token that no template writes: base models with eos, Llama after calls with eom
        others = [*self._extra_stop_ids, self.tokenizer.eos_token_id, self._special.get("<|eom_id|>")]
        return tuple(dict.fromkeys([*written, *(index for index in others if index is not None)]))

    @property
    def end_token_id(self) -> int:
        """The token that the template writes at the end of an assistant's turn."""
        return self.stop_token_ids[0]

    def stop_condition(self, tools: Tools) -> StopCondition | None:
        strings = self.tool_format.stop_strings(tools)
        if not strings:
            return None
        splits = self._renders_reasoning or self._opens_reasoning
        make_check = partial(
            self.tool_format.completion_check, tools, is_opened=self._opens_reasoning, thoughts=int(splits)
        )
        text, matcher = GrowingText(self.decode, make_check), self._stop_matcher(strings)

        def is_met(ids: Sequence[int]) -> bool:
            if not matcher.matches(ids) or not text.check(ids):
                return False
            _, action = self._split_reasoning(self.decode(ids), self._opens_reasoning)
            return self.tool_format.is_complete(action, tools)

        return StopCondition(strings, is_met)

    @measure("rendering")
    def render(self, messages: Messages, tools: Tools = ()) -> RenderedPrompt:
        marked = self._marked_text(messages, tools, add_generation_prompt=True)
        text = self._encoder.shown(marked)
        if any(message.images for message in messages):  # not kept, because a prompt holds the bytes of its images
            return self._encoder.prompt(marked, text, messages)
        return self._to_prompt(text)

    def render_text(self, messages: Messages, tools: Tools = (), *, add_generation_prompt: bool = False) -> str:
        """Return the text that the template writes for a conversation."""
        return self._encoder.shown(self._marked_text(messages, tools, add_generation_prompt=add_generation_prompt))

    def write_action(self, messages: Messages, message: Message, tools: Tools = ()) -> tuple[int, ...]:
        """Return the tokens of a message of the assistant after ``messages``, as the template writes it, with its end.

        Raise UnsupportedChat if the template writes this message after another prompt than a policy would read.
        """
        opening = self.render_text(messages, tools, add_generation_prompt=True)
        whole = self.render_text((*messages, message), tools)
        if not whole.startswith(opening):
            raise UnsupportedChat("the chat template writes the message otherwise than its prompt begins")
        rest = whole.removeprefix(opening)
        place, end = max((rest.rfind(end), end) for end in self._turn_ends)
        if place < 0:  # some templates end a turn only if another turn follows
            place, end = len(rest.rstrip()), self._turn_ends[0]
        return (*self.encode(rest[:place]), self._special[end])

    def reads_back(self, parsed: Message, given: Message) -> bool:
        """Return whether ``parsed`` says what ``given`` says, apart from reasoning if the template writes none."""
        given = given if self._renders_reasoning else replace(given, reasoning=None)
        return _comparable(parsed) == _comparable(given)

    def _marked_text(self, messages: Messages, tools: Tools, *, add_generation_prompt: bool) -> str:
        given, shown = self._newest_tools  # usually the same: an environment has the same tools in each prompt
        if given is not tools:
            shown = tuple(break_tokens_in_tool(tool, tuple(self._special)) for tool in tools)
            self._newest_tools = tools, shown
        # if the template does not describe the tools, the system message does
        instruction = self.tool_format.tool_instructions(shown) if tools and not self._renders_tools else None
        if instruction is not None:
            opening = [message.text for message in messages[:1] if message.role == "system"]
            messages = (Message.system("\n\n".join([*opening, instruction])), *messages[len(opening) :])
        return self._apply_template(messages, shown, add_generation_prompt=add_generation_prompt)

    def _apply_template(self, messages: Messages, tools: Tools, *, add_generation_prompt: bool = True) -> str:
        self.tool_format.check_writable(messages)
        try:
            marked = []
            for message in map(self._encoder.mark_images, messages):
                # A retrieved page or a user could write a token that ends the turn, or a tag that ends the tool result.
                if message.role in ("user", "tool"):
                    tokens = (*self._special, *(self._result_tags if message.role == "tool" else ()))
                    message = replace(message, parts=(Text(break_tokens(message.text, tokens)),))
                marked.append(message)
            converted = self.tool_format.to_template(marked, tools)
        except (TypeError, ValueError, KeyError) as error:
            raise UnsupportedChat(f"the conversation cannot be written as {self.tool_format.name}: {error}") from error
        converted = [self._encoder.with_image_parts(message, self._needs_parts) for message in converted]
        specs = [tool.to_openai() for tool in tools]
        text = apply_chat_template(self.tokenizer, converted, specs, add_generation_prompt=add_generation_prompt)
        return self._encoder.marked(text)

    # ---- from one turn to the next

    @measure("rendering")
    def bridge_to_next_turn(
        self,
        prompt: RenderedPrompt,
        messages: Messages,
        action: Action,
        action_ids: tuple[int, ...],
        observation: Messages,
        tools: Tools = (),
    ) -> RenderedPrompt | None:
        with_action = (*messages, action.message)
        marked = self._marked_text((*with_action, *observation), tools, add_generation_prompt=True)
        text = self._encoder.shown(marked)
        if not text.startswith(prompt.text):
            return None
        rest = text.removeprefix(prompt.text)
        sampled_end = self.decode(action_ids[len(self._without_end(action_ids)) :])
        if len(action.message.text) > len(action.text):  # an agent program wrote more text after an action that was cut
            is_written = not sampled_end and rest.startswith(action.message.text)
            end = rest.removeprefix(action.text)
            return self._encoder.prompt(marked, end, observation, messages) if is_written else None
        wording = action.text  # the text that the template writes for the action if messages follow
        if not self._is_written(wording, rest):  # the template can drop text after the end of the action
            start, output = self._parse_output(action_ids, tools)
            wording = action.text if output.end is None else action.text[: start + output.end]
        if not self._is_written(wording, rest):  # the template can write an action in its own way
            alone = self.render_text(with_action, tools)
            written = alone.removeprefix(prompt.text)
            ends = [index for end in self._turn_ends if (index := written.find(end)) >= 0]
            wording = written[: min(ends, default=len(written))]
            if not alone.startswith(prompt.text) or not self._is_written(wording, rest):
                return None
        # The sampled tokens stay as they are. Only the text after the action is tokenized.
        bridge = rest[len(wording) :]
        if not bridge.startswith(sampled_end or self._breaks):
            return None
        beyond = action.text.removeprefix(wording)  # text that was sampled after the end of the action is not repeated
        return self._encoder.prompt(marked, bridge.removeprefix(sampled_end or beyond), observation, messages)

    def _is_written(self, wording: str, rest: str) -> bool:
        return rest.startswith(wording) and rest.startswith(self._breaks, len(wording))

    # ---- tokens to messages

    def parse(self, action_ids: tuple[int, ...], turn: int = 0, tools: Tools = ()) -> Action:
        return self.parse_text(self.decode(self._without_end(action_ids)), turn, tools)

    @measure("rendering")
    def parse_text(self, text: str, turn: int = 0, tools: Tools = (), *, opened: bool | None = None) -> Action:
        """Parse the text of sampled tokens, and return the action.

        If a call cannot be read, the content of the message is the whole text, so that the next prompt contains all
        text that the policy wrote. ``opened`` says whether the text begins inside the reasoning. The default is True if
        the prompts of the template end with ``<think>``.
        """
        reasoning, rest = self._split_reasoning(text, self._opens_reasoning if opened is None else opened)
        output = self.tool_format.parse(rest, tools)
        calls = tuple(
            ToolCall(f"call_{turn}_{index}", call.name, call.arguments, call.raw, call.error)
            for index, call in enumerate(output.calls)
        )
        if any(call.error for call in calls):
            return Action(Message.assistant(text, calls), text)
        return Action(Message.assistant(output.content, calls, reasoning), text)

    @measure("rendering")
    def call_ends(self, action_ids: tuple[int, ...], tools: Tools = ()) -> tuple[int, ...]:
        start, output = self._parse_output(action_ids, tools)
        return self._token_indices(self._without_end(action_ids), [start + call.end for call in output.calls])

    @measure("rendering")
    def action_length(self, sampled_ids: tuple[int, ...], tools: Tools) -> int:
        start, output = self._parse_output(sampled_ids, tools)
        if output.end is None:
            return len(sampled_ids)
        ids = self._without_end(sampled_ids)
        (last,) = self._token_indices(ids, [start + output.end])
        return len(sampled_ids) if last + 1 == len(ids) else last + 1

    def spoken_text(self, action: Action, tools: Tools) -> str:
        _, text = self.tool_format.split_reasoning(action.text, self._opens_reasoning)
        return self.tool_format.parse(text, tools).content.strip()

    def _parse_output(self, action_ids: tuple[int, ...], tools: Tools) -> tuple[int, ParsedOutput]:
        text = self.decode(self._without_end(action_ids))
        _, rest = self._split_reasoning(text, self._opens_reasoning)
        return len(text) - len(rest), self.tool_format.parse(rest, tools)

    def _without_end(self, action_ids: tuple[int, ...]) -> tuple[int, ...]:
        return action_ids[:-1] if action_ids and action_ids[-1] in self.stop_token_ids else action_ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode(tuple(ids))

    def _split_reasoning(self, text: str, opened: bool) -> tuple[str | None, str]:
        return self.tool_format.split_reasoning(text, opened) if self._renders_reasoning or opened else (None, text)

    def _token_indices(self, ids: tuple[int, ...], lengths: Iterable[int]) -> tuple[int, ...]:
        # Bisect, because the number of characters in a beginning of the tokens never decreases. U+FFFD at the end of a
        # beginning stands for an incomplete character, and does not count.
        total = len(self.decode(ids))

        @cache
        def num_characters(index: int) -> int:
            return len(self.decode(ids[: index + 1]).rstrip("\ufffd")) if index + 1 < len(ids) else total

        return tuple(bisect_left(range(len(ids)), length, key=num_characters) for length in lengths)

    # ---- learning what the template does

    def _find_turn_ends(self) -> tuple[str, ...]:
        # the special tokens that the template writes after an answer and after a call
        question, answer = Message.user("question"), Message.assistant(MARKER)
        end = token_at_end(_after_marker(self.render_text((question, answer))), self._special)
        if end is None:  # some templates end a turn only if another turn follows
            followed = self.render_text((question, answer, question), add_generation_prompt=True)
            end = first_token_in(_after_marker(followed), self._special)
        if end is None:
            raise UnsupportedChat(
                "the chat template writes no special token after an assistant turn, so a turn has no end; "
                "supply a template that ends turns (as <|im_end|> does)"
            )
        return tuple(dict.fromkeys(filter(None, (end, self._find_call_end()))))

    def _find_call_end(self) -> str | None:
        messages = (Message.user("question"), _probe_call(MARKER))
        try:
            alone = _after_marker(self.render_text(messages, (PROBE_TOOL,)))
            if end := token_at_end(alone, self._special):
                return end
            result = Message.tool("A page.", "call_0_0")
            followed = self.render_text((*messages, result), (PROBE_TOOL,), add_generation_prompt=True)
        except UnsupportedChat:  # a template without calls; whether this matters is decided by require_tools
            return None
        return first_token_in(_after_marker(followed).removeprefix(alone.rstrip()), self._special)

    def _find_result_tags(self) -> tuple[str, ...]:
        # such as ("<tool_response>", "</tool_response>")
        messages = (Message.user("question"), _probe_call("there"), Message.tool(MARKER, "call_0_0"))
        try:
            text = self.render_text(messages, (PROBE_TOOL,))
        except UnsupportedChat:
            return ()
        found = re.search(rf"(<[^<>\s]+>)\s*{MARKER}\s*(</[^<>\s]+>)", text)
        return found.groups() if found else ()

    def probe_behavior(self, boundary: Boundary, *, thinking: bool) -> TemplateBehavior:
        """Return whether the template keeps or rewrites earlier text when a message follows an action.

        ``thinking`` says whether the action has reasoning.
        """
        try:
            return self._probe_behavior(boundary, thinking)
        except UnsupportedChat as error:
            return TemplateBehavior("unsupported", str(error))

    def _probe_behavior(self, boundary: Boundary, thinking: bool) -> TemplateBehavior:
        tools = (PROBE_TOOL,) if boundary == "tool" else ()
        messages = (Message.user("What is there?"),)
        prompt = self.render(messages, tools)
        if tools and PROBE_TOOL.name not in prompt.text:
            return TemplateBehavior("unsupported", "the chat template does not show tools to the model")
        # a model without reasoning in its template writes its reasoning as text
        reasoning = "I see." if thinking and self._renders_reasoning else None
        inline = "<think>\nI see.\n</think>\n\n" if thinking and not self._renders_reasoning else ""
        if tools:
            probe, observation = _probe_call("there", inline, reasoning), (Message.tool("A page.", "call_0_0"),)
        else:
            probe, observation = Message.assistant(f"{inline}A page.", (), reasoning), (Message.user("And then?"),)
        followed = self.render_text((*messages, probe, *observation), tools, add_generation_prompt=True)
        ids = self._read_back(followed, prompt, probe, tools)
        if ids is not None and followed.startswith(prompt.text):
            action = self.parse(ids, 0, tools)
            if self.bridge_to_next_turn(prompt, messages, action, ids, observation, tools) is not None:
                return TemplateBehavior("append", "the next render starts with this one")
        alone = self.render_text((*messages, probe), tools)
        if ids is not None or self._read_back(alone, prompt, probe, tools) is not None:
            return TemplateBehavior("rewrite", "the next render changes earlier text; the turn starts a new branch")
        name = self.tool_format.name
        return TemplateBehavior(
            "unsupported", f"the calls that the template writes cannot be read back as {name} calls"
        )

    def _read_back(self, text: str, prompt: RenderedPrompt, probe: Message, tools: Tools) -> tuple[int, ...] | None:
        # Return the tokens of the action in a rendered text, or None if parsing them does not give the message back.
        appended = text.startswith(prompt.text)
        # if the prompt ends with <think>, this tag may be missing in the text
        opening = prompt.text if appended else prompt.text.rstrip("\n").removesuffix(THINK_OPEN)
        if not text.startswith(opening):
            return None
        rest = text.removeprefix(opening)
        breaks = [(index, end) for end in self._breaks if (index := rest.find(end)) >= 0]
        index, end = min(breaks, default=(len(rest.rstrip()), ""))
        ids = self.encode(rest[:index] + (end if end in self._special else ""))
        written = self.decode(self._without_end(ids))
        parsed = self.parse_text(written, 0, tools, opened=self._opens_reasoning and appended).message
        return ids if _comparable(parsed) == _comparable(probe) else None


def _probe_call(query: str, text: str = "", reasoning: str | None = None) -> Message:
    return Message.assistant(text, (ToolCall("call_0_0", PROBE_TOOL.name, {"query": query}, ""),), reasoning)


def _comparable(message: Message) -> tuple[object, ...]:
    # ids of calls and spaces around the text may differ
    calls = [(call.name, call.arguments) for call in message.calls]
    return calls, message.reasoning or "", message.text.strip()


def _after_marker(text: str) -> str:
    return text.rpartition(MARKER)[2]
