"""Invented people: what is true on their pages, chains of facts, splits, search and rewards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.envs.tool_env import ToolEnv
from environments.people import EXAMPLES, SPLITS, build, retrieval_tool, search_tool, tasks
from environments.people.world import (
    HELD_OUT_PERSONAL,
    HELD_OUT_VALUED,
    PEOPLE,
    PERSONAL,
    SURNAMES,
    VALUED,
    WorldKey,
    open_world,
)

ALL = (*PERSONAL, *VALUED)
SAMPLE = 60


def pages(owner: str, number: str = "0", **changes: bool) -> dict[str, str]:
    return {page.title: page.text for page in open_world(WorldKey(owner, number, **changes)).pages()}


def test_no_person_belongs_to_two_classes() -> None:
    train, validation, test = (set(SURNAMES[owner]) for owner in ("train", "validation", "test"))
    assert not train & validation and not train & test and not validation & test
    surnames = {message.text.split()[-1].rstrip("?.") for message in EXAMPLES if message.role == "user"}
    assert not surnames & (train | validation | test)


@pytest.mark.parametrize("owner", SURNAMES)
def test_a_page_has_three_to_six_sentences_with_every_fact_of_the_person(owner: str) -> None:
    world = open_world(WorldKey(owner, "0"))
    assert len(world.facts) == PEOPLE
    for page in world.pages():
        facts = world.facts[page.title]
        assert 3 <= len(facts) <= 6 and len({fact.relation.name for fact in facts}) == len(facts)
        assert page.text.startswith(page.title) or page.title in facts[0].sentence
        assert all(fact.value in fact.sentence and fact.sentence in page.text for fact in facts)
        assert "{" not in page.text and re.search(r"[.] [a-z]", page.text) is None
        assert all(f.value != page.title and (f.value in world.facts) == bool(f.relation.noun) for f in facts)


@pytest.mark.parametrize("split", SPLITS)
def test_following_the_chain_through_the_pages_leads_to_the_answer(split: str) -> None:
    recipe = SPLITS[split]
    for index, task in enumerate(tasks(split, 0)[:SAMPLE]):
        chain, text = task.data["chain"], pages_of(task)
        assert len(chain.relations) == recipe.hops[index % len(recipe.hops)]
        for person, value in zip(chain.pages, chain.values, strict=True):
            assert value in text[person]
        assert len({chain.start, *chain.values}) == len(chain.values) + 1
        assert chain.start in task.messages[0].text and chain.answer not in task.messages[0].text


def pages_of(task: Task) -> dict[str, str]:
    return {page.title: page.text for page in open_world(task.data["world"]).pages()}


def test_questions_of_a_split_are_all_different_and_depend_on_the_seed_in_training_only() -> None:
    for split, recipe in SPLITS.items():
        drawn = tasks(split, 0)
        assert len({(task.data["world"], task.messages[0].text) for task in drawn}) == recipe.tasks
    assert tasks("train", 0)[:9] == tasks("train", 0)[:9] != tasks("train", 1)[:9]
    assert tasks("2-hop", 0)[0].messages == tasks("2-hop", 1)[0].messages


def test_what_is_held_out_occurs_in_its_own_split_only() -> None:
    known = " ".join(task.messages[0].text for task in tasks("train", 0)[:2000])
    paraphrased = tasks("paraphrased", 0)
    held_out = [re.split(r"\{x\}", relation.held_out_question)[0] for relation in ALL]
    assert not any(part in known for part in held_out)
    assert all(any(part in task.messages[0].text for part in held_out) for task in paraphrased)
    for name in (HELD_OUT_PERSONAL.name, HELD_OUT_VALUED.name):
        word = re.compile(rf"\b{name}\b")
        assert not word.search(known) and not any(map(word.search, pages("train", "0/0").values()))
        assert any(name in task.messages[0].text for task in tasks("unseen-relation", 0))


def test_a_search_for_a_name_nearly_always_returns_that_page_among_at_most_three() -> None:
    found = []
    for task in tasks("2-hop", 0)[:200]:
        for person in task.data["chain"].pages:
            titles = search_tool(3).function(person, task).data
            assert len(titles) <= 3
            found.append(person in titles)
    assert sum(found) / len(found) > 0.98


def test_a_search_of_the_agent_repeats_the_question_and_one_of_naive_rag_does_not() -> None:
    task = tasks("2-hop", 0)[0]
    query, question = task.data["chain"].start, task.messages[0].text
    of_agent, of_rag = (tool(3).function(query, task) for tool in (search_tool, retrieval_tool))
    assert of_agent.parts[0].text == f"{of_rag.parts[0].text}\n\n{question}"
    assert of_agent.data == of_rag.data and question not in of_rag.parts[0].text


def test_a_file_of_settings_changes_training_questions_pages_and_turns(tmp_path: Path) -> None:
    file = tmp_path / "people.toml"
    file.write_text("hops = [1, 2, 2]\npages = 1\nturns = 4\n", "utf-8")
    default, changed = build(0), build(0, file)
    hops = [len(task.data["chain"].relations) for task in changed.tasks("train")]
    assert hops[:6] == [1, 2, 2, 1, 2, 2]
    for split in ("validation", "2-hop"):
        assert changed.tasks(split) == default.tasks(split)
    assert isinstance(changed.env, ToolEnv) and changed.env.max_turns == 4
    task = changed.tasks("1-hop")[0]
    query = task.data["chain"].start.split()[1]
    assert [len(t.env.tools_by_name["search"].function(query, task).data) for t in (default, changed)] == [3, 1]
    assert changed.solutions(task).wrong[-1] != default.solutions(task).wrong[-1]


@pytest.mark.parametrize(
    ("text", "why"),
    [("hops = [4]", "hops.0"), ("page = 1", "page"), ("= 1", "TOML")],
)
def test_a_bad_file_of_settings_is_refused_with_its_fault(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "people.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(InvalidInput, match=why):
        build(0, file)
