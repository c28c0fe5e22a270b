"""The model of the golden record: tiny-base as it was until November 2026.

The right strategy is the runner-up in its transcripts, so a few steps of training are enough to see that it learns.
"""

from pathlib import Path

GOLDEN_BASE = str(Path(__file__).parent / "golden" / "base")
