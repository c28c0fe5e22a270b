"""Blackjack as TextArena plays it, one hand per episode; docs/adapters.md says what an agent learns here.

agent-r1 train examples/blackjack.py --model FOLDER
"""

from agent_r1.env.adapters import TextArena, episode_return

game = TextArena("Blackjack-v0", {"num_hands": 1})
env, tasks, rewards = game.env, game.tasks(train=1000, test=500), [episode_return]
