"""The prompt of ``wikifilm``: the instruction and a solved question about an invented film."""

from __future__ import annotations

from agent_r1.core.messages import Message
from agent_r1.core.reference_solution import tool_call
from agent_r1.retrieval.passages import Passage
from agent_r1.retrieval.tool import render

INSTRUCTION = (
    "Search for one film or person at a time. When you know the answer, reply with <answer>answer</answer>. "
    "Answer with a name, a place, a date, a nationality, a film, yes or no."
)
READING = "Read the pages and reply with <answer>answer</answer>."

_FILM = Passage("Salt on the Quay", "Salt on the Quay is a 1961 Swedish drama film directed by Edda Lindqvane.")
_OTHER = Passage("The Quay Wardens", "The Quay Wardens is a 1974 Danish comedy film starring Nils Brakholm.")
_DIRECTOR = Passage(
    "Edda Lindqvane",
    "Edda Lindqvane (9 March 1921 - 2 May 1990) was a Swedish film director. She was born in Visby, Sweden.",
)
_ACTOR = Passage("Olle Lindqvane", "Olle Lindqvane (born 1948) is a Swedish actor.")
_QUESTION = Message.user("Where was the director of film Salt on the Quay born?")

EXAMPLES: tuple[Message, ...] = (
    _QUESTION,
    tool_call("search", query="Salt on the Quay"),
    Message.tool(render((_FILM, _OTHER)), "call_0"),
    tool_call("search", query="Edda Lindqvane"),
    Message.tool(render((_DIRECTOR, _ACTOR)), "call_0"),
    Message.assistant("<answer>Visby</answer>"),
)
"""A solved question of two hops."""

READING_EXAMPLES: tuple[Message, ...] = (
    Message.user(f"{render((_DIRECTOR, _ACTOR))}\n\nWhere was Edda Lindqvane born?"),
    Message.assistant("<answer>Visby</answer>"),
)
"""The example for the naive RAG baseline, which gets the pages in its prompt and does not search."""
