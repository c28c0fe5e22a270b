"""Files of ranks on machines that do not see the folder of the run, without ranks. See tests/cluster for machines."""

from pathlib import Path

import pytest

from agent_r1.core.errors import AgentR1Error
from agent_r1.trainer import rank_files
from agent_r1.trainer.rank_files import OwnFiles, fetch_file, send_files


@pytest.mark.parametrize("size", [0, 1, 10, 25])
def test_files_arrive_in_pieces_on_both_ways(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "CHUNK", 10)
    content = bytes(range(size))
    (tmp_path / "sent").write_bytes(content)
    rank, pieces = OwnFiles(), []

    def write(path: Path, start: int, piece: bytes) -> None:
        pieces.append(piece)
        rank.write(path, start, piece)

    rank.write(Path("sent"), 0, b"of a send that failed, and longer than the file")
    send_files(write, [tmp_path / "sent"])
    assert (rank.folder() / "sent").read_bytes() == content
    assert [len(piece) for piece in pieces if piece] == [10] * (size // 10) + [size % 10] * bool(size % 10)
    (tmp_path / "back").mkdir()
    fetch_file(rank.read, tmp_path / "back" / "sent")
    assert (tmp_path / "back" / "sent").read_bytes() == content
    folder = rank.folder()
    rank.drop()
    assert not folder.exists()


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(AgentR1Error, match="missing/part could not be written"):
        fetch_file(lambda name, start: b"content", tmp_path / "missing" / "part")
