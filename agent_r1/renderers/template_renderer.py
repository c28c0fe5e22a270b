"""Messages to tokens and back, incremental and token-exact.

Sampled tokens are never tokenised again. What stands between two actions (the end of a turn, tool
results, the next turn's header) comes from the template itself: the difference of two renders. Where a
template changes the past (drops earlier thoughts, say), the difference does not exist and the turn starts
a new branch.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agent_r1.core.errors import UnsupportedChat
from agent_r1.core.inference import StopCondition
from agent_r1.core.messages import Action, Message, Text, ToolCall
from agent_r1.core.tool import ToolSpec
from agent_r1.renderers.formats.hermes import Hermes
from agent_r1.renderers.formats.tags import PLAIN_BREAK, PLAIN_TEMPLATE
from agent_r1.renderers.formats.tool_format import THINK, ParsedOutput, ToolFormat
from agent_r1.renderers.protocol import RenderedPrompt
from agent_r1.renderers.special_tokens import first_of, last_of, special_tokens
from agent_r1.renderers.stop_strings import StopStringMatcher

MARK = "AGENTR1MARK"


@dataclass(frozen=True, slots=True)
class TemplateBehavior:
    """What a template does at a boundary, and why."""

    kind: Literal["append", "rewrite", "unsupported"]
    reason: str


class TemplateRenderer:
    """One tokenizer's template and a tool-call format over it.

    ``stop_ids`` are the tokens that end an action: what the template writes after an answer, and after a call (mostly
    the same one), those of the tokenizer and those given, on which models end as well; ``end_id`` is the first. Raises
    UnsupportedChat where the tokenizer has no template or no token ends a turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, format: ToolFormat | None = None, stop_token_ids: tuple[int, ...] = ()
    ) -> None:
        if not tokenizer.chat_template:
            raise UnsupportedChat(
                f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template; "
                "set tokenizer.chat_template (chat_template.jinja in the model's folder), or give --tool_format tags"
            )
        self.tokenizer = tokenizer
        self.format = format or Hermes()
        self._special = {token: index for index, token in special_tokens(tokenizer)}
        self._other_stop_ids = stop_token_ids
        self._around_results: tuple[str, ...] = ()
        asked = Message.user("question")
        self._shows_tools = _PROBE_TOOL.name in self._render((asked,), (_PROBE_TOOL,), add_generation_prompt=True)
        self._ends = self._find_ends()
        # where nothing but an empty line parts messages, that is what follows an action
        self._breaks = (*self._ends, *([PLAIN_BREAK] if tokenizer.chat_template == PLAIN_TEMPLATE else []))
        self._shows_reasoning = MARK in self.render_text(
            (asked, Message.assistant("a", (), MARK)), (), add_generation_prompt=False
        )
        self._opens_thought = self.render_text((asked,), (), add_generation_prompt=True).rstrip().endswith(THINK)
        self._around_results = self._find_around_results()
        self._opened = lru_cache(maxsize=4096)(self._open)
        self._tail = cache(lambda texts: StopStringMatcher(texts, self._decode))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an action."""
        written = [self._special[text] for text in self._ends]
        # models end with these too where no template writes them: bases with eos, Llama its calls with eom
        others = [*self._other_stop_ids, self.tokenizer.eos_token_id, self._special.get("<|eom_id|>")]
        return tuple(dict.fromkeys([*written, *(index for index in others if index is not None)]))

    @property
    def end_token_id(self) -> int:
        """The token that ends a turn of the assistant, as the template writes it."""
        return self.stop_token_ids[0]

    def stop_condition(self, tools: tuple[ToolSpec, ...]) -> StopCondition | None:
        """Where the format ends an action without a token; None where it never does."""
        texts = self.format.stop_texts(tools)
        return StopCondition(texts, partial(self._reached, texts, tools)) if texts else None

    def _reached(self, texts: tuple[str, ...], tools: tuple[ToolSpec, ...], ids: Sequence[int]) -> bool:
        if not self._tail(texts).completes(ids):
            return False
        _, said = self._divide(self._decode(ids), self._opens_thought)
        return self.format.ended(said, tools)

    def render(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> RenderedPrompt:
        """The first state: the rendered messages up to where the assistant speaks."""
        text = self.render_text(messages, tools, add_generation_prompt=True)
        return self._opened(text)

    def _open(self, text: str) -> RenderedPrompt:
        return RenderedPrompt(text, self.encode(text))

    def bridge_to_next_turn(
        self,
        prompt: RenderedPrompt,
        messages: tuple[Message, ...],
        action: Action,
        action_ids: tuple[int, ...],
        observation: tuple[Message, ...],
        tools: tuple[ToolSpec, ...] = (),
    ) -> RenderedPrompt | None:
        """Return the prompt that follows an action, or None if the template changes earlier text.

        If the action was cut off, its end token is part of the returned tokens: the policy did not choose it. If it
        ended with another token than the template writes there, the template words the past differently: None. The
        bridge begins after the text that the last sampled token holds beyond the end of the action.
        """
        before = (*messages, action.message)
        text = self.render_text((*before, *observation), tools, add_generation_prompt=True)
        rest = text.removeprefix(prompt.text)
        if len(rest) + len(prompt.text) != len(text):
            return None
        own = self._standing(action.text, action_ids, rest, tools)
        own = self._rendered_action(rest, prompt, before, tools) if own is None else own
        bridge = "" if own is None else rest[len(own) :]
        sampled_end = self._decode(action_ids[len(self._spoken(action_ids)) :])
        if not bridge.startswith(sampled_end or self._breaks):
            return None
        beyond = action.text.removeprefix(own or "")
        return RenderedPrompt(text, self.encode(bridge.removeprefix(sampled_end or beyond)))

    def _standing(self, text: str, ids: tuple[int, ...], rest: str, tools: tuple[ToolSpec, ...]) -> str | None:
        """The action as it was said, where the template words it so: whole, or up to where the format ends it."""
        if self._stands(text, rest):
            return text
        ended = text[: self._end(ids, tools)]
        return ended if self._stands(ended, rest) else None

    def _stands(self, said: str, rest: str) -> bool:
        """Whether the template words the action as it was said, and ends it there."""
        return rest.startswith(said) and rest.startswith(self._breaks, len(said))

    def _rendered_action(
        self, rest: str, prompt: RenderedPrompt, before: tuple[Message, ...], tools: tuple[ToolSpec, ...]
    ) -> str | None:
        """The template's own wording of an action that the policy worded differently.

        None where the wording depends on what follows, so that keeping the tokens would not be the same state.
        """
        alone = self.render_text(before, tools, add_generation_prompt=False)
        said = alone.removeprefix(prompt.text)
        places = [place for end in self._ends if (place := said.find(end)) >= 0]
        wording = said[: min(places, default=len(said))]
        return wording if alone.startswith(prompt.text) and self._stands(wording, rest) else None

    def parse(self, action_ids: tuple[int, ...], turn: int = 0, tools: tuple[ToolSpec, ...] = ()) -> Action:
        """What the tokens say. The end token is not part of the text.

        A call that could not be read stays a ``ToolCall`` with its ``error``; the message then keeps the whole text as
        content, so that nothing the policy said is lost when the conversation is rendered.
        """
        return self._parsed(action_ids, turn, tools, self._opens_thought)

    def _parsed(self, action_ids: tuple[int, ...], turn: int, tools: tuple[ToolSpec, ...], opened: bool) -> Action:
        text = self._decode(self._spoken(action_ids))
        reasoning, said = self._divide(text, opened)
        reading = self.format.read(said, tools)
        calls = tuple(
            ToolCall(f"call_{turn}_{index}", call.name, call.arguments, call.raw, call.error)
            for index, call in enumerate(reading.calls)
        )
        if any(call.error for call in calls):
            return Action(Message.assistant(text, calls), text)
        return Action(Message.assistant(reading.content, calls, reasoning), text)

    def call_ends(self, action_ids: tuple[int, ...], tools: tuple[ToolSpec, ...] = ()) -> tuple[int, ...]:
        """For each call of the action, the place in ``action_ids`` of the token that completes it.

        Found by decoding first parts of the sampled tokens. A character whose bytes are spread over several
        tokens is there with the last of them; before that the text ends in replacement characters.
        """
        skipped, reading = self._reading(action_ids, tools)
        return self._places(action_ids, [skipped + call.end for call in reading.calls])

    def action_length(self, sampled_ids: tuple[int, ...], tools: tuple[ToolSpec, ...]) -> int:
        """How many of the sampled tokens are the action: all, but where a format ends it without a token.

        Tokens past that were sampled for nothing; leaving them out leaves the others' probabilities as they are.
        """
        end = self._end(sampled_ids, tools)
        if end is None:
            return len(sampled_ids)
        count = self._places(sampled_ids, [end])[0] + 1
        return len(sampled_ids) if count == len(self._spoken(sampled_ids)) else count

    def _end(self, action_ids: tuple[int, ...], tools: tuple[ToolSpec, ...]) -> int | None:
        """How many characters the action has, where the format ends it although no token does."""
        skipped, reading = self._reading(action_ids, tools)
        return None if reading.end is None else skipped + reading.end

    def spoken_text(self, action: Action, tools: tuple[ToolSpec, ...]) -> str:
        """What an action says beside its thought and its calls, also where the template can render no thoughts."""
        _, said = self.format.divide(action.text, self._opens_thought)
        return self.format.read(said, tools).content.strip()

    def _reading(self, action_ids: tuple[int, ...], tools: tuple[ToolSpec, ...]) -> tuple[int, ParsedOutput]:
        """How many characters of the action's text its thought has, and the reading of the rest."""
        text = self._decode(self._spoken(action_ids))
        _, said = self._divide(text, self._opens_thought)
        return len(text) - len(said), self.format.read(said, tools)

    def _places(self, action_ids: tuple[int, ...], ends: Iterable[int]) -> tuple[int, ...]:
        """The places of the tokens that complete the first ``ends`` characters."""
        ids = self._spoken(action_ids)
        whole = len(self._decode(ids))

        @cache
        def settled(place: int) -> int:
            """How many characters of the text are there once the token at ``place`` is."""
            return len(self._decode(ids[: place + 1]).rstrip("\ufffd")) if place + 1 < len(ids) else whole

        return tuple(bisect_left(range(len(ids)), end, key=settled) for end in ends)

    def _spoken(self, action_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens without the end token."""
        return action_ids[:-1] if action_ids and action_ids[-1] in self.stop_token_ids else action_ids

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _divide(self, text: str, opened: bool) -> tuple[str | None, str]:
        """(thought, rest). A thought is split off only where the template can render it again, or began it."""
        return self.format.divide(text, opened) if self._shows_reasoning or opened else (None, text)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def render_text(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], *, add_generation_prompt: bool
    ) -> str:
        """The template's text; ``speak`` adds the header after which the assistant speaks."""
        instruction = self.format.instruction(tools) if tools and not self._shows_tools else None
        if instruction is None:
            return self._render(messages, tools, add_generation_prompt=add_generation_prompt)
        opening = [message.text for message in messages[:1] if message.role == "system"]
        system = Message.system("\n\n".join([*opening, instruction]))
        return self._render((system, *messages[len(opening) :]), tools, add_generation_prompt=add_generation_prompt)

    def _render(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], *, add_generation_prompt: bool
    ) -> str:
        self.format.refuse_unreadable(messages)
        try:
            text = self.tokenizer.apply_chat_template(
                self.format.shaped([self._escape_special_tokens(message) for message in messages], tools),
                tools=[tool.to_openai() for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UnsupportedChat(f"the chat template cannot render this conversation: {error}") from error
        return str(text)

    def _escape_special_tokens(self, message: Message) -> Message:
        """The message, without control tokens in what users and tools say: a page must not be able to end its turn,
        nor its result.

        A space breaks them, so that the text stays readable.
        """
        marks = (*self._special, *(self._around_results if message.role == "tool" else ()))
        if message.role not in ("user", "tool") or not any(token in message.text for token in marks):
            return message
        text = message.text
        for token in marks:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return replace(message, parts=(Text(text),))

    def _find_ends(self) -> tuple[str, ...]:
        """The special tokens that the template writes right after an answer, and after a call where that differs."""
        asked, answer = Message.user("question"), Message.assistant(MARK)
        alone = self._after_mark((asked, answer), (), add_generation_prompt=False)
        end = last_of(alone, self._special) or first_of(
            self._after_mark((asked, answer, asked), (), add_generation_prompt=True), self._special
        )
        if end is None:
            raise UnsupportedChat(
                "the chat template writes no special token after an assistant turn, so a turn has no end; "
                "supply a template that ends turns (as <|im_end|> does)"
            )
        return tuple(dict.fromkeys(filter(None, (end, self._end_of_call()))))

    def _end_of_call(self) -> str | None:
        """The special token that follows a call, None where calls cannot be rendered."""
        said = (Message.user("question"), _calling(MARK))
        try:
            alone = self._after_mark(said, (_PROBE_TOOL,), add_generation_prompt=False)
            if end := last_of(alone, self._special):
                return end
            followed = self._after_mark(
                (*said, Message.tool("A page.", "call_0_0")), (_PROBE_TOOL,), add_generation_prompt=True
            )
        except UnsupportedChat:
            return None
        return first_of(followed.removeprefix(alone.rstrip()), self._special)

    def _find_around_results(self) -> tuple[str, ...]:
        """The tags, no special tokens, between which the template shows what a tool gave."""
        said = (Message.user("question"), _calling("there"), Message.tool(MARK, "call_0_0"))
        try:
            found = re.search(
                rf"(<[^<>\s]+>)\s*{MARK}\s*(</[^<>\s]+>)",
                self.render_text(said, (_PROBE_TOOL,), add_generation_prompt=False),
            )
        except UnsupportedChat:
            return ()
        return found.groups() if found else ()

    def _after_mark(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], *, add_generation_prompt: bool
    ) -> str:
        return self.render_text(messages, tools, add_generation_prompt=add_generation_prompt).rpartition(MARK)[2]

    def probe_behavior(self, boundary: Literal["tool", "user"], *, thinking: bool) -> TemplateBehavior:
        """What the template does where a tool's result, or a user's message, follows an action."""
        try:
            return self._probe(boundary, thinking)
        except UnsupportedChat as error:
            return TemplateBehavior("unsupported", str(error))

    def _probe(self, boundary: Literal["tool", "user"], thinking: bool) -> TemplateBehavior:
        tools = (_PROBE_TOOL,) if boundary == "tool" else ()
        said = (Message.user("What is there?"),)
        prompt = self.render(said, tools)
        if tools and _PROBE_TOOL.name not in prompt.text:
            return TemplateBehavior("unsupported", "the chat template does not show tools to the model")
        message = self._probe_message(boundary, thinking)
        observed = (Message.tool("A page.", "call_0_0") if tools else Message.user("And then?"),)
        grown = self.render_text((*said, message, *observed), tools, add_generation_prompt=True)
        ids = self._read_back(grown, prompt, message, tools)
        if ids is not None and grown.startswith(prompt.text):
            if self.bridge_to_next_turn(prompt, said, self.parse(ids, 0, tools), ids, observed, tools) is not None:
                return TemplateBehavior("append", "the next render starts with this one")
        alone = self.render_text((*said, message), tools, add_generation_prompt=False)
        if ids is not None or self._read_back(alone, prompt, message, tools) is not None:
            return TemplateBehavior("rewrite", "the next render changes what was said; the turn starts a new branch")
        return TemplateBehavior(
            "unsupported", f"what the template writes cannot be read back as {self.format.name} calls"
        )

    def _read_back(
        self, text: str, prompt: RenderedPrompt, message: Message, tools: tuple[ToolSpec, ...]
    ) -> tuple[int, ...] | None:
        """The tokens of the action as the template words it; None where reading them does not give ``message``."""
        grown = text.startswith(prompt.text)
        opening = prompt.text if grown else prompt.text.rstrip("\n").removesuffix(THINK)
        if not text.startswith(opening):
            return None
        rest = text.removeprefix(opening)
        found = [(place, end) for end in self._breaks if (place := rest.find(end)) >= 0]
        place, end = min(found, default=(len(rest.rstrip()), ""))
        ids = self.encode(rest[:place] + (end if end in self._special else ""))
        read, meant = self._parsed(ids, 0, tools, self._opens_thought and grown).message, message
        same = [(call.name, call.arguments) for call in read.calls] == [
            (call.name, call.arguments) for call in meant.calls
        ]
        same = same and (read.reasoning or "") == (meant.reasoning or "") and read.text.strip() == meant.text.strip()
        return ids if same else None

    def _probe_message(self, boundary: Literal["tool", "user"], thinking: bool) -> Message:
        reasoning = "I see." if thinking and self._shows_reasoning else None
        thought = "<think>\nI see.\n</think>\n\n" if thinking and not self._shows_reasoning else ""
        if boundary == "user":
            return Message.assistant(thought + "A page.", (), reasoning)
        return _calling("there", thought, reasoning)


_PROBE_TOOL = ToolSpec(
    "probe_search",
    "Look something up.",
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)


def _calling(query: str, text: str = "", reasoning: str | None = None) -> Message:
    return Message.assistant(text, (ToolCall("call_0_0", _PROBE_TOOL.name, {"query": query}, ""),), reasoning)
