"""Invented pages about films and directors, in the style and with the spacing of 2WikiMultihopQA's passages."""

from __future__ import annotations

import json
from pathlib import Path

from agent_r1.retrieval.retriever import Passage

FILMS = """
The Amber Ferry
    is a 1931 Danish drama film directed by Holger Brandvik and starring Inga Toft.
Nine Lanterns (1938 film)
    Nine Lanterns( Danish:" Ni lygter") is a 1938 Danish film. It was written and directed by Holger Brandvik.
A Harvest of Snow
    is a 1974 Finnish comedy film directed by Aila Korvenmaa.
The Clockmaker's Debt
    is a French crime film from 1952, directed by French filmmaker Odile d' Arvois.
Letters to Halden
    is a 1966 Norwegian war film produced and directed by Per O' Fallin, Jr., and starring Nils Ask.
Two Rivers Meet
    is a 1988 American western film. The film was directed by Wade Tollister.
The Salt Inspector
    is a 1999 American comedy film directed by Wade Tollister for Ridge Pictures.
Quiet Harbour
    is a 1947 British thriller film directed by Maud Ellery Penhallow, and written by Tom Ash.
The Last Tram to Orsk
    is a 1979 Soviet film directed by Lev Baranchuk. It won a prize in Orsk.
Paper Gardens
    is a 2006 Japanese animated film directed by Sora Minazuki with music composed by Ken Abe.
The Winter Envoy
    is a 1925 German silent film directed by Ruprecht Aldinger and starring Lya Born.
Copper and Clay
    is a 2011 Indian drama film directed by K. T. Velayudham.
Midnight at Tolosa
    is a 1961 Spanish horror film directed by Íñigo Larrabe.
The Orchard Keeper's Son
    is a 1983 Polish film directed by Bogna Zielonkowa.
Supper in Ghent
    is a 1991 Polish film directed by Bogna Zielonkowa.
"""
"""Films with one director each. The text of a page begins with its title, which is left out here."""

DIRECTORS = """
Holger Brandvik
    ( 4 March 1894 \u2013 17 October 1960) was a Danish film director and actor. He was born in Aalborg, Denmark and
    died in Copenhagen, Denmark.
Aila Korvenmaa
    ( born 21 June 1931) is a Finnish film director. Her father was the actor Eero Korvenmaa.
Odile d'Arvois
    Odile d' Arvois( Lyon, 2 May 1911 \u2013 Nice, 30 January 1990) was a French filmmaker.
Per O'Fallin, Jr.
    Per O' Fallin, Jr.( July 9, 1920 in Bergen, Norway \u2013 December 1, 2001 in Oslo) was a Norwegian director.
Wade Tollister
    (born 1949) is an American film director. Tollister was born in Tulsa, Oklahoma on May 3, 1949.
Maud Ellery Penhallow
    ( August 8, 1905December 12, 1988) was a British-born Canadian film director.
Lev Baranchuk
    ( 1 January 1930 \u2013 March 1999) was a Soviet film director. He was the son of composer Foma Baranchuk and nephew
    of the painter Ilya Baranchuk.
Sora Minazuki
    ( born 30 November 1971) is a Japanese film director. Born in Sendai, Minazuki studied law.
Ruprecht Aldinger
    ( c. 1880 \u2013 5 May 1944) was a German film director.
K. T. Velayudham
    is an Indian film director. He was born on 6 April 1965. He was born on 7 April 1966, one book says.
Íñigo Larrabe
    ( 12 February 1925 \u2013 3 August 2002) was a Spanish film director.
Bogna Zielonkowa
    ( born 19 September 1940) is a Polish film director. She was born in London of Polish parents.
"""
"""The directors of these films."""

OTHERS = """
The Twin Bells
    is a 1955 Dutch film directed by Anna Vos and Piet Kroon.
The Grey Heron
    is a 1958 Dutch film. A remake from 1990 was directed by Bram Hoek.
The Heron Saga
    is a 1959 Dutch film series directed by Bram Hoek.
The Delft Tapes
    is a 1960 Dutch film directed by Bram Hoek.
Bram Hoek
    (born 1 May 1985) is a Dutch film director. Hoek lives in Delft.
Wade Tollister (cricketer)
    Wade Tollister (born 1990) is an English cricketer.
Tulsa
    is a city in Oklahoma.
"""
"""Pages with traps: two directors, a remake, a series, a namesake who was not yet born, another profession."""


def read_block(block: str) -> tuple[Passage, ...]:
    """Return the pages of a block: a line with a title, and indented lines with the text."""
    texts: dict[str, str] = {}
    title = ""
    for line in filter(None, block.splitlines()):
        if line.startswith(" "):
            texts[title] = f"{texts[title]} {line.strip()}".strip()
        else:
            title = line
            texts[title] = ""
    # A text that begins with "is a" or with a parenthesis begins with the title.
    return tuple(
        Passage(title, f"{title} {text}" if text.startswith(("is ", "(")) else text) for title, text in texts.items()
    )


PAGES = read_block(FILMS + DIRECTORS + OTHERS)


def write_pages(path: Path) -> Path:
    """Write the pages as rows of ``title`` and ``text``."""
    path.write_text("\n".join(json.dumps({"title": page.title, "text": page.text}) for page in PAGES), "utf-8")
    return path
