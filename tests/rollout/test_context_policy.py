"""RolloutContext rules: what each shows, and how the agent goes on from it."""

import asyncio
from dataclasses import replace

import pytest
from chat_templates import real_tokenizer
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.inference import PolicyVersionSpan, SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolSpec
from agent_r1.core.trajectory import Status
from agent_r1.renderers.formats.detect import open_renderer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop, _warn_about_long_opening
from agent_r1.rollout.config import ContextPolicyConfig
from agent_r1.rollout.context_policy import (
    SUMMARY_REQUEST,
    Append,
    Evidence,
    History,
    Summary,
    Truncate,
    Window,
    best_lines,
    build_context_policy,
    with_notes,
    with_request,
)
from agent_r1.rollout.scripted_engine import ScriptedEngine

START = (Message.system("Be brief."), Message.user("Who rules Alba?"))


def lived(count, page="Page {}: mayor Bruno."):
    life = History(START)
    for number in range(count):
        life = life.append(Message.assistant(f"look {number}"), (Message.user(page.format(number)),))
    return life


def texts(messages):
    return [message.text for message in messages]


def test_append_shows_everything():
    assert list(Append().candidates(lived(2))) == [lived(2).messages]


def test_a_window_shows_the_start_and_the_latest_exchanges_and_narrows():
    first, second = Window(keep_turns=2).candidates(lived(3))
    assert texts(first) == [
        *texts(START),
        "look 1",
        "Page 1: mayor Bruno.",
        "look 2",
        "Page 2: mayor Bruno.",
    ]
    assert texts(second) == [*texts(START), "look 2", "Page 2: mayor Bruno."]


def test_truncation_cuts_older_results_and_nothing_the_policy_said():
    first = next(Truncate(keep_turns=1, max_characters=6).candidates(lived(2)))
    cut = "Page 0\n[cut here: 14 more characters]"
    assert texts(first) == [*texts(START), "look 0", cut, "look 1", "Page 1: mayor Bruno."]
    assert next(Truncate(keep_turns=2, max_characters=6).candidates(lived(2))) == lived(2).messages


def test_evidence_keeps_the_lines_that_are_asked_for():
    life = lived(2, "It rains {0}.\nAlba: mayor Bruno {0}.")
    first = next(Evidence(keep_turns=1, max_lines=1).candidates(life))
    assert texts(first)[1] == "Who rules Alba?\n\nWhat you found so far:\nAlba: mayor Bruno 0."
    assert texts(first)[2:] == ["look 1", "It rains 1.\nAlba: mayor Bruno 1."]
    assert best_lines(["a b", "b c"], "c", 1) == ["b c"] != best_lines(["a b", "b c"], "a", 1)


def test_every_rule_ends_with_the_latest_result_whatever_it_leaves_out():
    for rule in (Window(), Truncate(), Summary(), Evidence()):
        *_, tightest = rule.candidates(lived(4))
        assert texts(tightest)[-1] == "Page 3: mayor Bruno." and len(tightest) == 4


def test_a_summary_is_asked_for_when_turns_are_many_or_room_is_short():
    rule = Summary(keep_turns=2)
    asked = [
        rule.summary_request(lived(count), fits) is not None
        for count, fits in ((2, True), (3, True), (1, False), (0, False))
    ]
    assert asked == [False, True, True, False]


def test_notes_stand_below_the_question():
    assert texts(with_notes(START, "So.")) == ["Be brief.", "Who rules Alba?\n\nSo."]
    assert texts(with_notes(START[:1], "So.")) == ["Be brief.", "So."]


def test_each_rule_has_a_configuration():
    made = [
        build_context_policy(ContextPolicyConfig(name=name))
        for name in ("append", "window", "truncate", "summary", "evidence")
    ]
    assert made == [Append(), Window(), Truncate(), Summary(), Evidence()]
    assert build_context_policy(
        ContextPolicyConfig(name="evidence", keep_turns=1, max_lines=7, after_tokens=9)
    ) == Evidence(keep_turns=1, max_lines=7, after_tokens=9)


class Asking:
    """A world that answers ``pages`` times, with as many letters as the task says."""

    tools = ()

    def __init__(self, pages):
        self.pages = pages

    async def open(self, task, context):
        return Asked(task, self.pages)


class Asked:
    def __init__(self, task, pages):
        self.task, self.pages, self.start, self.taken = task, pages, task.messages, 0

    async def step(self, action):
        self.taken += 1
        if self.taken > self.pages:
            return Transition((), end="terminal")
        letters = "x" * self.task.data.get("letters", 4)
        return Transition((Message.user(f"page {self.taken} {letters}"),))

    async def close(self):
        return None


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer(hermes_tokenizer())


def reply(prompt):
    return "I know it all." if "Sum up" in prompt.rpartition("<|im_start|>user")[2] else "go on"


def live(renderer, rule, pages=4, context=2000, max_tokens=40, **data):
    agent = Agent(
        ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=max_tokens), context, context_policy=rule
    )
    task = Task("t", (Message.user("Who?"),), data)
    return asyncio.run(AgentLoop(agent, Asking(pages)).run(task, RolloutContext(AttemptId("run", "t", 0, 0), 0)))[0]


def seen(renderer, trajectory, index):
    return renderer.tokenizer.decode(list(trajectory.prompt_ids(trajectory.turns[index])))


def test_a_window_starts_a_branch_with_each_turn_that_it_moves_and_appends_before(renderer):
    trajectory = live(renderer, Window(keep_turns=2))
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, None, None]
    last = seen(renderer, trajectory, 4)
    assert "page 2" not in last and "page 3" in last and "page 4" in last and last.count("Who?") == 1


def test_a_rule_waits_until_there_are_so_many_tokens(renderer):
    appended = live(renderer, replace(Window(keep_turns=1), after_tokens=2000))
    assert [turn.parent for turn in appended.turns] == [None, 0, 1, 2, 3]


def test_a_summary_is_a_turn_that_the_world_does_not_see(renderer):
    trajectory = live(renderer, Summary(keep_turns=2))
    assert [turn.kind for turn in trajectory.turns] == ["act", "act", "act", "summary", "act", "act"]
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, 2, None, 4]
    assert seen(renderer, trajectory, 3).count("Sum up") == 1 and "page 3" in seen(renderer, trajectory, 3)
    after = seen(renderer, trajectory, 4)
    assert "Who?\n\nYour notes so far:\nI know it all." in after and "page" not in after
    assert len(trajectory.messages) == 1 + 2 * 4 + 1 and trajectory.last_text == "go on"
    assert trajectory.start == (Message.user("Who?"),) and trajectory.status is Status.COMPLETED


def test_a_second_summary_takes_the_place_of_the_first(renderer):
    trajectory = live(renderer, Summary(keep_turns=1), pages=5)
    assert [turn.kind for turn in trajectory.turns].count("summary") == 2
    assert seen(renderer, trajectory, -1 % len(trajectory.turns)).count("Your notes") == 1


@pytest.mark.parametrize(
    "rule",
    [Window(keep_turns=3), Truncate(keep_turns=3, max_characters=5), Summary(keep_turns=9), Evidence(keep_turns=3)],
)
def test_room_for_an_action_is_kept_and_an_episode_that_append_would_end_goes_on(renderer, rule):
    assert live(renderer, Append(), pages=6, context=300, letters=30).status is Status.OUT_OF_TOKENS
    trajectory = live(renderer, rule, pages=6, context=300, letters=30)
    assert trajectory.status is Status.COMPLETED
    assert max(len(trajectory.prompt_ids(turn)) for turn in trajectory.turns) <= 300 - 40


@pytest.mark.parametrize("rule", [Append(), Window(), Truncate(), Summary(), Evidence()])
def test_a_result_that_fits_no_view_ends_the_episode_with_its_status(renderer, rule):
    trajectory = live(renderer, rule, context=300, letters=400)
    assert trajectory.status is Status.OUT_OF_TOKENS and trajectory.truncated
    assert all(len(trajectory.prompt_ids(t) + t.action_ids) <= 300 for t in trajectory.turns)


class Rambling(ScriptedEngine):
    """Heeds no ending: says more than one call, each token with its log-probability, the last from newer weights."""

    async def generate(self, prompt, params, *, session_id=None):
        made = await super().generate(prompt, replace(params, stop_condition=None), session_id=session_id)
        told = tuple(-0.01 * place for place in range(len(made.token_ids)))
        return replace(
            made, logprobs=told, version_spans=(PolicyVersionSpan(0, 0), PolicyVersionSpan(len(made.token_ids) - 1, 1))
        )


def test_of_what_is_said_past_a_call_in_tags_nothing_is_recorded():
    renderer = open_renderer(hermes_tokenizer(), "tags")
    env = Asking(1)
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
def test_a_summary_that_says_nothing_loses_nothing(renderer, said):
    agent = Agent(
        ScriptedEngine(renderer, lambda prompt: said),
        renderer,
        SamplingParams(max_tokens=60),
        2000,
        context_policy=Summary(keep_turns=1),
    )
    task = Task("t", (Message.user("Who?"),))
    trajectory = asyncio.run(AgentLoop(agent, Asking(3)).run(task, RolloutContext(AttemptId("run", "t", 0, 0), 0)))[0]
    assert [turn.kind for turn in trajectory.turns] == ["act", "act", "summary", "act", "summary", "act"]
    last = seen(renderer, trajectory, -1 % len(trajectory.turns))
    assert "page 1" in last and "page 2" in last and "notes" not in last


def test_notes_hold_no_thought(renderer):
    says = iter(["a", "b", "<think>\nHm.\n</think>\n\nAlba is it.", "c"])
    agent = Agent(ScriptedEngine(renderer, lambda prompt: next(says)), renderer, SamplingParams(max_tokens=60), 2000)
    agent = replace(agent, context_policy=Summary(keep_turns=1))
    task = Task("t", (Message.user("Who?"),))
    trajectory = asyncio.run(AgentLoop(agent, Asking(2)).run(task, RolloutContext(AttemptId("run", "t", 0, 0), 0)))[0]
    assert "Who?\n\nYour notes so far:\nAlba is it.<|im_end|>" in seen(renderer, trajectory, 3)


def test_a_request_stands_below_what_a_user_said_last_for_roles_may_have_to_alternate():
    assert texts(with_request(START, SUMMARY_REQUEST)) == ["Be brief.", f"Who rules Alba?\n\n{SUMMARY_REQUEST.text}"]
    page = Message.tool("A page.", "call_0_0")
    assert with_request((page,), SUMMARY_REQUEST) == (page, SUMMARY_REQUEST) and with_request((), SUMMARY_REQUEST) == (
        SUMMARY_REQUEST,
    )
    gemma = open_renderer(real_tokenizer("gemma3"))
    trajectory = live(gemma, Summary(keep_turns=1))
    assert trajectory.status is Status.COMPLETED and "summary" in [turn.kind for turn in trajectory.turns]


def test_an_opening_without_room_is_warned_of_once(renderer, caplog):
    _warn_about_long_opening.cache_clear()
    for _ in range(2):
        trajectory = live(renderer, Append(), context=20)
        assert trajectory.status is Status.OUT_OF_TOKENS and not trajectory.turns
    assert [record.getMessage() for record in caplog.records] == [
        "the opening of an episode leaves no room in a context of 20 tokens: such episodes cannot be trained"
    ]
