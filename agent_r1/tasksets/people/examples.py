"""The prompt of ``people``: an instruction and solved questions. The people of these questions do not occur in the
tasks.
"""

from __future__ import annotations

from agent_r1.core.messages import Message
from agent_r1.retrieval.retriever import Passage
from agent_r1.retrieval.tool import render
from agent_r1.tasksets.search_examples import solved_example

INSTRUCTION = "Search for one person at a time. When you know the answer, reply with <answer>answer</answer>."
READING = "Read the pages and reply with <answer>answer</answer>."

_ROSE = Passage("Rose Okafor", "Rose Okafor had a rival, Ivan Petrov. She spoke Dutch. Her employer was Ida Lund.")
_IVAN = Passage("Ivan Petrov", "Ivan Petrov played the piano. He was born in Cairo. His teacher was Ross Okafor.")
_ROSS = Passage("Ross Okafor", "Ross Okafor owned an animal, a spaniel. His rival was Rose Okafor. He was a pilot.")
_VERA = Passage("Vera Petrov", "Vera Petrov worked as a nurse. Her best friend was Ida Lund.")
_OMAR = Passage("Omar Petrov", "As a student, Omar Petrov had Rosa Lund as a teacher. His first language was Greek.")


EXAMPLES: tuple[Message, ...] = (
    *solved_example("Which language did Omar Petrov speak?", "Greek", _OMAR),
    *solved_example("Where was the rival of Rose Okafor born?", "Cairo", _ROSE, _IVAN),
    *solved_example("Which animal did the teacher of Ivan Petrov keep?", "spaniel", _IVAN, _ROSS),
)
"""Three solved questions: one with one hop, and two with two hops.

With only one example of two hops, a model often leaves out the second search.
"""

READING_EXAMPLES: tuple[Message, ...] = (
    Message.user(f"{render((_IVAN, _VERA))}\n\nWhere was Ivan Petrov born?"),
    Message.assistant("<answer>Cairo</answer>"),
)
"""One solved question for the prompt of naive RAG. The pages are in the question, so no search is needed."""
