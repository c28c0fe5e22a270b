from taskset_fixtures import call, rows_file, run_attempts, sandbox

__all__ = ["call", "rows_file", "run_attempts", "sandbox"]
