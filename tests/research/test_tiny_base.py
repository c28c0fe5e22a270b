"""tiny-base: its tokenizer and template, its pretraining examples, and the committed model."""

import random
import re
from collections import Counter
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agent_r1.core.messages import Message
from agent_r1.model.load import load_tokenizer
from agent_r1.renderers.protocol import RenderedPrompt
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.tasksets.tinywiki.questions import SPLITS, tasks
from agent_r1.tasksets.tinywiki.wiki import ENTITIES, RELATIONS, Chain, Wiki, open_wiki, search
from research.tiny_base import examples as planner
from research.tiny_base.examples import TOOLS, Example, ExampleMaker, Mix
from research.tiny_base.pretrain import Phase, make_initial_model, make_initial_tokenizer, pretrain


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(TINY_BASE_FOLDER))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY_BASE_FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def fresh() -> PreTrainedTokenizerBase:
    return make_initial_tokenizer()


@pytest.fixture(scope="module")
def rng() -> random.Random:
    return random.Random(7)


def round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False)


def unknown_words(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Return the pieces of words outside the vocabulary: single characters."""
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
    return [piece for piece in pieces if piece == "▁" or piece == tokenizer.unk_token]


def transcripts(rng: random.Random) -> list[tuple[Message, ...]]:
    return [planner.transcript(open_wiki(f"test/{number % 4}"), rng) for number in range(80)]


def test_every_text_of_tinywiki_round_trips_in_words(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> None:
    wiki = open_wiki("test/0")
    texts = [wiki.page(title) for title in wiki.titles]
    texts += [task.messages[-1].text for split in SPLITS if split != "unseen-relation" for task in tasks(split, 0)[:60]]
    texts += [TemplateRenderer(tokenizer).render_text(messages, TOOLS) for messages in transcripts(rng)]
    for text in texts:
        assert round_trip(tokenizer, text) == text
        assert not unknown_words(tokenizer, text)
    (unseen, *_) = tasks("unseen-relation", 0)  # control: a word outside the vocabulary
    assert unknown_words(tokenizer, unseen.messages[-1].text)


def test_transformers_own_loader_encodes_as_ours_does(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rng: random.Random, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    renderer = TemplateRenderer(tokenizer)
    texts = [renderer.render_text(messages, TOOLS) for messages in transcripts(rng)[:10]]
    for folder in (TINY_BASE_FOLDER, tmp_path):
        plain = AutoTokenizer.from_pretrained(folder)
        assert [plain.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
        assert plain.apply_chat_template([{"role": "user", "content": "Who?"}], tokenize=False) == renderer.render_text(
            (Message.user("Who?"),)
        )
        assert plain.decode(plain.encode(texts[0])) == texts[0]


def test_the_template_appends_at_tool_and_user_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = TemplateRenderer(tokenizer)
    assert renderer.probe_behavior("tool", thinking=False).kind == "append"
    assert renderer.probe_behavior("user", thinking=False).kind == "append"


def actions_of(example: Example) -> list[tuple[int, ...]]:
    """Return the runs of target tokens: the planner's actions, one per turn."""
    runs = groupby(zip(example.ids, example.targets, strict=True), key=itemgetter(1))
    return [tuple(token for token, _ in run) for is_target, run in runs if is_target]


def test_an_episode_rendered_turn_by_turn_has_the_tokens_of_pretraining(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random
) -> None:
    renderer, maker = TemplateRenderer(tokenizer), ExampleMaker(tokenizer, seed=0)
    for conversation in transcripts(rng):
        example = maker.conversation(conversation, TOOLS)
        system, user, *rest = conversation
        messages: tuple[Message, ...] = (system, user)
        prompt = renderer.render(messages, (search.spec,))
        state = prompt.token_ids
        for turn, ids in enumerate(actions_of(example)):
            action, expected, observed = renderer.parse(ids), rest[2 * turn], tuple(rest[2 * turn + 1 : 2 * turn + 2])
            assert (action.message.text, calls_of(action.message)) == (expected.text, calls_of(expected))
            prompt = (
                renderer.bridge_to_next_turn(prompt, messages, action, ids, observed, (search.spec,))
                if observed
                else RenderedPrompt("", ())
            )
            assert prompt is not None
            state, messages = (*state, *ids, *prompt.token_ids), (*messages, action.message, *observed)
        assert state == example.ids[:-1]  # the render ends with a newline


def calls_of(message: Message) -> list[tuple[str, object]]:
    return [(call.name, call.arguments) for call in message.calls]


def asked(wiki: Wiki, question: str) -> Chain:
    """Return the chain of facts that a question in one of the two styles asks for."""
    words = re.findall(r"\w+", question)
    (start,), relations = [word for word in words if word in ENTITIES], [word for word in words if word in RELATIONS]
    at, values = start, []
    for relation in reversed(relations) if question.startswith("What") else relations:
        at = wiki.facts[at][relation]
        values.append(at)
    return Chain(start, tuple(relations), tuple(values))


def test_no_conversation_of_pretraining_answers_a_question_of_several_hops(rng: random.Random) -> None:
    # Each thought is on the page before it; one hop is mostly answered, two hops never, three are never asked.
    answered, questions = Counter[int](), Counter[int]()
    for number in range(1200):
        wiki = open_wiki(f"train/{number % 4}")
        messages = (planner.reading if number % 4 == 0 else planner.transcript)(wiki, rng)
        question, actions = messages[1].text, [message for message in messages if message.role == "assistant"]
        chain = asked(wiki, question.rpartition("\n")[2])
        questions[len(chain.values)] += 1
        answered[len(chain.values)] += f"<answer>{chain.answer}</answer>" in actions[-1].text
        for before, action in pairwise(messages):
            if before.role == "tool" and action.text:
                assert action.text.split("\n")[0] in before.text
    assert set(questions) == {1, 2} and answered[2] == 0
    assert answered[1] > 0.5 * questions[1]


def test_the_targets_of_a_conversation_are_the_planners_messages(tokenizer: PreTrainedTokenizerBase) -> None:
    (example,) = ExampleMaker(tokenizer, seed=3).batch(Mix(repetitions=0, readings=1))
    (action,) = actions_of(example)
    text = tokenizer.decode(action)
    assert text.startswith(tuple(RELATIONS)) and text.endswith("</answer><|im_end|>")
    assert tokenizer.decode(example.ids).endswith(f"<|im_start|>assistant\n{text}\n")


def test_the_targets_of_a_lookup_are_the_fact_and_the_answer_tag(tokenizer: PreTrainedTokenizerBase) -> None:
    numbers = set()
    for example in ExampleMaker(tokenizer, seed=3).batch(Mix(repetitions=0, lookups=30)):
        question, *pages, fact, tag = tokenizer.decode(example.ids).split("\n")
        relation, _ = fact.removesuffix(".").split(" ")
        assert len(re.findall("|".join(RELATIONS), question)) == 1 and f"the {relation}" in question
        assert f" {fact}" in pages[-1] and pages[-1].split(":")[0] in question
        assert [tokenizer.decode(run) for run in actions_of(example)] == [f"{fact}\n<answer>"] and tag == "<answer>"
        numbers.add(len(pages))
    assert numbers == {1, 2}


def test_pretraining_is_deterministic_and_its_loss_falls(fresh: PreTrainedTokenizerBase) -> None:
    phases = (Phase(12, Mix(repetitions=4, lookups=4, transcripts=6, readings=2)),)

    def run() -> tuple[list[float], dict[str, torch.Tensor]]:
        model = make_initial_model(fresh, seed=1)
        losses = [progress.loss for progress in pretrain(model, fresh, 1, phases)]
        return losses, model.state_dict()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    (losses, weights), (again, weights_again) = run(), run()
    torch.set_num_threads(threads)
    assert losses == again
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    assert losses[-1] < losses[0] - 0.5


def test_the_first_head_initially_attends_to_the_previous_token(tokenizer: PreTrainedTokenizerBase) -> None:
    model = make_initial_model(tokenizer, seed=0)
    model.set_attn_implementation("eager")
    ids = torch.randint(20, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    attention = model(ids, output_attentions=True).attentions[0][0]  # (heads, 40, 40)
    back = attention[:, 1:, :].diagonal(dim1=1, dim2=2).mean(1)
    assert back[0] > 0.9
    assert back[1] < 0.5  # control: a head that was not initialized this way


def test_the_committed_model_is_small_and_fits_its_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fresh: PreTrainedTokenizerBase
) -> None:
    assert 100_000 < model.num_parameters() < 1_000_000
    assert len(tokenizer) <= model.config.vocab_size < len(tokenizer) + 8
    assert tokenizer.backend_tokenizer.to_str() == fresh.backend_tokenizer.to_str()
    assert tokenizer.chat_template == fresh.chat_template
    assert sum(file.stat().st_size for file in TINY_BASE_FOLDER.iterdir()) < 1_500_000


def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> str:
    with torch.no_grad():
        output = model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
    return tokenizer.decode(output[0, len(ids) :])


def test_the_committed_model_answers_from_a_given_page(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    renderer, read = TemplateRenderer(tokenizer), 0
    questions = tasks("one-hop", 0)[:20]
    for task in questions:
        wiki = open_wiki(task.data["wiki"])
        given = f"{wiki.page(task.data['chain'].start)}\n\n{task.messages[-1].text}"
        answer = greedy(model, tokenizer, renderer.render((task.messages[0], Message.user(given)), ()).token_ids)
        read += f"<answer>{task.data['chain'].answer}</answer>" in answer
    assert read >= 18


def test_the_committed_model_searches_and_answers_too_early(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    renderer = TemplateRenderer(tokenizer)
    task = tasks("style-a", 0)[1]
    chain, prompt = task.data["chain"], renderer.render(task.messages, (search.spec,))
    first = renderer.parse(
        tuple(tokenizer.encode(greedy(model, tokenizer, prompt.token_ids), add_special_tokens=False))
    )
    assert calls_of(first.message) == [("search", {"query": chain.start})]
    page = Message.tool(open_wiki(task.data["wiki"]).page(chain.start), "call_0")
    action_ids = tuple(tokenizer.encode(first.text + "<|im_end|>", add_special_tokens=False))
    bridge = renderer.bridge_to_next_turn(prompt, task.messages, first, action_ids, (page,), (search.spec,))
    ids = (*prompt.token_ids, *action_ids, *bridge.token_ids)
    assert greedy(model, tokenizer, ids).endswith(f"<answer>{chain.values[0]}</answer><|im_end|>")
