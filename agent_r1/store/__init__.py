"""The run on disk: what was dispatched, lived, rewarded, trained on and measured, and how to read it back."""

from agent_r1.store.folder import create_run, default_run_name, is_run, reopen_run, run_folder
from agent_r1.store.ledger import Ledger, LedgerError
from agent_r1.store.reader import RunReader

__all__ = ["Ledger", "LedgerError", "RunReader", "create_run", "default_run_name", "is_run", "reopen_run", "run_folder"]
