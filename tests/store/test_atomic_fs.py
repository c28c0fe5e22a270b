"""After a failed write the old file is there, complete; otherwise the new one."""

import pytest

from agent_r1.core import files as disk


def test_a_file_replaces_an_existing_one(tmp_path):
    path = tmp_path / "new" / "file.json"
    disk.atomic_write(path, b"one")
    disk.atomic_write(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    disk.atomic_write(path, b"one")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        disk.atomic_write(path, b"two")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
