"""Context policies with a real model: the recorded tokens are those that the policy saw, sampled and is trained on."""

import asyncio
import copy
from dataclasses import dataclass, replace

import pytest
import torch
from golden_base import GOLDEN_BASE
from tests_tokenizer import TEMPLATE
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from updating import make_updater, update

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.config import Layer, resolve
from agent_r1.core.environment import Transition
from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.data.batch import assemble_batch, select_trainable
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import RolloutLimits
from agent_r1.rollout.context_policy import ContextPolicyConfig, build_context_policy
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.trainer.forward_backward import ModelSet
from agent_r1.trainer.updater import Trained
from agent_r1.training.config import TrainConfig
from agent_r1.training.evaluate import Method, attempts
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train

TEMPERATURE = 0.7
POLICIES = {
    "window": {"name": "window", "keep_turns": 1},
    "truncate": {"name": "truncate", "keep_turns": 1, "max_characters": 5},
    "summary": {"name": "summary", "keep_turns": 1},
    "evidence": {"name": "evidence", "keep_turns": 1, "max_lines": 1},
}


@pytest.fixture(scope="module")
def taskset():
    return replace(build("tinywiki", None, None, 0), baselines={}, evaluation=("style-a",))


def config_of(taskset, **changes):
    small = {"steps": 2, "groups_per_step": 2, "group_size": 4, "evaluate_n": 4, "seed": 5, "pass_k": 0}
    return resolve(TrainConfig, [Layer("test", {**small, **changes}), Layer("recipe", taskset.recipe)])


class Talking:
    """An environment that answers any action, five times."""

    tools = ()

    async def open(self, task, context):
        return Talk(task.messages)


@dataclass
class Talk:
    start: tuple
    step_count: int = 0

    async def step(self, action):
        self.step_count += 1
        if self.step_count == 5:
            return Transition((), end="terminal")
        return Transition(
            (Message.user(f"Page {self.step_count}: {len(action.text)} letters, and many more.\nIt rains."),)
        )

    async def close(self):
        return None


class Letters:
    """Gives different rewards, so that there is a training signal."""

    async def score(self, group, task):
        return tuple({"letters": float(sum(map(ord, t.last_text)))} for t in group)


def ascii_tokenizer():
    """One token per character, so that sampled text is tokenized to the sampled tokens again."""
    letters = ["\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(ascii_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def groups_by_policy(model):
    made = {}
    tasks = [Task(name, (Message.user(f"Tell me of {name}, who counts pages and rain."),)) for name in ("Alba", "Bru")]

    def of(name):
        if name not in made:
            engine = TorchEngine(copy.deepcopy(model), 1000)
            rule = build_context_policy(ContextPolicyConfig(**POLICIES[name]))
            agent = Agent(
                engine, TemplateRenderer(ascii_tokenizer()), SamplingParams(TEMPERATURE, max_tokens=12), 1000, 3, rule
            )
            made[name] = asyncio.run(
                attempts(Method("test", agent, Talking()), (Letters(),), tasks, 3, RolloutLimits())
            )
        return made[name]

    return of


def forked(groups):
    return [t for group in groups for t in group.trajectories if any(turn.parent is None for turn in t.turns[1:])]


@torch.no_grad()
def gap(model, trajectories):
    """Return the largest difference between recorded log-probabilities and those of a pass over the exact prompt."""
    largest = 0.0
    for trajectory in trajectories:
        for turn in trajectory.turns:
            prompt = trajectory.prompt_ids(turn)
            logits = model(torch.tensor([prompt + turn.action_ids])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            fresh = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(turn.action_ids)[:, None])[:, 0]
            largest = max(largest, float((fresh - torch.tensor(turn.logprobs)).abs().max()))
    return largest


@pytest.mark.parametrize("name", POLICIES)
def test_recorded_logprobs_belong_to_the_context_that_the_policy_saw(model, groups_by_policy, name):
    groups = groups_by_policy(name)
    assert forked(groups) and gap(model, forked(groups)) < 1e-5


@pytest.mark.parametrize("name", POLICIES)
def test_control_a_rewritten_context_taken_as_a_continuation_is_detected(model, groups_by_policy, name):
    groups = groups_by_policy(name)
    appended = [replace(t, turns=tuple(as_continuation(turn) for turn in t.turns)) for t in forked(groups)]
    assert gap(model, appended) > 1e-3


def as_continuation(turn):
    return replace(turn, parent=turn.index - 1) if turn.index and turn.parent is None else turn


@pytest.mark.parametrize("name", POLICIES)
def test_every_action_token_is_trained_once_in_its_own_context(model, groups_by_policy, name):
    groups = groups_by_policy(name)
    batch = assemble_batch(select_trainable(groups, {}).samples, pack_prefix_tree)
    actions = sum(len(turn.action_ids) for group in groups for t in group.trajectories for turn in t.turns)
    assert len(batch.ids) == actions and trained_once(batch)
    said = ModelSet(model, TEMPERATURE, 4096).logprobs(batch)
    assert float((said - batch.sampler_logprobs).abs().max()) < 1e-5


def trained_once(batch):
    """Whether each token of the batch is predicted at one place, which is followed by that very token."""
    places = torch.cat([sequence.tokens for sequence in batch.sequences])
    for sequence in batch.sequences:
        assert torch.equal(sequence.ids[sequence.logit_positions + 1], batch.ids[sequence.tokens])
    return torch.equal(places.sort().values, torch.arange(len(batch.ids)))


def test_summaries_are_trained_but_do_not_count_as_answers(groups_by_policy):
    groups = groups_by_policy("summary")
    summed = [t for t in forked(groups) if any(turn.kind == "summary" for turn in t.turns)]
    assert summed
    for trajectory in summed:
        kinds = [turn.kind for turn in trajectory.turns]
        after = kinds.index("summary") + 1
        assert trajectory.turns[after - 1].parent == after - 2 and trajectory.turns[after - 1].action_ids
        assert after == len(kinds) or trajectory.turns[after].parent is None
        assert len(trajectory.env_turns) == kinds.count("act")


@pytest.mark.parametrize("name", ["ppo", "gigpo"])
def test_an_update_accepts_trajectories_with_branches(model, groups_by_policy, name):
    report = update(make_updater(copy.deepcopy(model), name, temperature=TEMPERATURE), groups_by_policy("summary"))
    assert report.metrics["logprob_gap"] < 1e-5
    assert all(isinstance(outcome, Trained) for outcome in report.outcomes)


def test_the_outcome_reward_reaches_every_branch_and_summary(groups_by_policy):
    batch = assemble_batch(select_trainable(groups_by_policy("summary"), {}).samples, pack_prefix_tree)
    advantage = build_algorithm("grpo", {}).compute_token_weights(batch, ModelOutputs()).advantage
    turns = [turn for group in groups_by_policy("summary") for t in group.trajectories for turn in t.turns]
    for number, turn in enumerate(turns):
        last = batch.last_tokens[batch.turn_trajectory[number]]
        assert (advantage[batch.token_turn == number] == advantage[last]).all()
        assert turn.kind == "act" or advantage[last] != 0


@pytest.mark.parametrize("name", ["window", "summary"])
def test_a_run_with_a_context_policy_trains_and_is_recorded(taskset, tmp_path, name):
    chosen = {"model": GOLDEN_BASE, "context_policy": POLICIES[name], "temperature": 1.0}
    config = config_of(taskset, run=str(tmp_path / "run"), **chosen)
    train(config, taskset, SilentProgress())
    reader = RunReader(tmp_path / "run")
    turns = [turn for t in reader.trajectories() for turn in t.turns]
    reader.close()
    # asked to sum up, this model calls the tool: nothing is said, so nothing is forgotten
    assert any(turn.index and turn.parent is None for turn in turns) == (name == "window")
    assert ("summary" in {turn.kind for turn in turns}) == (name == "summary")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"context_policy": {"name": "windw"}}, r"context_policy.name \(test\): got 'windw'"),
        (
            {"context_policy": {"name": "window", "max_characters": 9}},
            r"context_policy \(test\): got .*context_policy.max_characters has no effect with the policy window",
        ),
        ({"context_policy": {"keep_turns": 9}}, "context_policy.keep_turns has no effect with the policy append"),
        ({"context_policy": {"name": "window"}, "algorithm": "echo"}, "use --context_policy.name append"),
        ({"tool_format": "glm"}, "cannot be read back as glm calls; give --tool_format tags"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(taskset, tmp_path, changes, error):
    with pytest.raises(InvalidInput, match=error) as refused:
        train(config_of(taskset, run=str(tmp_path / "run"), **changes), taskset, SilentProgress())
    assert "\n" not in str(refused.value) and list(tmp_path.iterdir()) == []
