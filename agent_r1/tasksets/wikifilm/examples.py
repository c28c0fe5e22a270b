"""The prompt of ``wikifilm``: the instruction and solved questions about invented films."""

from __future__ import annotations

from agent_r1.core.messages import Message
from agent_r1.retrieval.retriever import Passage
from agent_r1.retrieval.tool import render
from agent_r1.tasksets.search_examples import solved_example

INSTRUCTION = (
    "Search for one film or person at a time. When you know the answer, reply with <answer>answer</answer>. "
    "Answer with a name, a place, a date, a nationality, a film, yes or no."
)
READING = "Read the pages and reply with <answer>answer</answer>."

_LETTER = Passage("A Letter to Ebba", "A Letter to Ebba is a 1938 Danish film directed by Asger Tolne.")
_WARDENS = Passage(
    "The Quay Wardens",
    "The Quay Wardens is a 1974 comedy film directed by Ottilie Brakholm and starring Nils Aaberg.",
)
_OTTILIE = Passage(
    "Ottilie Brakholm",
    "Ottilie Brakholm (born 9 March 1921 in Turku) is a Finnish film director.",
)
_SALT = Passage("Salt on the Quay", "Salt on the Quay is a 1961 Swedish drama film directed by Edda Lindqvane.")
_EDDA = Passage(
    "Edda Lindqvane",
    "Edda Lindqvane (December 4, 1919 - May 2, 1990) was a Swedish film director. She was born in Visby, Sweden.",
)
_OLLE = Passage("Olle Lindqvane", "Olle Lindqvane (born 1948) is a Swedish actor.")


EXAMPLES: tuple[Message, ...] = (
    *solved_example("Who is the director of film A Letter to Ebba?", "Asger Tolne", _LETTER),
    *solved_example("When was the director of film The Quay Wardens born?", "9 March 1921", _WARDENS, _OTTILIE),
    *solved_example("Where was the director of film Salt on the Quay born?", "Visby", _SALT, _EDDA),
)
"""Three solved questions: one with one hop, and two with two hops.

With only one example of two hops, a model often leaves out the second search.
"""

READING_EXAMPLES: tuple[Message, ...] = (
    Message.user(f"{render((_EDDA, _OLLE))}\n\nWhere was Edda Lindqvane born?"),
    Message.assistant("<answer>Visby</answer>"),
)
"""One solved question for the prompt of naive RAG. The pages are in the question, so no search is needed."""
