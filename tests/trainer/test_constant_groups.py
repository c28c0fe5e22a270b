"""Groups whose attempts all have the same return count in the denominators of the loss, and cost no pass."""

from __future__ import annotations

from typing import Any

import pytest
from updating import make_updater, update

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.trajectory import Group
from agent_r1.data.batch import Excluded
from agent_r1.model.weights import weights_checksum
from agent_r1.trainer.updater import PolicyUpdater, UpdateReport


def two_groups(make: Any, second: tuple[float, float]) -> list[Group]:
    """Return a group with the returns 1 and 0, and one with other returns; all attempts have three tokens."""
    turns = make.chain(([1], [2, 3]), ([4], [5]))
    scores = ((1.0, 0.0), second)
    return make.groups(
        *(
            make.trajectory(turns, {"score": score}, group=group, member=member)
            for group, pair in enumerate(scores)
            for member, score in enumerate(pair)
        )
    )


def updater_of(model: Any, name: str, **settings: object) -> PolicyUpdater:
    return make_updater(model, build_algorithm(name, settings), learning_rate=1e-3)


def gradient_norm(report: UpdateReport) -> float:
    return report.metrics["policy_gradient_norm"]


@pytest.mark.parametrize("aggregation", ["token_mean", "group_mean", "constant"])
def test_a_constant_group_halves_the_gradient_unless_it_is_dropped(aggregation: str, make: Any) -> None:
    settings: dict[str, object] = {"aggregation": aggregation} | ({"length": 9} if aggregation == "constant" else {})
    varied = two_groups(make, (1.0, 1.0))[:1]
    alone = gradient_norm(update(updater_of(make.model(), "grpo", **settings), varied))
    kept = update(updater_of(make.model(), "grpo", **settings), two_groups(make, (1.0, 1.0)))
    dropped = update(updater_of(make.model(), "grpo", **settings, constant_groups="drop"), two_groups(make, (1.0, 1.0)))
    assert gradient_norm(kept) == pytest.approx(alone / 2, rel=1e-5)
    assert gradient_norm(dropped) == pytest.approx(alone, rel=1e-5)


def test_a_constant_group_costs_no_pass_if_nothing_but_its_advantage_would_be_trained(make: Any) -> None:
    groups = two_groups(make, (1.0, 1.0))
    tokens = update(updater_of(make.model(), "grpo"), groups[:1]).metrics["model_tokens"]
    assert update(updater_of(make.model(), "grpo"), groups).metrics["model_tokens"] == tokens
    for term in ({"kl.coefficient": 0.1}, {"entropy_coef": 0.1}, {"sft_coef": 0.1}):
        assert update(updater_of(make.model(), "grpo", **term), groups).metrics["model_tokens"] == 2 * tokens, term


def test_minibatches_are_made_of_attempts_with_a_gradient(make: Any) -> None:
    # four attempts of six have an advantage: no optimizer step is without one
    turns = make.chain(([1], [2, 3]))
    scores = ((1.0, 0.0, 1.0, 0.0), (1.0, 1.0))
    groups = make.groups(
        *(
            make.trajectory(turns, {"score": score}, group=group, member=member)
            for group, members in enumerate(scores)
            for member, score in enumerate(members)
        )
    )
    expected = update(make_updater(make.model(), "grpo", learning_rate=1e-12), groups)
    for minibatches in (2, 8):
        report = update(make_updater(make.model(), "grpo", learning_rate=1e-12, minibatches=minibatches), groups)
        # the losses of the minibatches average to the loss of the batch, at unchanged weights
        assert report.metrics["policy_loss"] == pytest.approx(expected.metrics["policy_loss"], abs=1e-6)
        assert sum(not isinstance(one, Excluded) for one in report.outcomes) == 4


@pytest.mark.parametrize("term", [{"kl.coefficient": 0.1}, {"loss": "ipo", "epochs": 2}])
def test_a_batch_without_any_advantage_is_trained_on_if_another_term_has_a_gradient(
    term: dict[str, object], make: Any
) -> None:
    model = make.model()
    updater = updater_of(model, "grpo", **term)
    update(updater, two_groups(make, (1.0, 0.0)))  # moves the policy away from its reference
    before = weights_checksum(model)
    constant = two_groups(make, (1.0, 1.0))[1:]
    report = update(updater, constant)
    assert weights_checksum(model) != before and gradient_norm(report) > 0
    assert not any(isinstance(one, Excluded) for one in report.outcomes)
    plain = updater_of(model, "grpo")
    before = weights_checksum(model)
    update(plain, constant)
    assert weights_checksum(model) == before  # control: without the term nothing is trained
