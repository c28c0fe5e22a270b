"""Say where the benchmarks' own files are. They are not a part of this repository."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared" / "data"
ABSENT = f"the files of the benchmarks and the chat templates of models are not in {SHARED}"

real_data = pytest.mark.skipif(not SHARED.is_dir(), reason=ABSENT)
