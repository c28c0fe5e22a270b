"""docs/reading_a_run.md explains no metric that does not exist. tests/training/test_resume.py has the reverse."""

from documented_metrics import DOCUMENTED, ROOT

COMPOSED = {"policy_gradient_norm", "critic_gradient_norm", "reward/NAME"}
"""Names that the code composes, such as f"{module}_gradient_norm"."""


def test_every_documented_metric_exists() -> None:
    rooms = ("algorithms", "inference", "trainer", "training", "core")
    files = [path for room in rooms for path in ROOT.glob(f"agent_r1/{room}/**/*.py")]
    source = "\n".join(path.read_text() for path in files)
    assert {name for name in DOCUMENTED - COMPOSED if f'"{name}"' not in source} == set()
    assert len(DOCUMENTED) > 50
