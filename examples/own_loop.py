"""The whole of reinforcement learning for an agent, in one file: nothing is hidden behind a trainer.

    python examples/own_loop.py --steps 5

Reads as the picture in the documentation: Task -> Episode <-> Agent(Engine) -> Trajectory -> Group ->
Credit -> loss -> Weights -> Engine. ``agent-r1 train`` is this loop with a record, checkpoints and a table.
"""

import argparse
import asyncio
import copy

import torch

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.inference import SamplingParams
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import Collector, RolloutLimits, GroupRequest
from agent_r1.rollout.staleness import StalenessController
from agent_r1.tasksets import build
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.learner import Learner
from agent_r1.training.null_recorder import NullRecorder

GROUPS, SIZE = 16, 16


async def main(steps: int) -> float:
    """Train tiny-base on TinyWiki; returns the share of right answers in the last step's attempts."""
    torch.manual_seed(0)
    taskset = build("tinywiki", None, None, seed=0)
    model = load_model(str(TINY_BASE_FOLDER), torch.float32)
    renderer = TemplateRenderer(load_tokenizer(str(TINY_BASE_FOLDER)))

    engine = TorchEngine(copy.deepcopy(model), context=512)  # samples tokens, with its own copy of the weights
    agent = Agent(engine, renderer, SamplingParams(temperature=1.0, max_tokens=48), context=512)
    learner = Learner(  # turns groups of trajectories into new weights
        model,
        build_algorithm("grpo", {}),
        TrainerConfig(learning_rate=1e-3),
        temperature=1.0,
        reward_weights={"em": 1.0, "f1": 0.0, "found": 0.0},  # em is the reward, the others are measured
        seed=0,
    )

    staleness = StalenessController(steps, GROUPS, max_staleness=0)  # 0: every group is sampled with the newest weights
    collector = Collector(AgentLoop(agent, taskset.env), taskset.scorers, NullRecorder(), "own loop", RolloutLimits())
    tasks = taskset.tasks("train")[: steps * GROUPS]
    orders = (GroupRequest(serial, task, SIZE) for serial, task in enumerate(tasks))

    batch = []
    em = 0.0
    async for group in collector.collect(orders, staleness.acquire):
        batch.append(group)
        if len(batch) < GROUPS:
            continue
        update = await asyncio.to_thread(learner.update, batch)
        await engine.update_weights(learner.publish())
        await staleness.on_step_end(update.version)
        rewards = [trajectory.rewards["em"] for group in batch for trajectory in group.trajectories]
        em = sum(rewards) / len(rewards)
        print(f"step {update.step}: EM {em:.3f}")
        batch = []
    await engine.close()
    return em


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    asyncio.run(main(parser.parse_args().steps))
