"""The metrics that docs/reading_a_run.md explains."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PAGE = (ROOT / "docs/reading_a_run.md").read_text().partition("\n## Metrics\n")[2]
_CELLS = [line.split("|")[1] for line in _PAGE.splitlines() if line.startswith("| `")]

DOCUMENTED = {name for cell in _CELLS for name in re.findall(r"`(.+?)`", cell)}
"""The names in the first column of the tables. The mean of a reward is ``reward/NAME``."""
