"""The monitor warns once if the reward that is trained on rises while the true reward falls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpointing import make_model
from learning_fixtures import Make
from updating import make_updater

from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.data.training_sample import select_trainable
from agent_r1.rollout.scripted_agent import NullRecorder
from agent_r1.trainer.updater import SelectedGroup
from agent_r1.training.config import MonitorConfig, TrainConfig
from agent_r1.training.monitor import CORRELATION, PROXY, TRUE, HealthMonitor, check_reward_hacking, proxy_metrics
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train


def history(proxy: float, true: float, steps: int = 20, noise: float = 0.02) -> list[tuple[float, float]]:
    """Return means of steps in which the two rewards change by ``proxy`` and ``true`` in all, with noise."""
    shuffle = random.Random(0)
    return [
        (0.3 + proxy * step / steps + shuffle.gauss(0, noise), 0.5 + true * step / steps + shuffle.gauss(0, noise))
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    ("proxy", "true", "is_found"),
    [(0.5, -0.3, True), (0.5, 0.3, False), (-0.5, -0.3, False), (0.5, 0.0, False), (0.0, -0.3, False)],
)
def test_only_a_rise_with_a_fall_of_the_true_reward_is_found(proxy: float, true: float, is_found: bool) -> None:
    assert (check_reward_hacking(history(proxy, true), 5) is not None) == is_found


def test_noise_alone_is_rarely_found_and_short_runs_never() -> None:
    assert check_reward_hacking(history(5.0, -5.0, steps=9), 5) is None
    steps = [(random.Random(f"p{step}").random(), random.Random(f"t{step}").random()) for step in range(100)]
    assert sum(check_reward_hacking(steps[:end], 5) is not None for end in range(10, 100)) < 20


def test_a_true_reward_that_rose_first_and_fell_later_is_compared_with_its_best() -> None:
    rising, falling = history(0.3, 0.4), [(proxy + 0.5, true + 0.3) for proxy, true in history(0.3, -0.6)]
    found = check_reward_hacking([*rising, *falling], 5)
    assert found is not None and "true reward 0.8" in str(found)


def test_the_metrics_compare_the_weighted_return_with_the_true_reward() -> None:
    make = Make()
    attempts = [
        make.trajectory(make.chain(([1], [2])), {"style": style, "em": em}, member=member)
        for member, (style, em) in enumerate([(1.0, 0.0), (0.0, 1.0), (0.5, None), (0.5, 0.0)])
    ]
    group = make.groups(*attempts)[0]
    selected = SelectedGroup(group, select_trainable([group], {"style": 2.0, "em": 0.0}), True)
    metrics = proxy_metrics([selected], "em")
    assert metrics[PROXY] == pytest.approx(1.0) and metrics[TRUE] == pytest.approx(1 / 3)
    assert metrics[CORRELATION] == pytest.approx(-(3**0.5) / 2)
    assert proxy_metrics([selected], "unknown") == {}


def on_steps(monitor: HealthMonitor, steps: Sequence[tuple[float, float]]) -> list[int]:
    """Return the numbers of the steps in which the monitor warns."""
    return [number for number, (proxy, true) in enumerate(steps) if monitor.on_proxy({PROXY: proxy, TRUE: true})]


def make_monitor() -> HealthMonitor:
    config = TrainConfig(monitor=MonitorConfig(true_reward="em"))
    return HealthMonitor(config, make_updater(make_model()), NullRecorder(), Path("runs/x"))


def test_a_run_on_a_hackable_reward_gets_one_warning_also_if_it_is_resumed() -> None:
    steps, whole, stopped, resumed = history(0.5, -0.4, steps=40), make_monitor(), make_monitor(), make_monitor()
    (warned,) = on_steps(whole, steps)
    assert 9 <= warned < 39
    assert on_steps(stopped, steps[: warned - 1]) == []
    resumed.load_state(stopped.state())
    assert on_steps(resumed, steps[warned - 1 :]) == [1]
    assert make_monitor().on_proxy({}) == ()


def test_a_true_reward_that_does_not_exist_is_refused(micro: TaskSet, tmp_path: Path) -> None:
    layers = [Layer("test", {"monitor.true_reward": "emm", "run": str(tmp_path / "run")}), Layer("r", micro.recipe)]
    with pytest.raises(InvalidInput, match="did you mean 'em'"):
        train(resolve(TrainConfig, layers), micro, SilentProgress())
