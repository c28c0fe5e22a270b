"""Examples are imitated with their weight, and change nothing else: no baseline, no metric, no count of attempts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from updating import make_updater, update

from agent_r1.core.inference import NO_POLICY, PolicyVersionSpan
from agent_r1.core.trajectory import Group
from agent_r1.trainer import forward_backward as passes
from agent_r1.trainer.protocol import PassStats
from agent_r1.trainer.updater import PolicyUpdater

COEFFICIENT = 0.7
IDS = ([1, 2], [3, 4, 5])  # prompt, action


def with_examples(make: Any, groups: Sequence[Group], count: int) -> list[Group]:
    turn = replace(make.turn(0, *IDS, logprobs=[0.0] * 3), version_spans=(PolicyVersionSpan(0, NO_POLICY),))
    members = [make.trajectory((turn,), {"score": 1.0}, group=group.group_id, member=90) for group in groups[:count]]
    return [replace(group, example=one) for group, one in zip(groups, members, strict=False)] + list(groups[count:])


def gradients_of(model: Any, updater: PolicyUpdater, groups: Sequence[Group]) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the gradients of the optimizer step of an update, and the report."""
    found: dict[str, torch.Tensor] = {}
    trainer = updater._trainer
    optim_step = trainer.optim_step

    def keep(*arguments: Any) -> Any:
        found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return optim_step(*arguments)

    trainer.optim_step = keep  # type: ignore[method-assign]
    report = update(updater, groups)
    trainer.optim_step = optim_step  # type: ignore[method-assign]
    return found, report


def imitation_gradient(model: Any, share: float) -> dict[str, torch.Tensor]:
    """Return the gradient of COEFFICIENT * share * mean of -log pi over the action, computed here."""
    prompt, action = IDS
    logits = model(torch.tensor([prompt + action])).logits[0, len(prompt) - 1 : -1].float()
    loss = COEFFICIENT * share * torch.nn.functional.cross_entropy(logits, torch.tensor(action))
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "reinforce++", "gspo"])
def test_the_gradient_is_that_of_the_groups_plus_that_of_the_examples(algorithm: str, make: Any) -> None:
    groups = make.random_groups(0)
    plain = make.model()
    alone, before = gradients_of(plain, make_updater(plain, algorithm), groups)
    expected = imitation_gradient(make.model(), 1 / len(groups))
    model = make.model()
    updater = make_updater(model, algorithm, example_coef=COEFFICIENT)
    both, report = gradients_of(model, updater, with_examples(make, groups, 1))
    for name, gradient in expected.items():
        assert torch.allclose(both[name], alone[name] + gradient, atol=2e-6), name
    assert any(not torch.allclose(both[name], alone[name], atol=1e-4) for name in expected), "control"
    own = {"examples", "example_loss", "policy_gradient_norm"}
    assert {k: v for k, v in report.metrics.items() if k not in own} == pytest.approx(
        {k: v for k, v in before.metrics.items() if k not in own}, rel=1e-6, nan_ok=True
    )
    assert report.metrics["examples"] == 1
    assert report.outcomes == before.outcomes, "an example is no attempt"


def test_a_step_of_dead_groups_learns_from_its_examples_alone(make: Any) -> None:
    turns = make.chain(([1], [2]))
    dead = make.groups(*(make.trajectory(turns, {"score": 0.0}, member=member) for member in range(2)))
    for algorithm in ("grpo", "dapo"):  # keeps groups without variance, or drops them
        model = make.model()
        expected = imitation_gradient(model, 1.0)
        updater = make_updater(model, algorithm, example_coef=COEFFICIENT)
        found, report = gradients_of(model, updater, with_examples(make, dead, 1))
        assert report.version.number == 1 and report.metrics["example_loss"] > 0
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, atol=2e-6), name
    model = make.model()
    assert update(make_updater(model, "grpo"), with_examples(make, dead, 1)).version.number == 0, "off by default"


def test_examples_are_imitated_once_if_memory_runs_out_in_the_pass_after_them(make: Any) -> None:
    one_pass = passes._micro_batch_pass

    def norm(limit: int) -> tuple[float, float]:
        def limited_pass(*arguments: Any) -> PassStats:
            stats = one_pass(*arguments)
            if stats.num_padded_tokens > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return stats

        updater = make_updater(make.model(), "grpo", micro_tokens=100, example_coef=COEFFICIENT)
        with patch.object(passes, "_micro_batch_pass", limited_pass):
            metrics = update(updater, with_examples(make, make.random_groups(0), 1)).metrics
        return metrics["policy_gradient_norm"], metrics["example_loss"]

    assert norm(30) == pytest.approx(norm(1000), rel=1e-4)  # in halved passes, and in whole ones
