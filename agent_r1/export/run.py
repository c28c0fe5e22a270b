"""Export a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.export.attempts import read_attempts
from agent_r1.export.card import dataset_card, model_card
from agent_r1.export.config import FILTERS, ExportConfig, ExportFormat
from agent_r1.export.folder import new_export, write_marker
from agent_r1.export.hub import check_repository, push
from agent_r1.export.metrics import write_metrics
from agent_r1.export.model import find_weights, write_adapter, write_model
from agent_r1.export.trajectories import OPENAI_COLUMNS, write_openai, write_parquet
from agent_r1.store import RunReader


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export.

    Attributes:
        facts: for a model, the training step of its weights. For trajectories or metrics, how many conversations or
            training steps were written, and the settings that selected them.
        bytes: the total size of the files.
        pushed: the URL of the commit on the hub; None if nothing was uploaded.
    """

    format: ExportFormat
    out: Path
    facts: Mapping[str, Any]
    bytes: int
    pushed: str | None = None


def export_run(
    run: Path, out: Path, config: ExportConfig, *, force: bool = False, public: bool = False
) -> ExportReport:
    """Export a run to the folder ``out``. The folder appears complete or not at all.

    With ``force``, an earlier export in ``out`` is replaced. If ``config.push`` names a repository on the hub, the
    folder is also uploaded to the repository. If the upload creates the repository, the repository is public if
    ``public`` is true, and private otherwise.

    Raises:
        InvalidInput: ``out`` exists and may not be replaced, a setting has no effect with the format, or the run does
            not have the selected weights or trajectories.
        AgentR1Error: the folder cannot be written, or the complete folder cannot be uploaded.
    """
    config.check_used()
    if config.push:
        check_repository(config.push)
    name = config.push or str(out)
    with closing(RunReader(run)) as reader, new_export(out, force) as folder:
        is_model = config.format in ("model", "adapter")
        facts = (
            _write_model(folder, name, run, reader, config)
            if is_model
            else _write_data(folder, name, run, reader, config)
        )
        write_marker(folder, run=run.name, format=config.format, **facts, agent_r1=version("agent-r1"))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    pushed = push(out, config.push, "model" if is_model else "dataset", public) if config.push else None
    return ExportReport(config.format, out, facts, size, pushed)


def _write_model(folder: Path, name: str, run: Path, reader: RunReader, config: ExportConfig) -> dict[str, Any]:
    weights = find_weights(run, reader, config.checkpoint)
    is_adapter = config.format == "adapter"
    (write_adapter if is_adapter else write_model)(folder, weights)
    card = model_card(name, run, reader, weights, is_adapter)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return {"step": weights.step, "best": weights.is_best}


def _write_data(folder: Path, name: str, run: Path, reader: RunReader, config: ExportConfig) -> dict[str, Any]:
    given = {
        key: value for key, value in config.model_dump(mode="json", include=set(FILTERS)).items() if value is not None
    }
    match config.format:
        case "metrics":
            facts: dict[str, Any] = {"steps": write_metrics(folder, reader)}
            columns: Sequence[Mapping[str, Any]] = ()
        case "openai":
            facts, columns = {"conversations": write_openai(folder, read_attempts(reader, config))}, OPENAI_COLUMNS
        case _:
            facts, columns = {"conversations": write_parquet(folder, read_attempts(reader, config))}, ()
    if not any(facts.values()):
        got = f"{run}, of which nothing matches" + "".join(f" --{key} {value}" for key, value in given.items())
        raise InvalidInput("run", got=got, do="leave a filter out, or let the run train first")
    card = dataset_card(name, run, reader, config.format, {**facts, **given}, columns)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return {**facts, **given}
