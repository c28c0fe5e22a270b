"""A file is the old one or the new one, whole."""

import pytest

from agent_r1.store import atomic_fs as disk


def test_a_file_is_written_whole_over_what_was_there(tmp_path):
    path = tmp_path / "new" / "file.json"
    disk.write_whole(path, b"one")
    disk.write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    disk.write_whole(path, b"one")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        disk.write_whole(path, b"two")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
