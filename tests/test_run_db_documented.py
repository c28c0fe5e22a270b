"""docs/run_db.md names every table, view and column of run.db, and its queries run."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from agent_r1.store.schema import KEYS, TABLES

PAGE = (Path(__file__).parents[1] / "docs" / "run_db.md").read_text()
SECTIONS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##)", PAGE, re.M | re.S))


@pytest.fixture
def database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.executescript(TABLES)
    return connection


def documented(section: str) -> set[str]:
    """Return the names in the first column of the table of a section."""
    cells = re.findall(r"^\| (`.*?) \|", SECTIONS[section], re.M)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("table", [table for table in KEYS if table != "meta"])
def test_every_column_is_documented(table: str, database: sqlite3.Connection) -> None:
    columns = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
    assert documented(table) == columns - {"id", "seal"}


def test_no_table_and_no_view_is_omitted(database: sqlite3.Connection) -> None:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    views = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'view'")}
    assert {name for heading in SECTIONS for name in heading.split(" and ")} == tables
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.partition("## Views")[2], re.M)) == views


def test_the_columns_of_meta_and_head_are_documented() -> None:
    assert documented("meta and head") == {"key", "value", "row", "seal"}


def test_the_queries_run(database: sqlite3.Connection) -> None:
    (block,) = re.findall(r"^```sql\n(.*?)^```", PAGE, re.M | re.S)
    for query in block.splitlines():
        database.execute(query)
