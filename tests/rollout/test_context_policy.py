"""Context policies: the contexts that each one proposes, and how the agent loop uses them."""

import asyncio
from dataclasses import replace

import pytest
from chat_templates import real_tokenizer
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.inference import PolicyVersionSpan, SamplingParams
from agent_r1.core.messages import Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.renderers.formats.detect import open_renderer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.context_policy import (
    SUMMARY_REQUEST,
    Append,
    Evidence,
    Exchange,
    History,
    Summary,
    Truncate,
    Window,
    best_lines,
    with_request,
)
from agent_r1.rollout.scripted import ScriptedEngine

START = (Message.system("Be brief."), Message.user("Who rules Alba?"))


def history_of(count, page="Page {}: mayor Bruno."):
    pages = [(Message.user(page.format(number)),) for number in range(count)]
    return History(START, tuple(Exchange(Message.assistant(f"look {k}"), one) for k, one in enumerate(pages)))


def texts(messages):
    return [message.text for message in messages]


def test_window_keeps_the_opening_and_the_latest_exchanges_and_narrows():
    first, second = Window(keep_turns=2).candidates(history_of(3))
    assert texts(first) == [
        *texts(START),
        "look 1",
        "Page 1: mayor Bruno.",
        "look 2",
        "Page 2: mayor Bruno.",
    ]
    assert texts(second) == [*texts(START), "look 2", "Page 2: mayor Bruno."]


def test_truncate_cuts_older_results_but_no_actions():
    first = next(Truncate(keep_turns=1, max_characters=6).candidates(history_of(2)))
    cut = "Page 0\n[cut here: 14 more characters]"
    assert texts(first) == [*texts(START), "look 0", cut, "look 1", "Page 1: mayor Bruno."]
    assert next(Truncate(keep_turns=2, max_characters=6).candidates(history_of(2))) == history_of(2).messages


def test_evidence_keeps_the_most_relevant_lines():
    history = history_of(2, "It rains {0}.\nAlba: mayor Bruno {0}.")
    first = next(Evidence(keep_turns=1, max_lines=1).candidates(history))
    assert texts(first)[1] == "Who rules Alba?\n\nWhat you found so far:\nAlba: mayor Bruno 0."
    assert texts(first)[2:] == ["look 1", "It rains 1.\nAlba: mayor Bruno 1."]
    assert best_lines(["a b", "b c"], "c", 1) == ["b c"] != best_lines(["a b", "b c"], "a", 1)


def test_the_last_candidate_of_every_policy_keeps_the_latest_result():
    for policy in (Window(), Truncate(), Summary(), Evidence()):
        *_, shortest = policy.candidates(history_of(4))
        assert texts(shortest)[-1] == "Page 3: mayor Bruno." and len(shortest) == 4


def test_a_summary_is_requested_after_many_turns_or_if_there_is_no_room():
    policy = Summary(keep_turns=2)
    requests = [
        policy.summary_request(history_of(count), fits) is not None
        for count, fits in ((2, True), (3, True), (1, False), (0, False))
    ]
    assert requests == [False, True, True, False]


class PagesEnv:
    """An environment with ``pages`` observations, whose length ``task.data`` sets."""

    tools = ()

    def __init__(self, pages):
        self.pages = pages

    async def open(self, task, context):
        return PagesEpisode(task, self.pages)


class PagesEpisode:
    def __init__(self, task, pages):
        self.task, self.pages, self.start, self.step_count = task, pages, task.messages, 0

    async def step(self, action):
        self.step_count += 1
        if self.step_count > self.pages:
            return Transition((), end="terminal")
        letters = "x" * self.task.data.get("letters", 4)
        return Transition((Message.user(f"page {self.step_count} {letters}"),))

    async def close(self):
        return None


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer(hermes_tokenizer())


def reply(prompt):
    return "I know it all." if "Sum up" in prompt.rpartition("<|im_start|>user")[2] else "go on"


def run_episode(renderer, policy, pages=4, context=2000, max_tokens=40, **data):
    agent = Agent(
        ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=max_tokens), context, context_policy=policy
    )
    task = Task("t", (Message.user("Who?"),), data)
    return asyncio.run(AgentLoop(agent, PagesEnv(pages)).run(task, RolloutContext(AttemptId("run", "t", 0, 0), 0)))[0]


def prompt_text(renderer, trajectory, index):
    return renderer.tokenizer.decode(list(trajectory.prompt_ids(trajectory.turns[index])))


def test_window_starts_a_branch_only_once_it_drops_turns(renderer):
    trajectory = run_episode(renderer, Window(keep_turns=2))
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, None, None]
    last = prompt_text(renderer, trajectory, 4)
    assert "page 2" not in last and "page 3" in last and "page 4" in last and last.count("Who?") == 1


def test_nothing_is_rewritten_below_after_tokens(renderer):
    appended = run_episode(renderer, replace(Window(keep_turns=1), after_tokens=2000))
    assert [turn.parent for turn in appended.turns] == [None, 0, 1, 2, 3]


def test_a_summary_is_a_turn_that_does_not_reach_the_environment(renderer):
    trajectory = run_episode(renderer, Summary(keep_turns=2))
    assert [turn.kind for turn in trajectory.turns] == ["act", "act", "act", "summary", "act", "act"]
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, 2, None, 4]
    assert prompt_text(renderer, trajectory, 3).count("Sum up") == 1 and "page 3" in prompt_text(
        renderer, trajectory, 3
    )
    after = prompt_text(renderer, trajectory, 4)
    assert "Who?\n\nYour notes so far:\nI know it all." in after and "page" not in after
    assert len(trajectory.messages) == 1 + 2 * 4 + 1 and trajectory.last_text == "go on"
    assert trajectory.start == (Message.user("Who?"),) and trajectory.status is Status.COMPLETED


@pytest.mark.parametrize(
    "policy",
    [Window(keep_turns=3), Truncate(keep_turns=3, max_characters=5), Summary(keep_turns=9), Evidence(keep_turns=3)],
)
def test_policies_keep_room_for_an_action_and_continue_where_append_runs_out_of_tokens(renderer, policy):
    assert run_episode(renderer, Append(), pages=6, context=300, letters=30).status is Status.OUT_OF_TOKENS
    trajectory = run_episode(renderer, policy, pages=6, context=300, letters=30)
    assert trajectory.status is Status.COMPLETED
    assert max(len(trajectory.prompt_ids(turn)) for turn in trajectory.turns) <= 300 - 40


@pytest.mark.parametrize("policy", [Append(), Window(), Truncate(), Summary(), Evidence()])
def test_a_result_that_fits_no_context_ends_the_episode_as_out_of_tokens(renderer, policy):
    trajectory = run_episode(renderer, policy, context=300, letters=400)
    assert trajectory.status is Status.OUT_OF_TOKENS and trajectory.truncated
    assert all(len(trajectory.prompt_ids(t) + t.action_ids) <= 300 for t in trajectory.turns)


class Rambling(ScriptedEngine):
    """Ignores the stop condition. Each token has its own log-probability; the last one is from newer weights."""

    async def generate(self, prompt, params, *, session_id=None):
        made = await super().generate(prompt, replace(params, stop_condition=None), session_id=session_id)
        logprobs = tuple(-0.01 * place for place in range(len(made.token_ids)))
        return replace(
            made,
            logprobs=logprobs,
            version_spans=(PolicyVersionSpan(0, 0), PolicyVersionSpan(len(made.token_ids) - 1, 1)),
        )


def test_tokens_sampled_after_a_call_in_tags_are_not_recorded():
    renderer = open_renderer(hermes_tokenizer(), "tags")
    env = PagesEnv(1)
    env.tools = (ToolSpec("find", "", {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}),)
    call = "<find>Alba</find>"
    agent = Agent(Rambling(renderer, lambda prompt: f"{call} and more"), renderer, SamplingParams(max_tokens=40), 2000)
    context = RolloutContext(AttemptId("run", "t", 0, 0), 0)
    turn = asyncio.run(AgentLoop(agent, env).run(Task("t", (Message.user("Who?"),)), context))[0].turns[0]
    assert (
        turn.action.text == call and turn.finish_reason == "stop" and turn.version_spans == (PolicyVersionSpan(0, 0),)
    )
    assert turn.logprobs == tuple(-0.01 * place for place in range(len(call)))


@pytest.mark.parametrize("said", ["<think>Hm.</think>", '<tool_call>{"name": "search"}</tool_call>'])
def test_a_summary_without_text_leaves_the_history_as_it_is(renderer, said):
    agent = Agent(
        ScriptedEngine(renderer, lambda prompt: said),
        renderer,
        SamplingParams(max_tokens=60),
        2000,
        context_policy=Summary(keep_turns=1),
    )
    task = Task("t", (Message.user("Who?"),))
    trajectory = asyncio.run(AgentLoop(agent, PagesEnv(3)).run(task, RolloutContext(AttemptId("run", "t", 0, 0), 0)))[0]
    assert [turn.kind for turn in trajectory.turns] == ["act", "act", "summary", "act", "summary", "act"]
    last = prompt_text(renderer, trajectory, -1 % len(trajectory.turns))
    assert "page 1" in last and "page 2" in last and "notes" not in last


def test_a_request_is_appended_to_a_final_user_message_so_that_roles_alternate():
    assert texts(with_request(START, SUMMARY_REQUEST)) == ["Be brief.", f"Who rules Alba?\n\n{SUMMARY_REQUEST.text}"]
    page = Message.tool("A page.", "call_0_0")
    assert with_request((page,), SUMMARY_REQUEST) == (page, SUMMARY_REQUEST) and with_request((), SUMMARY_REQUEST) == (
        SUMMARY_REQUEST,
    )
    gemma = open_renderer(real_tokenizer("gemma3"))
    trajectory = run_episode(gemma, Summary(keep_turns=1))
    assert trajectory.status is Status.COMPLETED and "summary" in [turn.kind for turn in trajectory.turns]
