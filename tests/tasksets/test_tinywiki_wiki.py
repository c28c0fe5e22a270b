"""The generated encyclopedia: properties of facts, chains and pages."""

import random

import pytest

from agent_r1.tasksets.tinywiki.questions import SPLITS
from agent_r1.tasksets.tinywiki.wiki import ENTITIES, FACTS_PER_PAGE, PAGES, RELATIONS, open_wiki


def facts_of(name: str) -> set[tuple[str, str, str]]:
    return {
        (title, relation, value) for title, facts in open_wiki(name).facts.items() for relation, value in facts.items()
    }


def facts_of_class(owner: str, seeds: int) -> set[tuple[str, str, str]]:
    prefixes = [f"train/{seed}" for seed in range(seeds)] if owner == "train" else [owner]
    wikis = max(split.wikis for split in SPLITS.values() if split.owner == owner)
    return {fact for prefix in prefixes for number in range(wikis) for fact in facts_of(f"{prefix}/{number}")}


def test_words_are_single_distinct_and_pronounceable() -> None:
    assert len(set(ENTITIES)) == len(ENTITIES) >= 200
    assert all(name.isalpha() and name.istitle() for name in ENTITIES)
    assert len(set(RELATIONS)) == len(RELATIONS)
    assert all(word.isalpha() and word.islower() for word in RELATIONS)


def test_wikis_of_different_classes_share_names_but_no_facts() -> None:
    train, validation, test = (facts_of_class(owner, seeds=2) for owner in ("train", "validation", "test"))
    assert not train & validation and not train & test and not validation & test
    assert {title for title, _, _ in train} & {title for title, _, _ in test}


def test_every_value_has_its_own_page() -> None:
    wiki = open_wiki("test/0")
    assert len(wiki.titles) == PAGES
    for title, facts in wiki.facts.items():
        assert len(facts) == len(set(facts.values())) == FACTS_PER_PAGE
        assert title not in facts.values() and set(facts.values()) <= set(wiki.titles)


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_a_chain_follows_facts_without_repetition(hops: int) -> None:
    wiki, rng = open_wiki("validation/1"), random.Random(5)
    for _ in range(50):
        chain = wiki.chain(hops, rng)
        at = chain.start
        for relation, value in zip(chain.relations, chain.values, strict=True):
            at = wiki.facts[at][relation]
            assert at == value
        assert chain.answer == at and len(chain.relations) == hops
        assert len({chain.start, *chain.values}) == hops + 1 and len(set(chain.relations)) == hops


def test_a_page_shows_its_facts_relation_by_value() -> None:
    wiki = open_wiki("test/0")
    title = wiki.titles[0]
    page = wiki.page(title)
    assert page.startswith(f"{title}: ")
    assert all(f"{relation} {value}." in page for relation, value in wiki.facts[title].items())
