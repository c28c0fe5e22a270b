"""The one retriever of TinyWiki: the tool and the Naive RAG baseline both ask it, for one page."""

from __future__ import annotations

import re

from agent_r1.tasksets.tinywiki.wiki import Wiki

NOTHING = "No page."


def retrieve(wiki: Wiki, query: str) -> str:
    """The text of the page whose title stands in the query; the first such title where there are several.

    Titles are single words, each of one page, so all weigh the same: this is the order in which BM25 over
    titles ranks them, ties going to the word that stands first.
    """
    named = [word for word in re.findall(r"\w+", query) if word in wiki.facts]
    return wiki.page(named[0]) if named else NOTHING
