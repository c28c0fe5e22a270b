"""The retriever of TinyWiki, for the search tool and the naive RAG baseline. A search returns at most one page."""

from __future__ import annotations

import re

from agent_r1.tasksets.tinywiki.wiki import Wiki

NOTHING = "No page."


def retrieve(wiki: Wiki, query: str) -> str:
    """Return the page whose title is the first title in the query; ``NOTHING`` if the query contains no title.

    BM25 could not choose between several titles in a query. All would have the same score, because each title is one
    word and belongs to one page.
    """
    named = [word for word in re.findall(r"\w+", query) if word in wiki.facts]
    return wiki.page(named[0]) if named else NOTHING
