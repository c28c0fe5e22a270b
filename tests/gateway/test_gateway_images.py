"""Images in the requests of clients, in all three dialects: data URLs are read, addresses and broken files refused."""

import base64
import io

import anthropic
import openai
import pytest
from agent_episodes import Episodes
from PIL import Image as Pillow

from agent_r1.core.trajectory import Status
from agent_r1.renderers.byte_tokenizer import OneTokenImages, byte_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer


def png(color):
    file = io.BytesIO()
    Pillow.new("RGB", (6, 4), color).save(file, "PNG")
    return file.getvalue()


def encoded(data):
    return base64.b64encode(data).decode()


def data_url(data):
    return f"data:image/png;base64,{encoded(data)}"


def image_part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def question(url):
    return {"role": "user", "content": [{"type": "text", "text": "Look: "}, image_part(url)]}


@pytest.fixture(scope="module")
def seeing():
    return Episodes(TemplateRenderer(byte_tokenizer(images=True), images=OneTokenImages()))


def reply(prompt):
    return f"I see {prompt.count('<|image|>')}."


def test_a_conversation_with_images_continues_its_tokens(seeing):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages = [question(data_url(png("red")))]
        first = await client.chat.completions.create(model="any", messages=messages)
        messages += [{"role": "assistant", "content": first.choices[0].message.content}]
        messages += [{"role": "user", "content": [image_part(data_url(png("blue"))), {"type": "text", "text": "And?"}]}]
        second = await client.chat.completions.create(model="any", messages=messages)
        return first.choices[0].message.content + second.choices[0].message.content

    trajectory = seeing.play(run, reply)
    assert trajectory.answer == "I see 1.I see 2.", trajectory.reason
    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    assert [[one.image.data for one in turn.media] for turn in trajectory.turns] == [[png("red")], [png("blue")]]
    prompt, _, _ = seeing.engine.generations[1]
    assert [one.image.data for one in prompt.media] == [png("red"), png("blue")]
    (token,) = seeing.renderer.encode("<|image|>")
    assert [index for index, one in enumerate(prompt.token_ids) if one == token] == [
        one.position for one in prompt.media
    ]


def test_the_other_dialects_read_images_too(seeing):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        content = [{"type": "input_image", "image_url": data_url(png("red"))}, {"type": "input_text", "text": "Well?"}]
        first = await client.responses.create(model="any", input=[{"role": "user", "content": content}])
        other = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
        source = {"type": "base64", "media_type": "image/png", "data": encoded(png("red"))}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "Well?"}]
        second = await other.messages.create(
            model="any", max_tokens=50, messages=[{"role": "user", "content": content}]
        )
        return first.output_text + second.content[0].text

    assert seeing.play(run, reply).answer == "I see 1.I see 1."


REFUSED = {
    "https://example.org/a.png": "addresses are not fetched",
    "data:image/svg+xml;base64," + encoded(b"<svg/>"): "cannot identify",
    "data:image/jpeg;base64," + encoded(png("red")): "image/png declared as image/jpeg",
}


def test_images_that_cannot_be_used_are_refused_and_the_episode_goes_on(seeing):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        for url, reason in REFUSED.items():
            with pytest.raises(openai.BadRequestError, match=reason) as caught:
                await client.chat.completions.create(model="any", messages=[question(url)])
            assert "messages.0.content" in str(caught.value)
        answer = await client.chat.completions.create(model="any", messages=[question(data_url(png("red")))])
        return answer.choices[0].message.content

    trajectory = seeing.play(run, reply)
    assert (trajectory.status, trajectory.answer) == (Status.COMPLETED, "I see 1."), trajectory.reason


def test_a_model_without_vision_refuses_images(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        with pytest.raises(openai.BadRequestError, match="the model has no vision"):
            await client.chat.completions.create(model="any", messages=[question(data_url(png("red")))])
        answer = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hello"}])
        return answer.choices[0].message.content

    assert episodes.play(run, lambda prompt: "Hello.").answer == "Hello."
