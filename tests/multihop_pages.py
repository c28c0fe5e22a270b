"""Small files in the format of HotpotQA, for the task set with short results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGES = {
    "Nils Aaberg": "Nils Aaberg is a composer. He was born in Orrby.",
    "Orrby": "Orrby is a town in Vestmark. " + "It has a harbor. " * 40 + "Its mayor is Edda Lind.",
    "Blow (film)": "Blow is a 1961 film.",
    "Salt": "Salt is a 1974 film.",
    "Alien page": "Nothing here names anything else.",
}


def row(id: str, question: str, answer: str, *supporting: str) -> dict[str, Any]:
    context = [[title, [text]] for title, text in PAGES.items()]
    return {
        "_id": id, "question": question, "answer": answer, "context": context,
        "supporting_facts": [[title, 0] for title in supporting],
    }  # fmt: skip


TRAINING = (
    row("bridge", "In which county was Nils Aaberg born?", "Vestmark", "Orrby", "Nils Aaberg"),
    row("comparison", "Which film is older, Blow or Salt?", "Blow", "Salt", "Blow (film)"),
    row("yes", "Are Blow and Salt both films?", "yes", "Salt", "Blow (film)"),
    row("unnamed", "Which county is this?", "Vestmark", "Orrby", "Alien page"),
    row("cut", "Who is mayor of the town of Nils Aaberg?", "Edda Lind", "Orrby", "Nils Aaberg"),
)


def write_multihop(folder: Path) -> tuple[Path, Path]:
    """Write a mixture file with its questions, and a corpus; return both paths."""
    (folder / "train.json").write_text(json.dumps(TRAINING), "utf-8")
    tests = [row("t", "Who is Nils Aaberg?", "a composer", "Nils Aaberg")]
    (folder / "test.json").write_text(json.dumps(tests), "utf-8")
    passages = [json.dumps({"title": title, "text": text}) for title, text in PAGES.items()]
    (folder / "corpus.jsonl").write_text("\n".join(passages), "utf-8")
    (folder / "data.toml").write_text('[train.a]\ndata = "train.json"\n[test.b]\ndata = "test.json"\n', "utf-8")
    return folder / "data.toml", folder / "corpus.jsonl"
