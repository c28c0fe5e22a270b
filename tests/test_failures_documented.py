"""docs/reliability.md says of failures what the code does."""

import re
from pathlib import Path

import pytest

from agent_r1.core.trajectory import STATUS_POLICY, Status
from agent_r1.training.monitor.config import MonitorConfig

TEXT = (Path(__file__).parents[1] / "docs" / "reliability.md").read_text()


@pytest.mark.parametrize("status", Status)
def test_the_treatment_of_each_status_is_documented(status: Status) -> None:
    assert f"| `{status}` | {STATUS_POLICY[status]} | " in TEXT


def test_the_options_of_the_health_monitor_are_documented_with_their_defaults_and_no_others_are() -> None:
    documented = dict(re.findall(r"^\| `--monitor\.(\w+)` \| ([\d.]+)(?:; .*)? \|$", TEXT, re.MULTILINE))
    config = MonitorConfig()
    in_float32 = {
        "ratio_deviation": config.ratio_limit("float32"),
        "logprob_gap": config.gap_limit("float32", "float32"),
    }
    numbers = {name: value for name, value in config.model_dump().items() if name != "true_reward"}  # it is a name
    assert {name: float(value) for name, value in documented.items()} == {**numbers, **in_float32}
