"""An optional package that is missing, or lacks a package that it needs, is one line with the extra to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.core.errors import InvalidInput, import_extra


@pytest.mark.parametrize(
    ("name", "got"),
    [("no_such_package", "an environment without it"), ("partly_installed.server", "an environment without absent")],
)
def test_what_is_not_installed_is_named_with_its_extra(
    name: str, got: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "partly_installed").mkdir()
    (tmp_path / "partly_installed" / "__init__.py").touch()
    (tmp_path / "partly_installed" / "server.py").write_text("import absent.part\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput) as caught:
        import_extra(name, "openenv")
    assert str(caught.value) == f"extra openenv: got {got}; pip install 'agent-r1[openenv]'"
