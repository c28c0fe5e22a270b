"""Upload an export to the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from agent_r1.core.errors import AgentR1Error, InvalidInput, shorten
from agent_r1.core.redaction import REDACTED, redact

RepositoryType = Literal["model", "dataset"]


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


def push(folder: Path, name: str, kind: RepositoryType, public: bool) -> str:
    """Upload a folder to the repository ``name`` (OWNER/NAME) on the hub, and return the URL of the commit.

    If there is no such repository, a repository is created: a public repository if the argument ``public`` is True,
    otherwise a private repository. The token is ``HF_TOKEN``, or the token that ``hf auth login`` stored. Raise
    AgentR1Error if the upload fails. The message never contains the token.
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
