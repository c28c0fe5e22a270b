"""Export a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agent_r1.core.errors import AgentR1Error, InvalidInput, shorten
from agent_r1.core.files import atomic_dir, atomic_replace_dir
from agent_r1.core.redaction import REDACTED, redact
from agent_r1.export.cards import dataset_card, model_card
from agent_r1.export.config import FILTERS, ExportConfig, ExportFormat
from agent_r1.export.model import write_weights
from agent_r1.export.trajectories import OPENAI_COLUMNS, read_attempts, write_metrics, write_openai, write_parquet
from agent_r1.store.folder import is_run
from agent_r1.store.reader import RunReader
from agent_r1.store.saved_weights import find_weights

MARKER = "export.json"
"""The file that describes an export. ``--force`` replaces a folder only if it has this file or is empty."""


@contextmanager
def new_export(out: Path, force: bool) -> Iterator[Path]:
    """Yield a temporary folder, and rename this folder to ``out`` at the end of the ``with`` block.

    If the block raises an error, ``out`` does not change. An existing ``out`` is replaced only with ``force``, and only
    if ``out`` is an earlier export or an empty folder.
    """
    exists = os.path.lexists(out)
    if exists and not force:
        raise InvalidInput("OUT", got=f"{out}, which exists", do="name a new folder, or give --force to replace it")
    is_folder = out.is_dir() and not out.is_symlink() and not is_run(out)
    if exists and not (is_folder and ((out / MARKER).is_file() or not any(out.iterdir()))):
        do = "name a new folder: --force replaces only earlier exports"
        raise InvalidInput("OUT", got=f"{out}, which is not an earlier export", do=do)
    try:
        with (atomic_replace_dir if exists else atomic_dir)(out) as temporary:
            yield temporary
    except (OSError, ValueError) as error:
        raise AgentR1Error(f"{out} could not be written: {error}") from error


def check_repository(name: str) -> None:
    """Raise InvalidInput if ``name`` is not a valid repository name, or if HF_HUB_OFFLINE is set."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InvalidInput("--push", got=repr(name), do=f"give OWNER/NAME ({shorten(error)})") from None
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise InvalidInput("--push", got=f"{name}, but HF_HUB_OFFLINE is set", do="unset it, or leave --push out")


def push(folder: Path, name: str, kind: str, public: bool) -> str:
    """Upload a folder to the repository ``name`` (OWNER/NAME) on the hub, and return the URL of the commit.

    A repository that does not exist is created. The token is ``HF_TOKEN``, or the token that ``hf auth login`` stored.
    Raise AgentR1Error, whose message never contains the token, if the upload fails.
    """
    from huggingface_hub import HfApi, get_token

    token = get_token()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token, library_name="agent-r1")
    try:
        repository = api.create_repo(name, repo_type=kind, private=not public, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository.repo_id,
            repo_type=kind,
            folder_path=str(folder),
            commit_message=f"Upload {folder.name} with agent-r1",
        )
    except Exception as error:  # httpx, huggingface_hub and hf_xet raise many types of errors
        text = redact(f"{type(error).__name__}: {error}".replace(token or "\0", REDACTED))
        do = "the folder is complete here; log in with 'hf auth login' or set HF_TOKEN, and repeat with --force"
        raise AgentR1Error(f"{name} could not be uploaded ({shorten(' '.join(text.split()))}); {do}") from None
    return str(commit.commit_url)


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export."""

    format: ExportFormat
    out: Path
    # for a model, the training step of its weights. For trajectories or metrics, how many conversations or training
    # steps were written, and the settings that selected them
    facts: Mapping[str, Any]
    bytes: int  # the total size of the files
    pushed: str | None = None  # the URL of the commit on the hub; None if nothing was uploaded


def export_run(
    run: Path, out: Path, config: ExportConfig, *, force: bool = False, public: bool = False
) -> ExportReport:
    """Export a run to the folder ``out``. The folder appears complete or not at all.

    With ``force``, an earlier export in ``out`` is replaced. If ``config.push`` names a repository on the hub, the
    folder is also uploaded to it; a repository that does not exist is created, as public if ``public`` is true.

    Raises:
        InvalidInput: ``out`` exists and may not be replaced, a setting has no effect with the format, or the run does
            not have the selected weights or trajectories.
        AgentR1Error: the folder cannot be written, or the complete folder cannot be uploaded.
    """
    config.check_used()
    if config.push:
        check_repository(config.push)
    name = config.push or str(out)
    is_model = config.format in ("model", "adapter")
    with closing(RunReader(run)) as reader, new_export(out, force) as folder:
        card, facts = (_write_model if is_model else _write_data)(folder, name, run, reader, config)
        (folder / "README.md").write_text(card, encoding="utf-8")
        marker = {"run": run.name, "format": config.format, **facts, "agent_r1": version("agent-r1")}
        (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    pushed = push(out, config.push, "model" if is_model else "dataset", public) if config.push else None
    return ExportReport(config.format, out, facts, size, pushed)


_Facts = dict[str, Any]


def _write_model(folder: Path, name: str, run: Path, reader: RunReader, config: ExportConfig) -> tuple[str, _Facts]:
    weights = find_weights(run, reader, config.checkpoint)
    is_adapter = config.format == "adapter"
    write_weights(folder, weights, is_adapter)
    return model_card(name, run, reader, weights, is_adapter), {"step": weights.step, "best": weights.is_best}


def _write_data(folder: Path, name: str, run: Path, reader: RunReader, config: ExportConfig) -> tuple[str, _Facts]:
    given = config.model_dump(mode="json", include=set(FILTERS), exclude_none=True)
    match config.format:
        case "metrics":
            facts = {"steps": write_metrics(folder, reader)}
        case "openai":
            facts = {"conversations": write_openai(folder, read_attempts(reader, config))}
        case _:
            facts = {"conversations": write_parquet(folder, read_attempts(reader, config))}
    if not any(facts.values()):
        got = f"{run}, of which nothing matches" + "".join(f" --{key} {value}" for key, value in given.items())
        raise InvalidInput("run", got=got, do="leave a filter out, or let the run train first")
    columns = OPENAI_COLUMNS if config.format == "openai" else ()
    return dataset_card(name, run, reader, config.format, {**facts, **given}, columns), {**facts, **given}
