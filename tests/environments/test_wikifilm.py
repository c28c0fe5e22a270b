"""Questions about films: what the rules read from pages, answers, splits, search, formats of the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from film_pages import PAGES, write_pages

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.retrieval.retriever import BM25Index, Passage
from agent_r1.rewards.scoring import exact_match_score
from environments.wikifilm import EXAMPLES, KINDS, build
from environments.wikifilm.films import SHOWN, Film, FilmFacts, ShortPages, read_facts, read_film, shorten
from environments.wikifilm.persons import Person
from environments.wikifilm.questions import build_questions
from environments.wikifilm.text import Date, name_key

TEXTS = {page.title: page.text for page in PAGES}
SPLITS = ("train", "validation", *KINDS)


@pytest.fixture(scope="module")
def taskset(tmp_path_factory: pytest.TempPathFactory) -> TaskSet:
    return build(write_pages(tmp_path_factory.mktemp("films") / "pages.jsonl"), 0)


@pytest.fixture(scope="module")
def facts() -> FilmFacts:
    return read_facts(PAGES)


def all_tasks(taskset: TaskSet) -> Iterator[Task]:
    for split in SPLITS:
        yield from taskset.tasks(split)


def test_the_facts_of_directors_are_read_from_their_pages(facts: FilmFacts) -> None:
    directors = {one.director.title: one.director for one in facts.films if one.director}
    assert directors["Holger Brandvik"] == Person(
        title="Holger Brandvik",
        birth=Date(1894, 3, 4),
        birthplace=("Aalborg", "Denmark"),
        death=Date(1960, 10, 17),
        deathplace=("Copenhagen", "Denmark"),
        nationality="Danish",
        father=None,
    )
    assert directors["Wade Tollister"].birth == Date(1949, 5, 3)  # more exact than "(born 1949)"
    assert directors["Wade Tollister"].birthplace == ("Tulsa", "Oklahoma")
    assert directors["Odile d'Arvois"].birthplace == ("Lyon",)
    assert directors["Per O'Fallin, Jr."].deathplace == ("Oslo",)
    assert directors["Maud Ellery Penhallow"].death == Date(1988, 12, 12)  # no dash, no space
    assert directors["Lev Baranchuk"].death == Date(1999, 3)
    assert {title: one.father for title, one in directors.items() if one.father} == {
        "Aila Korvenmaa": "Eero Korvenmaa",
        "Lev Baranchuk": "Foma Baranchuk",
    }


def test_facts_that_a_page_does_not_state_clearly_are_not_used(facts: FilmFacts) -> None:
    directors = {one.director.title: one.director for one in facts.films if one.director}
    assert directors["Ruprecht Aldinger"].birth is None  # "c. 1880"
    assert directors["K. T. Velayudham"].birth is None  # two dates
    assert directors["Maud Ellery Penhallow"].nationality is None  # two nationalities
    assert "Bram Hoek" not in directors  # born after the film
    films = {one.film.title: one.film for one in facts.films}
    assert films["The Twin Bells"].director is None and films["The Grey Heron"].director is None
    assert "The Heron Saga" not in films


def test_every_fact_of_an_answer_stands_in_a_supporting_page(taskset: TaskSet) -> None:
    for task in all_tasks(taskset):
        supporting, answers, hops = (task.data[name] for name in ("supporting", "answers", "hops"))
        kind = task.id.split("/")[1]
        assert len(supporting) == {"1-hop": 1, "2-hop": 2, "comparison": 2, "bridge-comparison": 4}[kind]
        pages = " ".join(TEXTS[title] for title in supporting)
        if answers[0] in ("yes", "no"):
            first, second = hops[2:4]
            assert (answers[0] == "yes") == (first == second) and first in pages and second in pages
        else:
            assert any(answer in pages for answer in answers) or answers[0] in supporting, task.id


def test_an_answer_that_the_page_does_not_contain_is_not_used(facts: FilmFacts) -> None:
    assert facts.answers(("Tulsa",), "Wade Tollister") == ("Tulsa",)
    assert facts.answers(("Oslo",), "Wade Tollister") == ()
    ordinal = Passage("Íñigo Larrabe", "Íñigo Larrabe (born 3rd of May 1918) is a Spanish film director.")
    questions = build_questions(read_facts([ordinal, *PAGES]))
    ids = [question.id for each in questions.values() for question in each]
    assert "2-hop/nationality/Midnight at Tolosa" in ids and "2-hop/birth-date/Midnight at Tolosa" not in ids


def test_the_answer_of_a_comparison_follows_from_the_years(taskset: TaskSet) -> None:
    seen = set()
    for task in all_tasks(taskset):
        if "comparison/" not in task.id or "/country/" in task.id:
            continue
        one, other = task.data["supporting"][:2]
        first, second = map(int, task.data["hops"][-3:-1])
        wants_later = any(word in task.messages[0].text for word in ("later", "recently", "younger"))
        assert task.data["answers"][0] == (other if (second > first) == wants_later else one)
        seen.add((wants_later, task.data["answers"][0] == one))
    assert len(seen) == 4


def test_no_film_and_no_person_is_in_two_classes(facts: FilmFacts) -> None:
    names: dict[str, set[str]] = {}
    for owner, questions in build_questions(facts).items():
        names[owner] = set()
        for question in questions:
            fathers = question.answers if "/father/" in question.id else ()
            directors = question.answers if "/director/" in question.id else ()
            names[owner] |= {name_key(name) for name in (*question.supporting, *fathers, *directors)}
    assert all(names.values())
    assert not names["train"] & names["test"]
    assert not names["train"] & names["validation"] and not names["validation"] & names["test"]


def test_the_seed_orders_the_training_questions_only(tmp_path: Path, taskset: TaskSet) -> None:
    other = build(write_pages(tmp_path / "copy.jsonl"), 1)
    ids = [[task.id for task in each.tasks("train")] for each in (taskset, other)]
    assert ids[0] != ids[1] and sorted(ids[0]) == sorted(ids[1])
    for split in SPLITS[1:]:
        assert [task.messages for task in taskset.tasks(split)] == [task.messages for task in other.tasks(split)]


def answers_of(taskset: TaskSet, id: str) -> tuple[str, ...]:
    return next(task.data["answers"] for task in all_tasks(taskset) if task.id.endswith(id))


def test_right_answers_in_other_formats_are_accepted(taskset: TaskSet) -> None:
    dates = answers_of(taskset, "2-hop/birth-date/Two Rivers Meet")
    assert all(exact_match_score(text, dates) for text in ("3 May 1949", "May 3, 1949", "1949-05-03", "may 3 1949."))
    assert not any(exact_match_score(text, dates) for text in ("1949", "May 1949", "5 March 1949"))
    places = answers_of(taskset, "1-hop/birthplace/Wade Tollister")
    assert places == ("Tulsa", "Tulsa, Oklahoma")
    assert "United States" in answers_of(taskset, "1-hop/nationality/Wade Tollister")
    assert answers_of(taskset, "1-hop/director/Letters to Halden") == ("Per O'Fallin, Jr.", "Per O' Fallin, Jr.")
    assert any("Nine Lanterns" in task.data["answers"] for task in all_tasks(taskset))


def test_searching_the_titles_finds_the_pages_and_is_measured(taskset: TaskSet, run_attempts: Any) -> None:
    shown = sum(message.role == "assistant" for message in EXAMPLES)
    task = next(task for task in taskset.tasks("2-hop") if "Two Rivers Meet" in task.id)

    def script(prompt: str) -> str:
        turn = prompt.count("<|im_start|>assistant") - 1 - shown
        queries = ["Two Rivers Meet", "Wade Tollister"]
        if turn < len(queries):
            call = {"name": "search", "arguments": {"query": queries[turn]}}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return f"<answer>{task.data['answers'][0]}</answer>"

    (trajectory,) = run_attempts(taskset, [task], script)
    assert trajectory.rewards == {"em": 1.0, "f1": 1.0, "pages_read": 1.0, "supported": 1.0}
    (result,) = trajectory.turns[0].results
    assert 1 <= len(result.data) <= 3 and result.data[0] == "Two Rivers Meet"
    assert "directed by Wade Tollister" in result.parts[0].text
    (guess,) = run_attempts(taskset, [task], lambda prompt: "<answer>Oslo</answer>")
    assert guess.rewards["em"] == guess.rewards["pages_read"] == guess.rewards["supported"] == 0.0
    (silent,) = run_attempts(taskset, [task], lambda prompt: script(prompt).replace("<answer>", ""))
    assert silent.rewards["pages_read"] == 1.0
    assert silent.rewards["supported"] == 0.0


def test_a_search_shows_the_beginning_of_a_page_from_which_the_facts_are_read() -> None:
    long = Passage("X", "X is a 1953 film directed by Ann Lee. " + "It is long. " * 60 + "It was directed by Bo Ek.")
    short = shorten(long)
    assert long.text.startswith(short.text) and len(short.text) <= SHOWN and short.text.endswith("long.")
    assert read_film(short) == Film("X", 1953, "Ann Lee")
    assert read_film(long) == Film("X", 1953, None)
    ((found,),) = ShortPages(BM25Index([long])).search(["film"])
    assert found == short
    assert len(shorten(Passage("X", "word " * 500)).text) in range(SHOWN - 6, SHOWN)
    assert len(shorten(Passage("X", "w" * 5000)).text) == SHOWN


def questions_row(number: int, pages: tuple[Passage, ...]) -> dict[str, Any]:
    """Return a row in the format of 2WikiMultihopQA's train.json; the test file has neither answer nor evidences."""
    context = [[page.title, [sentence + "." for sentence in page.text.split(".") if sentence]] for page in pages]
    return {"_id": f"q{number}", "type": "compositional", "question": "Who?", "context": context}


def official(folder: Path) -> Path:
    (folder / "dev.json").write_text(json.dumps([questions_row(1, PAGES[:20]), questions_row(2, PAGES[10:])]), "utf-8")
    return folder / "dev.json"


def whole_folder(folder: Path) -> Path:
    official(folder)
    (folder / "id_aliases.json").write_text('{"Q_id": "Q1", "aliases": ["not a page"]}', "utf-8")
    return folder


@pytest.mark.parametrize("write", [official, whole_folder])
def test_the_pages_of_official_files_give_the_same_questions(
    write: Callable[[Path], Path], tmp_path: Path, taskset: TaskSet
) -> None:
    found = build(write(tmp_path), 0)
    for split in SPLITS:
        assert {task.messages for task in found.tasks(split)} == {task.messages for task in taskset.tasks(split)}


GOOD = {"title": "X", "text": "X is a 1953 film directed by Ann Lee."}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ('{"title": "X", "text": ', "broken JSON"),
        (json.dumps(GOOD) + '\n{"title": "Y"}', "row 2.*no text"),
        ('{"context": [["X"]]}', "row 1.*context"),
        ("", "empty file"),
        (json.dumps(GOOD), "more pages about films"),
    ],
)
def test_damaged_files_are_refused_in_one_line(rows: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text(rows, "utf-8")
    with pytest.raises(InvalidInput, match=expected) as refused:
        build(path, 0)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def settings_file(folder: Path, text: str) -> Path:
    write_pages(folder / "pages.jsonl")
    (folder / "films.toml").write_text(text, "utf-8")
    return folder / "films.toml"


def test_settings_choose_the_training_questions_and_what_the_agent_sees(
    tmp_path: Path, taskset: TaskSet, run_attempts: Any
) -> None:
    text = 'data = "pages.jsonl"\nkinds = ["1-hop", "2-hop"]\npages = 1\nturns = 6'
    found = build(settings_file(tmp_path, text), 0)
    kinds = ("train/1-hop/", "train/2-hop/")
    expected = [task.id for task in taskset.tasks("train") if task.id.startswith(kinds)]
    assert [task.id for task in found.tasks("train")] == expected
    for split in SPLITS[1:]:
        assert [task.id for task in found.tasks(split)] == [task.id for task in taskset.tasks(split)]
    assert isinstance(found.env, ToolEnv) and found.env.max_turns == 6
    assert found.retrieval is not None and set(found.retrieval("1-hop")) == {"recall@1"}
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "a Danish film"}}\n</tool_call>'
    searched: list[Any] = []
    for each in (found, taskset):
        (trajectory,) = run_attempts(each, each.tasks("1-hop")[:1], lambda prompt: call)
        searched.append(len(trajectory.turns[0].results[0].data))
    assert searched == [1, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('data = "pages.jsonl"\nkinds = ["3-hop"]', "kinds.0"),
        ('data = "pages.jsonl"\npage = 1', "page"),
        ('data = "none.jsonl"', "none.jsonl"),
        ("data = ", "films.toml"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=expected) as refused:
        build(settings_file(tmp_path, text), 0)
    assert "\n" not in str(refused.value)
