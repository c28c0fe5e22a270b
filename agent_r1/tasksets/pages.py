"""A reward for the pages that the searches of an attempt returned."""

from __future__ import annotations

from collections.abc import Collection

from agent_r1.core.trajectory import Trajectory


def share_of_pages(trajectory: Trajectory, titles: Collection[str]) -> float:
    """Return the share of ``titles`` that the searches of an attempt found, from 0 to 1.

    The ``data`` of a search result must be the titles of its pages.
    """
    found = {title for turn in trajectory.env_turns for result in turn.results for title in result.data or ()}
    needed = set(titles)
    return len(found & needed) / len(needed)
