"""What the rules of the film questions read from a page: years, directors, births, nationalities and fathers."""

from __future__ import annotations

import pytest

from agent_r1.retrieval.retriever import Passage
from environments.wikifilm.films import Film, read_film
from environments.wikifilm.persons import Person, read_director
from environments.wikifilm.text import Date


def film(text: str, title: str = "X") -> Film | None:
    return read_film(Passage(title, text))


def person(text: str, title: str = "Ann Lee") -> Person:
    found = read_director(Passage(title, text))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "year", "director"),
    [
        ("X is a 1953 German film written, produced and directed by Jan de Vos from a play.", 1953, "Jan de Vos"),
        ("X( 1953) is a German film directed by acclaimed Italian film director Ugo Po.", 1953, "Ugo Po"),
        ("X is a lost 1914 short directed by and starring Ann Lee.", 1914, "Ann Lee"),
        ("X is an upcoming horror film directed by Ann Lee.", None, "Ann Lee"),
        ("X is a 1953 film directed by the Quay Brothers.", 1953, None),
        ("X is a 1953 film directed by Ann Lee's brother.", 1953, None),
        ("X is a 1953 film directed by Ann and Éva Lee.", 1953, None),
        ("X is a 1953 film co-directed by Ann Lee.", 1953, None),
        ("X is a 1953 film written by Ann Lee and Bo Ek. It was directed by Lee.", 1953, None),
        ("X is a 1953 film directed by Ann Lee. It was made again, directed by Bo Ek.", 1953, None),
        ("X is a 1953-54 film directed by Ann Lee.", None, "Ann Lee"),
    ],
)
def test_the_director_and_the_year_of_a_film(text: str, year: int | None, director: str | None) -> None:
    assert film(text) == Film("X", year, director)


@pytest.mark.parametrize(
    "text",
    [
        "X is a 1953 film series directed by Ann Lee.",
        "X is the 1953 soundtrack of a film directed by Ann Lee.",
        "X is an American film actor, who was directed by Ann Lee.",
        "X is an American film director. His films were directed by Ann Lee.",
        "X is a village.",
        "X",
    ],
)
def test_pages_about_something_else_are_no_films(text: str) -> None:
    assert film(text) is None


@pytest.mark.parametrize(
    ("text", "birth", "place"),
    [
        ("(3 May 1918 in Graz, Austria \u2013 1980) was a film director.", Date(1918, 5, 3), ("Graz", "Austria")),
        ("(June 8, 1923, Rostov-on-Don - 1980) was a film director.", Date(1923, 6, 8), ("Rostov-on-Don",)),
        ("(born 1918 or 1919) is a director.", None, ()),
        ("is a director. Born in Rome, Lee began early.", None, ("Rome",)),
        ("is a director. She was born in Brooklyn, New York and raised in Newark.", None, ("Brooklyn", "New York")),
        ("is a director. She was born in Ryde, Isle of Wight.", None, ("Ryde", "Isle of Wight")),
        ("is a director. Her son was born in Rome.", None, ()),
        ("(born 1918 in Rome) is a director. She was born in Oslo.", Date(1918), ()),
        ("(born Eva Ek (1900\u20131905); 24 May 1886 \u2013 1 May 1962) was a director.", Date(1886, 5, 24), ()),
    ],
)
def test_the_birth_of_a_person(text: str, birth: Date | None, place: tuple[str, ...]) -> None:
    found = person(f"Ann Lee {text}")
    assert (found.birth, found.birthplace) == (birth, place)


@pytest.mark.parametrize(
    ("text", "nationality"),
    [
        ("is a prolific Danish film director.", "Danish"),
        ("is a South Korean filmmaker.", "South Korean"),
        ("was a Greek-American director.", None),
        ("was a French-born American director.", None),
        ("was an English Australian director.", None),
        ("is a director of French films.", None),
    ],
)
def test_the_nationality_of_a_person(text: str, nationality: str | None) -> None:
    assert person(f"Ann Lee {text}").nationality == nationality


@pytest.mark.parametrize(
    ("text", "father"),
    [
        ("She is the daughter of writer Bo Lee and niece of Ed Lee.", "Bo Lee"),
        ("She is the daughter of Eva Lee and the producer Bo Lee.", None),
        ("She is the daughter of actress Eva Lee.", None),
        ("She is the daughter of Eva Ek.", None),
        ("She is married to Cy Ek, who is the son of Bo Lee.", None),
        ("Her father was the film actor Bo Ek.", "Bo Ek"),
        ("Her father died in Paris.", None),
    ],
)
def test_the_father_of_a_person(text: str, father: str | None) -> None:
    assert person(f"Ann Lee is a Danish director. {text}").father == father
