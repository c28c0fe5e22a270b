"""BM25 finds the right passages, deterministically, for single queries and batches."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import Counter
from collections.abc import Sequence

import pytest
from benchmark_files import SHARED, real_data
from hypothesis import given, settings, strategies as st

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId
from agent_r1.retrieval.retriever import NOTHING_FOUND, BM25Index, Found, Passage, read_corpus, render, search_tool
from agent_r1.tasksets.multihop.questions import read_questions
from agent_r1.tools.function_tool import Tool

PASSAGES = (
    Passage("Alba", "Alba is a river in the north. Bruno rules the land around Alba."),
    Passage("Bruno", "Bruno was a king, born in Carla."),
    Passage("Carla", "Carla is a town on a lake."),
    Passage("Lake district", "Many towns lie on a lake."),
)


def ask(made: Tool, queries: list[str]) -> list[ToolResult]:
    async def together() -> list[ToolResult]:
        calls = (
            made.run({"query": query}, Task("t", ()), RolloutContext(AttemptId("r", "t", 0, index), 0))
            for index, query in enumerate(queries)
        )
        return await asyncio.gather(*calls)

    return asyncio.run(together())


def text_of(result: ToolResult) -> str:
    return "".join(part.text for part in result.parts if isinstance(part, Text))


def titles(index: BM25Index, query: str, k: int = 5) -> list[str]:
    return [passage.title for passage in index.search([query], k)[0]]


def test_the_best_passage_is_first_and_passages_without_a_common_word_are_left_out() -> None:
    index = BM25Index(PASSAGES)
    assert titles(index, "Who rules Alba?") == ["Alba"]
    assert titles(index, "the king Bruno") == ["Bruno", "Alba"]
    assert titles(index, "lake") == ["Lake district", "Carla"]
    assert titles(index, "lake", k=1) == ["Lake district"]
    assert titles(index, "quantum") == []
    assert titles(index, "") == []
    assert titles(index, "the of and") == []


def test_titles_are_searched_too() -> None:
    assert titles(BM25Index(PASSAGES), "district") == ["Lake district"]


@pytest.mark.parametrize("k", [1, 2, 3, 7, 10])
def test_equal_scores_keep_the_order_of_the_corpus(k: int) -> None:
    same = [Passage(f"T{i:02}", "one and the same text") for i in range(10)]
    mixed = [*PASSAGES, *same, Passage("best", "same same same text")]
    assert titles(BM25Index(mixed), "same text", k) == ["best", *(passage.title for passage in same)][:k]


def reference_order(passages: tuple[Passage, ...], query: str) -> list[int]:
    """Return the ranking by the formula of BM25, in double precision, by sorting all passages."""
    texts = [re.findall(r"\w\w+", f"{passage.title}\n{passage.text}".lower()) for passage in passages]
    counts = [Counter(text) for text in texts]
    mean = sum(map(len, texts)) / len(texts)
    scores = [0.0] * len(texts)
    for word in re.findall(r"\w\w+", query.lower()):
        having = sum(word in count for count in counts)
        weight = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for index, (text, count) in enumerate(zip(texts, counts, strict=True)):
            if count[word]:
                scores[index] += weight * count[word] / (count[word] + 1.5 * (1 - 0.75 + 0.75 * len(text) / mean))
    order = sorted(range(len(texts)), key=lambda index: (-round(scores[index], 4), index))
    return [index for index in order if scores[index] > 0]


words = st.sampled_from(["alba", "bruno", "carla", "dora", "emil", "river", "king"])
phrases = st.lists(words, min_size=1, max_size=6).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(phrases, min_size=1, max_size=8), phrases)
def test_the_ranking_matches_a_reference_implementation(texts: list[str], query: str) -> None:
    passages = tuple(Passage(f"P{i}", text) for i, text in enumerate(texts))
    expected = [f"P{index}" for index in reference_order(passages, query)]
    assert titles(BM25Index(passages), query, k=20) == expected
    assert titles(BM25Index(passages), query, k=2) == expected[:2]


def test_a_corpus_of_a_single_word_can_be_searched() -> None:
    passage = Passage("42", "the")
    assert BM25Index([passage]).search(["who", "", "42"]) == [(), (), (passage,)]


@pytest.mark.parametrize("text", ["a", "the", "?"])
def test_a_corpus_without_words_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="without any word"):
        BM25Index([Passage(text, text)])


NAMES = tuple(
    Passage(title, f"{title}: {text}")
    for title, text in {
        "Apollo 8": "a flight around the Moon, long before Apollo 11",
        "Apollo 9": "a flight around the Earth",
        "C++": "a language of Stroustrup",
        "C": "a language of Ritchie",
        "C#": "a language of Hejlsberg",
        "AT&T": "a firm of telephones in Texas",
        "Q&A": "a film of Lumet",
        "X": "a letter; malcolm was called so",
        "Zoë": "she sails",
        "Ångström": "a physicist of Uppsala",
        "Straße": "a road in Bonn",
        "\uff2e\uff28\uff2b": "radio of Tokyo",
        "H₂O": "water",
        "Donau\u00addampf": "ships of Vienna",
        "東京タワー": "赤い塔です",
        "京都市": "古い町です",
        "แมวไทย": "สัตว์เลี้ยง",
        "हिन्दी": "भाषा है",
        "The Who": "a band of London",
        "It": "a novel of King",
        "!!!": "a band of Sacramento",
        "Home of Procter&Gamble": "soap",
        "Q3": "tea&coffee in one cup",
        "Address": "see ?a=1&b=2",
        "The The": "a band of Johnson",
        "To be, or not to be": "a speech",
        "İzmir": "a port",
        "❤️": "a sign",
    }.items()
)


@pytest.mark.parametrize(
    ("query", "title"),
    [
        ("flight of Apollo 9", "Apollo 9"),
        ("what is C++?", "C++"),
        ("what is C#?", "C#"),
        ("telephones by AT&T", "AT&T"),
        ("is Q&A good", "Q&A"),
        ("the letter x", "X"),
        ("does Zoe\u0308 sail", "Zoë"),
        ("of A\u030angstro\u0308m", "Ångström"),
        ("a STRASSE", "Straße"),
        ("the NHK", "\uff2e\uff28\uff2b"),
        ("drink H2O", "H₂O"),
        ("the Donaudampf", "Donau\u00addampf"),
        ("東京はどこ", "東京タワー"),
        ("町", "京都市"),
        ("เลี้ยงแมว", "แมวไทย"),
        ("के हिन्दी", "हिन्दी"),
        ("It", "It"),
        ("it ", "It"),
        ("!!!", "!!!"),
        ("Procter Gamble", "Home of Procter&Gamble"),
        ("Procter & Gamble", "Home of Procter&Gamble"),
        ("coffee", "Q3"),
        ("b", "Address"),
        ("AT & T", "AT&T"),
        ("AT and T", "AT&T"),
        ('"It"', "It"),
        ("The The!", "The The"),
        ("To be or not to be?", "To be, or not to be"),
        ("izmir", "İzmir"),
        ("❤", "❤️"),
    ],
)
def test_every_word_that_a_reader_sees_is_found(query: str, title: str) -> None:
    assert titles(BM25Index(NAMES), query, 1) == [title]


def test_a_passage_whose_title_is_the_query_comes_first() -> None:
    passages = [Passage("Ford", "a long page about many other things of Detroit"), Passage("Ford Ford", "Ford Ford")]
    assert titles(BM25Index(passages), "Ford in Detroit") == ["Ford", "Ford Ford"]
    assert titles(BM25Index(passages), " FORD\n") == ["Ford", "Ford Ford"]
    assert titles(BM25Index(passages), "Ford Ford") == ["Ford Ford", "Ford"]
    twice = [*passages, Passage("FORD", "Ford Ford Ford")]
    assert titles(BM25Index(twice), "ford", 2) == ["FORD", "Ford"]


def test_the_s_of_a_name_is_no_word() -> None:
    passages = [Passage("Alba", "Bruno's hat, Carla's coat"), Passage("Model S", "It doesn't fly")]
    assert titles(BM25Index(passages), "an S") == ["Model S"]


@real_data
def test_every_title_of_a_large_corpus_is_found_by_itself() -> None:
    passages = read_corpus(SHARED / "real" / "corpus.jsonl")
    index = BM25Index(passages)
    some = random.Random(0).sample(passages, 2000)
    found = index.search([passage.title for passage in some], 3)
    assert [passage.title for passage, best in zip(some, found, strict=True) if passage not in best] == []


# ---- the tool


def test_a_tool_result_has_passages_as_text_and_titles_as_data() -> None:
    (result,) = ask(search_tool(BM25Index(PASSAGES), k=2), ["king Bruno"])
    assert result.ok
    assert text_of(result) == f"[1] Bruno\n{PASSAGES[1].text}\n\n[2] Alba\n{PASSAGES[0].text}"
    assert result.data == ("Bruno", "Alba")


def test_a_search_without_results_is_reported() -> None:
    (result,) = ask(search_tool(BM25Index(PASSAGES)), ["quantum"])
    assert (result.ok, text_of(result), result.data) == (True, NOTHING_FOUND, ())
    assert render(()) == NOTHING_FOUND


def test_the_query_is_the_only_argument_of_the_tool() -> None:
    spec = search_tool(BM25Index(PASSAGES)).spec
    assert spec.name == "search"
    assert list(spec.parameters["properties"]) == ["query"]


def test_concurrent_queries_are_searched_in_one_batch() -> None:
    batches = []

    class Counting(BM25Index):
        def search(self, queries: Sequence[str], k: int = 5) -> Found:
            batches.append(len(queries))
            return super().search(queries, k)

    index = Counting(PASSAGES)
    queries = ["Alba", "king", "lake", "quantum"] * 5
    together = ask(search_tool(index), queries)
    assert batches == [20]
    alone = [ask(search_tool(index), [query])[0] for query in queries]
    assert [(text_of(result), result.data) for result in together] == [
        (text_of(result), result.data) for result in alone
    ]


@real_data
def test_on_hotpotqa_a_batch_equals_single_searches_and_finds_most_supporting_passages() -> None:
    questions = read_questions(SHARED / "hotpotqa_train_60.json")
    index = BM25Index(read_corpus(SHARED / "hotpotqa_corpus.jsonl"))
    together = index.search([question.text for question in questions])
    assert together == [index.search([question.text])[0] for question in questions]
    found = [
        len(set(q.supporting) & {p.title for p in passages}) / 2
        for q, passages in zip(questions, together, strict=True)
    ]
    assert 0.7 < sum(found) / len(found) < 0.85
    by_title = {passage.title: passage for passage in index.passages}
    assert all(index.search([title], 20)[0].count(by_title[title]) for q in questions for title in q.supporting)
