"""Reinforcement learning of an agent in one file: sampling, advantages, loss and optimizer step, without a trainer.

    python examples/own_loop.py --steps 5

The algorithm is GRPO (2402.03300) with one optimizer step per batch. ``agent-r1 train`` runs the same loop and adds
other algorithms, a record of the run, checkpoints and evaluation.
"""

import argparse
import asyncio
import copy

import torch
from torch.nn.utils.rnn import pad_sequence

from agent_r1.core.inference import PolicyVersion, SamplingParams, WeightUpdate
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits, StalenessController
from agent_r1.tasksets import build
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER

GROUPS, SIZE = 16, 16  # tasks per step, attempts per task
CLIP = 0.2


def group_advantages(groups):
    """Return the advantage of each attempt, (groups, attempts): its reward relative to its group."""
    rewards = torch.tensor([[trajectory.rewards["em"] for trajectory in group.trajectories] for group in groups])
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-6)


def policy_loss(model, samples):
    """Return the sum of the clipped losses (PPO, 1707.06347) over the action tokens of B (prompt, turn, advantage)."""

    def padded(rows):  # B lists of up to T numbers -> (B, T)
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    ids = padded([[*prompt, *turn.action_ids] for prompt, turn, _ in samples])
    action_mask = padded([[0.0] * len(prompt) + [1.0] * len(turn.action_ids) for prompt, turn, _ in samples])
    old_logprobs = padded([[0.0] * len(prompt) + [*turn.logprobs] for prompt, turn, _ in samples])
    advantage = torch.stack([advantage for *_, advantage in samples])[:, None]  # (B, 1)

    logits = model(ids).logits[:, :-1]  # (B, T-1, vocabulary): the logits at a token predict the next one
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)  # (B, T-1) log pi
    ratio = (logprobs - old_logprobs[:, 1:]).exp()  # pi / pi_old; pi_old is the policy that sampled the tokens
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return (loss * action_mask[:, 1:]).sum()  # observations and padding have no loss


def train_step(model, optimizer, groups):
    """Update the model on the groups: the loss is the mean over all action tokens."""
    advantages = group_advantages(groups)
    samples = [
        (trajectory.prompt_ids(turn), turn, advantage)
        for group, row in zip(groups, advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, row, strict=True)
        for turn in trajectory.turns
        if advantage != 0  # equal rewards in a group: no gradient
    ]
    samples.sort(key=lambda sample: len(sample[0]))  # similar lengths together: little padding
    tokens = sum(len(turn.action_ids) for _, turn, _ in samples)
    for first in range(0, len(samples), 64):  # micro-batches: their gradients add up
        (policy_loss(model, samples[first : first + 64]) / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


async def main(folder, steps):
    """Train the model in ``folder`` on TinyWiki and print the share of exact matches of each step."""
    torch.manual_seed(0)
    taskset = build("tinywiki", None, None, seed=0)
    model = load_model(folder, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    renderer = TemplateRenderer(load_tokenizer(folder))
    engine = TorchEngine(copy.deepcopy(model), context=512)  # samples with its own copy of the weights
    agent = Agent(engine, renderer, SamplingParams(temperature=1.0, max_tokens=48), context_length=512)
    staleness = StalenessController(steps, GROUPS, max_staleness=0)  # 0: each group is sampled by the newest weights
    collector = Collector(AgentLoop(agent, taskset.env), taskset.scorers, NullRecorder(), "own loop", RolloutLimits())
    tasks = taskset.tasks("train")[: steps * GROUPS]

    async def requests():
        for group_id, task in enumerate(tasks):
            yield GroupRequest(group_id, task, SIZE, await staleness.acquire(group_id))

    stream = collector.collect(requests())

    for step in range(1, steps + 1):
        groups = [await anext(stream) for _ in range(GROUPS)]
        train_step(model, optimizer, groups)
        await engine.update_weights(WeightUpdate(PolicyVersion(step, step), "shared_memory", model))
        await staleness.on_step_end(step)
        em = [trajectory.rewards["em"] for group in groups for trajectory in group.trajectories]
        print(f"step {step}: EM {sum(em) / len(em):.3f}")
    await stream.aclose()
    await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", default=str(TINY_BASE_FOLDER), help="a folder; by default tiny-base")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.model, arguments.steps))
