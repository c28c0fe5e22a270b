"""The retriever of TinyWiki, used by the search tool and by the naive RAG baseline; it returns one page."""

from __future__ import annotations

import re

from agent_r1.tasksets.tinywiki.wiki import Wiki

NOTHING = "No page."


def retrieve(wiki: Wiki, query: str) -> str:
    """Return the page whose title occurs in the query; the first such title if there are several.

    Titles are single words, each of one page, so all have equal weight: BM25 over titles would rank them in the same
    order, with ties broken by position in the query.
    """
    named = [word for word in re.findall(r"\w+", query) if word in wiki.facts]
    return wiki.page(named[0]) if named else NOTHING
