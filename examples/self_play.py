"""Self-play of a two-player game in plain async Python. Each player of a match has its own trajectory and return.

python -m examples.self_play 25        the number of steps
"""

import asyncio
import copy
import random
import sys
import tempfile
from pathlib import Path

import torch

from agent_r1 import AttemptId, Group, Message, RolloutContext, Task
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.inference import SamplingParams
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, play_game
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater
from research.tiny_base.for_env import make_tiny_base

TASKS = [Task(f"nim/{pile}", (), {"pile": pile}) for pile in (4, 5, 7)]  # the first player can always win


async def nim(players, task, rng):
    """Two players take turns to take 1 or 2 from a pile. Taking the last one wins; taking too many loses."""
    pile, turn = task.data["pile"], 0
    while pile > 0:
        answer = await players[turn].ask(f"pile {pile}")
        pile, turn = pile - (int(answer) if answer in ("1", "2") else 100), 1 - turn
    winner = 1 - turn if pile == 0 else turn
    return [float(player.number == winner) for player in players]


def random_player(folder):
    """Make a model that takes 1 or 2 at random."""
    coin = random.Random(0)
    games = [(Message.user(f"pile {coin.randint(1, 7)}"), Message.assistant(coin.choice("12"))) for _ in range(200)]
    make_tiny_base(games, "1234567", folder, seed=0, steps=60)
    return load_model(str(folder), torch.float32), TemplateRenderer(load_tokenizer(str(folder)))


async def matches(agent, step, size=16):
    """Play each task ``size`` times and yield two groups per task: the attempts of the first and the second player."""
    for index, task in enumerate(TASKS):
        group_id = 2 * (len(TASKS) * step + index)
        pairs = [[AttemptId("self-play", task.id, group_id + player, n) for player in (0, 1)] for n in range(size)]
        contexts = [[RolloutContext(id, id.seed(agent.seed)) for id in pair] for pair in pairs]
        results = await asyncio.gather(*(play_game(nim, (agent, agent), task, pair, pair[0].seed) for pair in contexts))
        for player in (0, 1):
            yield Group(group_id + player, task, tuple(trajectories[player] for trajectories in results))


async def main(steps):
    """Train on both players' trajectories and print how often the first player won."""
    with tempfile.TemporaryDirectory() as folder:
        model, renderer = random_player(Path(folder))
    engine = TorchEngine(copy.deepcopy(model), context=128)
    agent = Agent(engine, renderer, SamplingParams(temperature=1.0, max_tokens=4), context_length=128)
    grpo, settings = build_algorithm("grpo", {}), TrainerConfig(learning_rate=3e-3)
    trainer = SingleProcessTrainer(model, grpo, settings, temperature=1.0)
    updater = PolicyUpdater(trainer, grpo, settings, reward_weights={}, seed=0, steps=steps)
    for step in range(steps):
        groups = [group async for group in matches(agent, step)]
        await updater.update([updater.select(group) for group in groups])
        await engine.update_weights(updater.publish())
        won = [trajectory.rewards["return"] for group in groups[::2] for trajectory in group.trajectories]
        print(f"step {step + 1}: the first player won {sum(won) / len(won):.2f}")
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 25))
