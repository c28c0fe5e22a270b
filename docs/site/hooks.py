"""Hooks of MkDocs: pages for files outside docs/, and links between pages as the site needs them.

The Markdown files link to each other and to files of the repository, so that they can be read without the site. Files
of the repository become pages: Markdown files as they are, other files as code.
"""

import ast
import posixpath
import re
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
SOURCES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"{folder}/*.*" for folder in ("examples", "recipes"))]
"""Patterns of the files outside docs/ that become pages."""

LINK = re.compile(r"(?<=\]\()(?!https?:|#)[^)\s]+")
CODE = re.compile(r"`[^`]*`")
LANGUAGES = {".py": "python", ".toml": "toml", ".sbatch": "bash"}
API = "api.md"


def page_of(path: str) -> str:
    """Return the path of a page, relative to docs/, for the path of a file, relative to the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith(".md") else f"{path}.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add all decisions to the last section of the navigation."""
    decisions = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/decisions").glob("*.md"))
    (section,) = config.nav[-1].values()
    section.append({"Decisions": decisions})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file of ``SOURCES``."""
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        if path.suffix != ".md":
            text = f"# {name}\n\n````{LANGUAGES[path.suffix]}\n{text}````\n"
        files.append(File.generated(config, page_of(name), content=text))
    return files


def public_names() -> dict[str, str]:
    """Return the public names of each module, read from the table in ``agent_r1/__init__.py`` without importing it."""
    tree = ast.parse((ROOT / "agent_r1" / "__init__.py").read_text("utf-8"))
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES" and node.value
    ]
    return ast.literal_eval(table)


def _api_of(entry: tuple[str, str]) -> str:
    module, names = entry
    options = ["show_root_heading: false", "heading_level: 3", "members:", *(f"  - {name}" for name in names.split())]
    indented = "\n".join(f"      {line}" for line in options)
    return f"\n\n## agent_r1.{module}\n\n::: agent_r1.{module}\n    options:\n{indented}\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the Markdown of a page as the site needs it: links to pages, and on the page of the API the names."""
    source = page.file.src_uri
    if source == API:
        markdown += "".join(map(_api_of, public_names().items()))
    here = "docs" if page.file.generated_by is None else ""
    folder = posixpath.join(here, posixpath.dirname(source))

    def to_page(match: re.Match[str]) -> str:
        path, anchor = urlsplit(match[0]).path, urlsplit(match[0]).fragment
        target = page_of(posixpath.normpath(posixpath.join(folder, path)))
        relative = posixpath.relpath(target, posixpath.dirname(source) or ".")
        return f"{relative}#{anchor}" if anchor else relative

    # Messages (text) get a style of their own: their lines are wrapped, and those of pictures and commands are not.
    markdown = re.sub(r"^```text$", "```output", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^```python notest$", "```python", markdown, flags=re.MULTILINE)
    # Python-Markdown reads "|" in code as text, and would show the "\\" that GitHub needs before it.
    markdown = re.sub(
        r"^\|.*$", lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown, flags=re.M
    )
    return LINK.sub(to_page, markdown)
