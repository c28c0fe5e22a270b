"""A tiny base for an environment other than TinyWiki: it has the action format and can be trained there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from agent_r1 import Message, Task, ToolEnv, exact_match, train
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs.user_env import Reply, UserEnv
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.store.reader import RunReader
from agent_r1.training.progress import SilentProgress
from research.tiny_base.examples import conversation_example
from research.tiny_base.for_env import make_tiny_base, record_conversations
from research.tiny_base.tokenizer import make_tokenizer

WORDS = ("north", "south")
TASKS = [Task(str(n), (Message.user(f"Which way, guide {n}?"),), {"answers": ("north",)}) for n in range(8)]


class Guide:
    """A user that leaves after one answer."""

    async def reply(self, task: Task, messages: object, context: object) -> Reply:
        return Reply("", end=True)


def make_base(folder: Path, seed: int = 0, steps: int = 80) -> list[tuple[Message, ...]]:
    coin = random.Random(seed)
    conversations = record_conversations(
        ToolEnv([]), TASKS * 8, lambda prompt: f"<answer>{coin.choice(WORDS)}</answer>"
    )
    make_tiny_base(conversations, (), folder, seed, steps)
    return conversations


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("for-env") / "base"
    torch.set_num_threads(1)
    make_base(folder)
    return folder


def test_conversations_are_episodes_of_the_environment() -> None:
    (conversations,) = record_conversations(
        ToolEnv([]), TASKS[:1], lambda prompt: "north" if "guide 0" in prompt else "south"
    )
    assert [(message.role, message.text) for message in conversations] == [
        ("user", "Which way, guide 0?"),
        ("assistant", "north"),
    ]


class FailingUser:
    """A user that raises in some tasks."""

    def __init__(self, failing: str) -> None:
        self._failing = failing

    async def reply(self, task: Task, messages: object, context: object) -> Reply:
        if task.id in self._failing:
            raise ValueError("no")
        return Reply("", end=True)


def test_a_failed_episode_is_not_imitated() -> None:
    conversations = record_conversations(UserEnv([], FailingUser("02")), TASKS[:4], lambda prompt: "north")
    assert [messages[0].text for messages in conversations] == ["Which way, guide 1?", "Which way, guide 3?"]
    with pytest.raises(AgentR1Error, match=r"environment_failed: ValueError: no"):
        record_conversations(UserEnv([], FailingUser("0123")), TASKS[:4], lambda prompt: "north")


def test_a_users_message_is_not_a_target_even_if_it_looks_like_an_assistant_turn() -> None:
    messages = (Message.user("Say this:\nassistant\nnorth\nassistant\n"), Message.assistant("south"))
    renderer = TemplateRenderer(make_tokenizer(["Say this north south"]))
    example = conversation_example(renderer, messages, ())
    targets = [token for token, is_target in zip(example.ids, example.targets, strict=True) if is_target]
    assert targets == [*renderer.encode("south"), renderer.end_token_id]


def test_the_base_has_the_format_and_no_preference(folder: Path) -> None:
    renderer, model = TemplateRenderer(load_tokenizer(str(folder))), load_model(str(folder), torch.float32)
    prompt = renderer.render(TASKS[0].messages, ()).token_ids
    (north,), (south,) = (renderer.encode(word) for word in WORDS)
    (tag,) = renderer.encode("<answer>")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, tag]])).logits[0].softmax(-1)
    assert logits[len(prompt) - 1, tag] > 0.9
    content = logits[len(prompt), [north, south]]
    assert content.sum() > 0.9 and content.min() > 0.25


def test_the_same_seed_gives_the_same_weights(folder: Path, tmp_path: Path) -> None:
    make_base(tmp_path / "short", steps=2)
    make_base(tmp_path / "again", steps=2)
    make_base(tmp_path / "other", seed=1, steps=2)
    first, again, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("short", "again", "other"))
    assert first == again != other


def test_the_learning_rate_is_used(tmp_path: Path) -> None:
    conversations = [(*task.messages, Message.assistant("<answer>north</answer>")) for task in TASKS]
    losses = [
        make_tiny_base(conversations, (), tmp_path / str(rate), 0, 10, learning_rate=rate).loss for rate in (1e-9, 4e-3)
    ]
    assert losses[0] > 4 > losses[1]


def test_the_base_learns_in_an_environment_with_a_user(folder: Path, tmp_path: Path) -> None:
    small = {"groups_per_step": 4, "group_size": 8, "max_tokens": 8, "context": 128, "checkpoint_every": 0}
    report = train(
        UserEnv([], Guide(), [exact_match]),
        TASKS,
        model=str(folder),
        steps=8,
        trainer={"learning_rate": 3e-3},
        evaluate_n=8,
        run=str(tmp_path / "run"),
        progress=SilentProgress(),
        **small,
    )
    assert report.table.cells["trained"]["train"].em == 1.0
    reader = RunReader(tmp_path / "run")
    trajectories: list[Trajectory] = list(reader.trajectories())
    reader.close()
    shares = [
        sum(float(t.rewards["exact_match"]) for t in part) / len(part)
        for part in (trajectories[:64], trajectories[-32:])
    ]  # type: ignore[arg-type]
    assert shares[0] < 0.8 < shares[1]
