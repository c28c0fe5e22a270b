"""An extension of Griffe: docstrings as Markdown, for the reference of the Python API."""

import re
from textwrap import indent

import griffe

ROLE = re.compile(r":(?:class|func|data|meth|mod|attr):`(~?)([\w.]+)`")
EXAMPLE = re.compile(r"^Example:\n((?:[ ]{4}.*\n|\n)+)", re.MULTILINE)


class MarkdownDocstrings(griffe.Extension):
    """Converts references to other objects to code, and examples to blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(_as_code, f"{text}\n").strip()


def _as_code(example: re.Match[str]) -> str:
    """Return an example as a block of code. Explanations that are not indented further stay a part of the example."""
    code = "\n".join(line[4:] for line in example[1].rstrip().splitlines())
    return "Example:\n" + indent(f"```python\n{code}\n```\n", "    ") + "\n"
