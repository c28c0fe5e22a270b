"""A run goes on with the questions and passages it began with, wherever they came from."""

from pathlib import Path

import pytest
from resuming import config_of, resume, train_with_images

from agent_r1.core.errors import InvalidInput
from agent_r1.core.record import Happened
from agent_r1.core.world import World
from agent_r1.store.verify import verify
from agent_r1.train.inputs import events_of


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    (tmp_path / "my questions.json").write_text("[1]")
    return tmp_path / "my questions.json"


def test_the_digest_is_that_of_the_file(micro: World, questions: Path, tmp_path: Path) -> None:
    [event] = events_of(config_of(micro, tmp_path / "run", {"data": questions}))
    digest = "080a9ed428559ef602668b4c00f114f1a11c3f6b02a435f0bdc154578e4d7f22"
    assert event == Happened("read", f"data {questions} sha256 {digest}")


def test_of_a_folder_every_name_and_byte_counts_but_no_hidden_file(micro: World, tmp_path: Path) -> None:
    def digest() -> tuple[Happened, ...]:
        return events_of(config_of(micro, tmp_path / "run", {"corpus": str(tmp_path / "corpus")}))

    (tmp_path / "corpus" / "part").mkdir(parents=True)
    seen = [digest()]
    for name, text in (("part/a", "1"), ("part/a", "2"), ("part/b", "2")):
        (tmp_path / "corpus" / name).write_text(text)
        seen.append(digest())
    (tmp_path / "corpus" / "part" / ".DS_Store").write_text("x")
    assert len(set(seen)) == 4 and digest() == seen[-1]


def test_what_is_no_file_here_has_no_digest(micro: World, tmp_path: Path) -> None:
    named = {"data": "hf:owner/name", "corpus": "http://127.0.0.1:8000"}
    assert events_of(config_of(micro, tmp_path / "run", named)) == ()


def test_a_run_whose_questions_changed_is_refused_and_opens_no_lineage(
    micro: World, questions: Path, tmp_path: Path
) -> None:
    train_with_images(micro, tmp_path, {"steps": 2, "data": questions})
    questions.write_text("[2]")
    with pytest.raises(InvalidInput, match=r"^data: got other contents than the run's: sha256 .*; put back what"):
        resume(micro, tmp_path / "step-2")
    assert verify(tmp_path / "step-2").lineages == 1
    questions.write_text("[1]")
    resume(micro, tmp_path / "step-2")
    assert verify(tmp_path / "step-2").lineages == 2
