"""Messages to tokens and back, incremental and token-exact.

Sampled tokens are never tokenised again. What stands between two actions (the end of a turn, tool
results, the next turn's header) comes from the template itself: the difference of two renders. Where a
template changes the past (drops earlier thoughts, say), the difference does not exist and the turn starts
a new branch.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agent_r1.core.acting import Stop
from agent_r1.core.errors import UnsupportedChat
from agent_r1.core.messages import Action, Call, Message, Text, ToolSpec, to_openai
from agent_r1.rollout.hermes import call_ends, parse_action, split_reasoning

MARK = "AGENTR1MARK"


@dataclass(frozen=True, slots=True)
class View:
    """What the policy sees next: ``text`` is the whole render, ``ids`` the tokens to add (all, for a new branch).

    Example:
        Appended(text="...<|im_end|>\\n<|im_start|>user\\n...assistant\\n", ids=(198, 7, ...))
    """

    text: str
    ids: tuple[int, ...]


class Appended(View):
    """The state goes on: ``ids`` follow the action's tokens."""

    __slots__ = ()


class Rewritten(View):
    """The past was rendered differently: ``ids`` are a new state from its first token on."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a template does at a boundary, and why."""

    kind: Literal["append", "rewrite", "unsupported"]
    reason: str


class Chat:
    """One tokenizer's template and the Hermes call format over it.

    Raises UnsupportedChat where the tokenizer has no template or its turns have no end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise UnsupportedChat(
                f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template; "
                "set tokenizer.chat_template (chat_template.jinja in the model's folder)"
            )
        self.tokenizer = tokenizer
        self._special = {token: index for index, token in _special_tokens(tokenizer)}
        self.end_text = self._find_end_text()
        self._shows_reasoning = MARK in self.render(_reasoned(MARK), (), speak=False)
        self._opened = lru_cache(maxsize=4096)(self._open)

    @property
    def end_id(self) -> int:
        """The token that ends a turn of the assistant, as the template writes it."""
        return self._special[self.end_text]

    def open(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> View:
        """The first state: the rendered messages up to where the assistant speaks."""
        text = self.render(messages, tools, speak=True)
        return self._opened(text)

    def _open(self, text: str) -> View:
        return View(text, self.encode(text))

    def extend(
        self,
        view: View,
        said: tuple[Message, ...],
        action: Action,
        stop: Stop,
        observed: tuple[Message, ...],
        tools: tuple[ToolSpec, ...],
    ) -> Appended | Rewritten:
        """The next state after ``action`` and what was ``observed``.

        ``said`` is the conversation before the action and ``view`` its state. An action that was cut
        gets its end token here, where it is not the policy's.
        """
        before = (*said, action.message)
        text = self.render((*before, *observed), tools, speak=True)
        rest = text.removeprefix(view.text)
        if len(rest) + len(view.text) != len(text):
            return Rewritten(text, self.encode(text))
        own = action.text if rest.startswith(action.text) else self._rendered_action(rest, view, before, tools)
        bridge = "" if own is None else rest[len(own) :]
        if not bridge.startswith(self.end_text):
            return Rewritten(text, self.encode(text))
        return Appended(text, self.encode(bridge.removeprefix(self.end_text) if stop == "stop" else bridge))

    def _rendered_action(
        self, rest: str, view: View, before: tuple[Message, ...], tools: tuple[ToolSpec, ...]
    ) -> str | None:
        """The template's own wording of an action that the policy worded differently.

        None where the wording depends on what follows, so that keeping the tokens would not be the same state.
        """
        alone = self.render(before, tools, speak=False)
        wording = rest.partition(self.end_text)[0]
        return wording if alone.startswith(view.text + wording + self.end_text) else None

    def parse(self, action_ids: tuple[int, ...], turn: int = 0) -> Action:
        """What the tokens say. The end token is not part of the text."""
        return self._read(self._decode(self._spoken(action_ids)), turn)

    def call_ends(self, action_ids: tuple[int, ...]) -> tuple[int, ...]:
        """For each call of the action, the place in ``action_ids`` of the token that completes it.

        Found by decoding first parts of the sampled tokens. A character whose bytes are spread over several
        tokens is there with the last of them; before that the text ends in replacement characters.
        """
        ids = self._spoken(action_ids)
        text = self._decode(ids)

        @cache
        def settled(place: int) -> int:
            """How many characters of the text are there once the token at ``place`` is."""
            return len(self._decode(ids[: place + 1]).rstrip("\ufffd")) if place + 1 < len(ids) else len(text)

        said = self._divide(text)[1]
        ends = (len(text) - len(said) + end for end in call_ends(said))
        return tuple(bisect_left(range(len(ids)), end, key=settled) for end in ends)

    def _spoken(self, action_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens without the end token."""
        return action_ids[:-1] if action_ids and action_ids[-1] == self.end_id else action_ids

    def _decode(self, ids: tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _read(self, text: str, turn: int = 0) -> Action:
        return parse_action(text, turn, *self._divide(text))

    def _divide(self, text: str) -> tuple[str | None, str]:
        """(thought, rest). A thought is split off only where the template can render it again."""
        return split_reasoning(text) if self._shows_reasoning else (None, text)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def render(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], *, speak: bool) -> str:
        """The template's text; ``speak`` adds the header after which the assistant speaks."""
        try:
            text = self.tokenizer.apply_chat_template(
                [to_openai(self._harmless(message)) for message in messages],
                tools=[tool.to_openai() for tool in tools] or None,
                add_generation_prompt=speak,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UnsupportedChat(f"the chat template cannot render this conversation: {error}") from error
        return str(text)

    def _harmless(self, message: Message) -> Message:
        """The message, without control tokens in what users and tools say: a page must not be able to end its turn.

        A space breaks them, so that the text stays readable.
        """
        if message.role not in ("user", "tool") or not any(token in message.text for token in self._special):
            return message
        text = message.text
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return replace(message, parts=(Text(text),))

    def _find_end_text(self) -> str:
        """The special token that the template writes right after what the assistant said."""
        text = self.render((Message.user("question"), Message.assistant(MARK)), (), speak=False)
        after = text.partition(MARK)[2].lstrip()
        found = [token for token in self._special if after.startswith(token)]
        if not found:
            raise UnsupportedChat(
                "the chat template writes no special token after an assistant turn, so a turn has no end; "
                "supply a template that ends turns (as <|im_end|> does)"
            )
        return max(found, key=len)

    def behaviour(self, boundary: Literal["tool", "user"], *, thinking: bool) -> Behaviour:
        """What the template does where a tool's result, or a user's message, follows an action."""
        try:
            return self._probe(boundary, thinking)
        except UnsupportedChat as error:
            return Behaviour("unsupported", str(error))

    def require_tools(self) -> None:
        """Raise UnsupportedChat, saying what to supply, where tools cannot be used."""
        found = self.behaviour("tool", thinking=False)
        if found.kind == "unsupported":
            raise UnsupportedChat(f"{found.reason}; supply a template that renders tools the Hermes way")

    def _probe(self, boundary: Literal["tool", "user"], thinking: bool) -> Behaviour:
        tools = (_PROBE_TOOL,) if boundary == "tool" else ()
        said = (Message.user("What is there?"),)
        view = self.open(said, tools)
        if tools and _PROBE_TOOL.name not in view.text:
            return Behaviour("unsupported", "the chat template does not show tools to the model")
        message = self._probe_message(boundary, thinking)
        observed = (Message.tool("A page.", "call_0_0") if tools else Message.user("And then?"),)
        grown = self.render((*said, message, *observed), tools, speak=True)
        action = self._read_back(grown, view, message)
        if action is not None and isinstance(self.extend(view, said, action, "stop", observed, tools), Appended):
            return Behaviour("append", "the next render starts with this one")
        if self._read_back(self.render((*said, message), tools, speak=False), view, message) is not None:
            return Behaviour("rewrite", "the next render changes what was said; the turn starts a new branch")
        return Behaviour("unsupported", "what the template writes cannot be read back as <think> and <tool_call> JSON")

    def _read_back(self, text: str, view: View, message: Message) -> Action | None:
        """The action as the template words it in ``text``; None where reading it does not give ``message`` again."""
        if not text.startswith(view.text):
            return None
        wording, end, _ = text.removeprefix(view.text).partition(self.end_text)
        action = self._read(wording)
        read, meant = action.message, message
        same = [(call.name, call.arguments) for call in read.calls] == [
            (call.name, call.arguments) for call in meant.calls
        ]
        same = same and (read.reasoning or "") == (meant.reasoning or "") and read.text.strip() == meant.text.strip()
        return action if end and same else None

    def _probe_message(self, boundary: Literal["tool", "user"], thinking: bool) -> Message:
        reasoning = "I see." if thinking and self._shows_reasoning else None
        thought = "<think>\nI see.\n</think>\n\n" if thinking and not self._shows_reasoning else ""
        if boundary == "user":
            return Message.assistant(thought + "A page.", (), reasoning)
        return Message.assistant(thought, (Call("call_0_0", _PROBE_TOOL.name, {"query": "there"}, ""),), reasoning)


def _reasoned(thought: str) -> tuple[Message, ...]:
    return (Message.user("question"), Message.assistant("answer", (), thought))


_PROBE_TOOL = ToolSpec(
    "probe_search",
    "Look something up.",
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, str]]:
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return [(index, str(token)) for index, token in added.items() if token.special]
