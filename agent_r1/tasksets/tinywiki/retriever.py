"""The retriever of TinyWiki. A search returns at most one page."""

from __future__ import annotations

import re

from agent_r1.tasksets.tinywiki.wiki import Wiki

NOTHING = "No page."


def retrieve(wiki: Wiki, query: str) -> str:
    """Return the text of the page whose title comes first in the query; ``NOTHING`` if the query contains no title.

    Example:
        retrieve(wiki, "mayor of Alba or Bruno") == wiki.page("Alba")
    """
    named = [word for word in re.findall(r"\w+", query) if word in wiki.facts]
    return wiki.page(named[0]) if named else NOTHING
