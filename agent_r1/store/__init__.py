"""A run on disk: its database, files and configuration."""

from agent_r1.store.attempt_list import AttemptFilter, AttemptSummary
from agent_r1.store.folder import create_run, default_run_name, is_run, reopen_run, run_folder
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import VerificationReport, verify
from agent_r1.store.writer import RunWriteError, RunWriter

__all__ = [
    "AttemptFilter",
    "AttemptSummary",
    "RunReader",
    "RunWriteError",
    "RunWriter",
    "VerificationReport",
    "create_run",
    "default_run_name",
    "is_run",
    "reopen_run",
    "run_folder",
    "verify",
]
