"""What README and the documents show is true: commands parse, code is the tested example, links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from agent_r1.cli import parse
from agent_r1.core.errors import InvalidInput

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text()


def lines(pattern):
    return list(_lines(pattern))


def _lines(pattern):
    for document in DOCUMENTS:
        for match in re.finditer(pattern, document.read_text(), re.MULTILINE):
            yield pytest.param(match.group(1), id=f"{document.name}: {match.group(1)[:50]}")


@pytest.mark.parametrize("command", lines(r"^    agent-r1 (\S.*?)(?:  .*)?$"))
def test_commands_parse(command):
    words = [word for word in shlex.split(command) if not re.fullmatch(r"\[.*\]", word)]
    parse(words)


def test_a_wrong_command_is_seen():
    with pytest.raises(InvalidInput):
        parse(["train", "--stepz", "3"])


@pytest.mark.parametrize("target", lines(r"^    make (\S+)"))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("file", lines(r"python (\S+\.py)"))
def test_scripts_exist(file):
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target


def test_readme_shows_the_tested_example_and_it_is_short():
    example = (ROOT / "examples" / "ten_lines.py").read_text()
    assert example in (ROOT / "README.md").read_text()
    assert len(example.splitlines()) <= 12
