"""No text of a run becomes an element, an attribute or an address of a page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import quote

import httpx
import pytest
from hostile_texts import HOSTILE, SCRIPT
from viewed_runs import HOSTILE_RUN

RUN = f"/run/{quote(HOSTILE_RUN, safe='')}"
ELEMENTS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "link",
        "script",
        "body",
        "header",
        "main",
        "nav",
        "section",
        "article",
        "aside",
    ),
    *("a", "span", "div", "p", "b", "h1", "h2", "h3", "h4", "h5", "pre", "code", "kbd", "details", "summary", "dialog"),
    *("form", "button", "input", "label", "select", "option", "progress", "ul", "ol", "li", "dl", "dt", "dd"),
    *(
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
        "figcaption",
        "svg",
        "g",
        "path",
        "circle",
        "line",
        "text",
    ),
}


class Elements(HTMLParser):
    """Fails at an element, an attribute or an address that no template has."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ELEMENTS, f"<{tag}>"
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("style", "srcdoc", "formaction"), f"<{tag} {name}>"
            if name in ("href", "src", "action"):
                assert re.match(r"(/(?!/)|\?|#)", value or ""), f"<{tag} {name}={value!r}>"
        if tag == "script":
            assert attrs == [("src", "/static/app.js")]


def check(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text[:500]
    Elements().feed(answer.text)
    assert "49" not in re.findall(r">\s*(49)\s*<", answer.text)  # the result of {{ 7 * 7 }}
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u2066-\u2069\u200b]", answer.text)


@pytest.mark.parametrize("page", ["/", RUN, f"{RUN}/attempts", f"{RUN}/attempts?fate=dropped&direction=up"])
def test_pages_of_a_run_contain_hostile_texts_only_as_text(client: httpx.Client, page: str) -> None:
    answer = client.get(page)
    check(answer)
    assert SCRIPT.replace("'", "&#39;") in answer.text or page == "/"


def test_a_comparison_contains_hostile_texts_only_as_text(client: httpx.Client) -> None:
    check(client.get("/compare", params={"run": [HOSTILE_RUN, "alba"]}))


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_an_attempt_contains_hostile_texts_only_as_text(client: httpx.Client, index: int) -> None:
    found = client.get(f"{RUN}/attempts?direction=up").text + client.get(f"{RUN}/attempts").text
    links = [link.replace("&amp;", "&") for link in re.findall(r'href="([^"]+)" data-open', found)]
    own = next(link for link in links if f"/attempt/{index // 4}.{index % 4}.0" in link)
    answer = client.get(own)
    check(answer)
    assert answer.text.count("<article") == 1 and 'class="call failed"' in answer.text


@pytest.mark.parametrize("group", [0, 5, 13, 14])
def test_a_group_contains_hostile_texts_only_as_text(client: httpx.Client, group: int) -> None:
    check(client.get(f"{RUN}/group/{group}"))


def test_a_search_shows_its_hostile_text_only_as_text(client: httpx.Client) -> None:
    for text in HOSTILE[:56]:
        answer = client.get("/run/alba/attempts", params={"text": text, "status": text, "page": text})
        check(answer)


def test_errors_show_hostile_names_only_as_text(client: httpx.Client) -> None:
    for text in HOSTILE[:20]:
        answer = client.get(f"/run/{quote(text, safe='')}")
        assert answer.status_code == 404
        Elements().feed(answer.text)
