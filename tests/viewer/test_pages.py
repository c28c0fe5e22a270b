"""The pages show what the run recorded: curves, settings, attempts, conversations, branches and groups."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from recorded_runs import record_all
from viewed_runs import step_events

from agent_r1.core.events import LogEvent
from agent_r1.store.folder import create_run
from agent_r1.store.writer import RunWriter
from agent_r1.viewer.app import create_app
from agent_r1.viewer.catalog import Catalog
from agent_r1.viewer.server import ViewerServer


class Page(HTMLParser):
    """The texts of a page by the class of their element, and the addresses of its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: dict[str, str] = {}
        self._stack: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self._href = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._stack = [*self._stack, found.get("class") or ""][-40:]
        self._href = found.get("href") or "" if tag == "a" else self._href

    def handle_endtag(self, tag: str) -> None:
        self._stack = self._stack[:-1]

    def handle_data(self, data: str) -> None:
        if text := " ".join(data.split()):
            for name in (self._stack[-1:] or [""])[0].split():
                self.texts.setdefault(name, []).append(text)
            if self._href:
                self.links.setdefault(text, self._href)
                self._href = ""


def plain(answer: httpx.Response) -> str:
    """The visible text of a page as one line."""
    assert answer.status_code == 200, answer.text
    return " ".join(re.sub(r"<[^>]*>", " ", answer.text).split())


def rows(answer: httpx.Response) -> list[str]:
    """The group and sample of each attempt in the table."""
    assert answer.status_code == 200, answer.text
    return re.findall(r"data-open>\s*(\d+\.\d+)", answer.text)


def test_the_list_of_runs_has_state_progress_and_best_validation(client: httpx.Client) -> None:
    text = plain(client.get("/"))
    assert "alba complete 6 / 6 6 / 6 0.6 0.5 at 6 24 tinywiki tiny-base grpo" in text
    assert "bruno stopped 3 / 3" in text


def test_a_folder_without_runs_says_how_to_start_one(tmp_path: Path) -> None:
    with ViewerServer(create_app(Catalog([tmp_path]), {}, lambda name: None)) as server:
        answer = httpx.get(server.url, follow_redirects=True, cookies={})
        with httpx.Client() as browser:
            answer = browser.get(server.url, follow_redirects=True)
    assert "No runs yet" in plain(answer) and "agent-r1 train" in plain(answer)


def test_a_run_page_has_a_curve_for_each_reward_and_the_best_validation_marked(client: httpx.Client) -> None:
    page = client.get("/run/alba").text
    labels = re.findall(r'data-label="([^"]+)"', page)
    assert labels[:3] == ["total", "exact_match", "steps"]
    for label in ("em", "entropy", "tokens", "failure of the tool", "tokens per second", "largest"):
        assert label in labels
    assert "staleness" not in labels  # 0 in every step
    validation = page[page.index(">Validation<") : page.index(">Entropy<")]
    assert validation.count('class="mark"') == 1
    mark = re.search(r'class="mark" cx="([\d.]+)"', validation)
    assert mark is not None and float(mark[1]) == 410.0  # of the equal steps 4 and 6, the later one is the best


@pytest.mark.parametrize(
    ("reason", "state"), [("SIGTERM", "stopped"), ("RunStopped: the loss is not finite", "failed")]
)
def test_a_run_that_an_error_ended_has_failed_and_says_why(tmp_path: Path, reason: str, state: str) -> None:
    with closing(create_run(tmp_path / "run", {"steps": 9, "trainer": {"lora": True}})) as writer:
        record_all(writer, [LogEvent("stopped", reason)])
    with ViewerServer(create_app(Catalog([tmp_path]), {}, lambda name: None)) as server, httpx.Client() as browser:
        assert f"run {state} 0 / 9" in plain(browser.get(server.url, follow_redirects=True))
        page = plain(browser.get(f"{server.url.split('/?')[0]}/run/run"))
    assert f"run {state}" in page and f"{state.capitalize()}: {reason}" in page
    assert "No step yet" in page and "No validation: --evaluate_every sets how often" in page
    assert "trainer.lora true" in page  # as in a configuration file


def test_a_list_with_conditions_says_how_many_attempts_meet_them(client: httpx.Client) -> None:
    assert "12 of 24 in this run" in plain(client.get("/run/alba/attempts?status=completed"))
    assert "Attempts 24 in this run" in plain(client.get("/run/alba/attempts?order=reward"))


def test_only_an_attempt_with_longer_texts_offers_to_show_them_whole(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/run/alba/attempt/1.0.0%3Astyle-a%2F1"
    assert "Show long texts whole" not in client.get(path).text
    monkeypatch.setattr("agent_r1.viewer.app.MAX_SHOWN", 10)
    assert "Show long texts whole" in client.get(path).text
    assert "Show long texts whole" not in client.get(f"{path}?whole=1").text


def test_a_run_page_shows_settings_that_differ_warnings_and_counts(client: httpx.Client) -> None:
    text = plain(client.get("/run/bruno"))
    assert "trainer.learning_rate 0.0003 1e-06" in text and "reward_weights.steps 0.0" in text
    assert "steps 3 200" in text and "taskset tinywiki tinywiki" not in text
    assert "loss.clip_high 0.28" in text
    assert "warning gradient_spike" in text
    assert "completed 6 environment failed 3 out of turns 3 trained 9 dropped 3 pending 1" in text


def test_a_run_page_shows_validations_and_the_final_table(client: httpx.Client) -> None:
    text = plain(client.get("/run/alba"))
    assert "validation step 6, validation: exact match 0.5 (0.43 to 0.57), 200 questions" in text
    assert "Method style-a style-b naive-rag 0.5 (0.43 to 0.57) trained 0.5 (0.43 to 0.57) 0.9 (0.43 to 0.57)" in text
    assert "Final table" not in plain(client.get("/run/bruno"))


def test_compared_runs_are_drawn_over_each_other_with_the_settings_that_differ(client: httpx.Client) -> None:
    page = client.get("/compare?run=alba&run=bruno")
    first = page.text[page.text.index("<figure") : page.text.index("</figure")]
    assert re.findall(r'data-label="([^"]+)"', first) == ["alba", "bruno"]
    settings = plain(page)[plain(page).index("Side by side") :]
    assert "trainer.learning_rate 1e-06 0.0003" in settings and "clip_high" not in settings
    assert "Choose two runs or more" in plain(client.get("/compare?run=alba&run=unknown"))


def test_the_choice_of_compared_runs_has_the_order_and_the_colors_of_their_curves(client: httpx.Client) -> None:
    for first, second in (("alba", "bruno"), ("bruno", "alba")):
        page = client.get(f"/compare?run={first}&run={second}").text
        chips = re.findall(r'class="choice chosen c(\d)"><input type="checkbox" name="run" value="([^"]+)"', page)
        legend = re.findall(r'<li class="c(\d)"><span class="swatch"></span><span class="legend-label">([^<]+)', page)
        assert chips == legend[:2] == [("0", first), ("1", second)]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", ["5.3", "5.2", "5.1", "5.0", "4.3"]),
        ("direction=up", ["0.0", "0.1", "0.2", "0.3", "1.0"]),
        ("page=2", []),
        ("fate=dropped", ["5.3", "4.3", "3.3", "2.3", "1.3"]),
        ("status=out_of_turns", ["5.1", "4.1", "3.1", "2.1", "1.1"]),
        ("order=credit", ["5.2", "5.1", "5.0", "4.2", "4.1"]),
        ("order=credit&direction=up", ["0.0", "0.1", "0.2", "1.0", "1.1"]),
        ("order=errors", ["5.1", "4.1", "3.1", "2.1", "1.1"]),
        ("text=STYLE-A/3", ["3.3", "3.2", "3.1", "3.0"]),
        ("text=no+route", ["5.3", "4.3", "3.3", "2.3", "1.3"]),
        ("text=no+route&fate=trained", []),
        ("status=nonsense&page=x&order=nonsense", ["5.3", "5.2", "5.1", "5.0", "4.3"]),
    ],
)
def test_attempts_are_filtered_sorted_and_searched(client: httpx.Client, query: str, found: list[str]) -> None:
    assert rows(client.get(f"/run/alba/attempts?{query}"))[:5] == found


def test_no_attempt_and_a_run_without_attempts_are_explained(client: httpx.Client) -> None:
    assert "No attempt fits" in plain(client.get("/run/alba/attempts?text=zebra"))


def test_an_attempt_shows_turns_calls_results_and_rewards(client: httpx.Client) -> None:
    page = client.get("/run/alba/attempt/1.1.0%3Astyle-a%2F1")
    text = plain(page)
    for part in ("Where was the ruler of Alba2 born?", "out of turns", "trained", "Group 1, sample 1", "step 2"):
        assert part in text
    assert "search tool_failed 0.2 s found 0 query Who rules Alba2? k 3 Result Alba: ruler Bruno." in text
    assert "format -0.5" in text and "steps 0.5, 0.25" in text
    assert "weights 0 · engine 0.8 s, environment 2.5 s" in text
    assert "environment failed: connectionerror" in plain(client.get("/run/alba/attempt/1.3.0:style-a/1")).lower()


def test_tokens_carry_levels_for_their_colors_and_exact_figures(client: httpx.Client) -> None:
    page = client.get("/run/alba/attempt/1.0.0:style-a/1").text
    tokens = re.findall(r'<span class="t ([^"]+)" data-f=\'([^\']+)\'>', page)
    assert tokens[0] == ("a8 g4 l0 e1", '["9", "-0.1", "-0.1", "0", "1.5", "0.01", "0.3", ""]')
    assert tokens[1] == ("a8 g8 l4 e4", '["2", "-2.5", "-2.25", "0.25", "1.5", "0.01", "0.9", ""]')
    assert tokens[2] == ("a6 g4 l1 e0 masked", '["4", "-0.4", "-0.4", "0", "0.75", "0", "0.1", ""]')
    sibling = client.get("/run/alba/attempt/1.1.0:style-a/1").text
    assert 'class="t a3 ' in sibling  # -0.5 is a third of the largest advantage of the group
    other = client.get("/run/alba/attempt/1.2.0:style-a/1").text
    assert "were not recorded" in other and 'data-color="a"' not in other and 'data-color="l"' in other


def test_a_rewritten_context_is_shown_as_a_branch(client: httpx.Client) -> None:
    page = plain(client.get("/run/alba/attempt/1.2.0:style-a/1"))
    assert "2 branches" in page and re.search(r"The policy saw 2 messages\s+system\s+What you found: Bruno\.", page)
    other = plain(client.get("/run/alba/attempt/1.0.0:style-a/1"))
    assert "branches" not in other and "The policy saw" not in other


def test_neighbors_follow_the_filter_and_order_of_the_table(client: httpx.Client) -> None:
    page = Page(client.get("/run/alba/attempt/2.1.0:style-a/2?status=out_of_turns&order=credit").text)
    assert page.links["Next →"].startswith("/run/alba/attempt/1.1.0%3Astyle-a%2F1?status=out_of_turns&order=credit")
    assert page.links["← Previous"].startswith("/run/alba/attempt/3.1.0%3Astyle-a%2F3?")
    assert page.links["attempts"] == "/run/alba/attempts?status=out_of_turns&order=credit"
    page = Page(client.get("/run/alba/attempt/2.1.0:style-a/2?status=out_of_turns&direction=up").text)
    assert page.links["Next →"].endswith("/3.1.0%3Astyle-a%2F3?status=out_of_turns&direction=up")


def test_a_group_stands_side_by_side(client: httpx.Client) -> None:
    page = client.get("/run/alba/group/1")
    assert re.findall(r'column-head"><h2><a [^>]+>(\d+\.\d+)', page.text) == ["1.0", "1.1", "1.2"]
    chosen = client.get("/run/alba/group/1?show=3.0")
    assert re.findall(r'column-head"><h2><a [^>]+>(\d+\.\d+)', chosen.text) == ["1.3"]


def test_an_attempt_that_is_still_running_says_so(client: httpx.Client) -> None:
    text = plain(client.get("/run/bruno/attempt/99.0.0:style-a/99"))
    assert "This attempt has not ended" in text and "pending" in text


@pytest.mark.parametrize(
    "path",
    [
        *("/run/unknown", "/run/alba/attempt/9.9.9:x", "/run/alba/group/77", "/x"),
        *(f"/run/alba/group/{2**64}", f"/run/alba/attempt/{2**64}.0.0:x"),
    ],
)
def test_what_does_not_exist_is_not_found(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and "All runs" in answer.text


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(recorded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(recorded / "alba", tmp_path / "broken"))
    (folder / "run.db").write_bytes(b"SQLite format 3\x00" + bytes(100))
    with ViewerServer(create_app(Catalog([folder]), {}, lambda name: None)) as server, httpx.Client() as browser:
        assert "broken" in plain(browser.get(server.url, follow_redirects=True))
        answer = browser.get(f"{server.url.split('/?')[0]}/run/broken")
    assert answer.status_code == 422 and "Traceback" not in answer.text


def test_a_damaged_attempt_is_refused_in_one_line_and_the_others_are_shown(recorded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(recorded / "alba", tmp_path / os.fsdecode(b"named \xff")))
    with closing(sqlite3.connect(folder / "run.db")) as connection, connection:
        connection.execute(
            "UPDATE turns SET content = x'00' WHERE turn = 0 AND attempt_id = (SELECT min(id) FROM attempts)"
        )
    with ViewerServer(create_app(Catalog([tmp_path]), {}, lambda name: None)) as server, httpx.Client() as browser:
        assert "named \\udcff" in plain(browser.get(server.url, follow_redirects=True))
        run = f"{server.url.split('/?')[0]}/run/named%20%5Cudcff"
        for page in ("attempt/0.0.0:style-a/0", "group/0"):
            answer = browser.get(f"{run}/{page}")
            assert answer.status_code == 422 and "the record is damaged" in answer.text
        assert browser.get(f"{run}/attempt/1.0.0:style-a/1").status_code == 200


def test_a_page_shows_new_records_while_the_run_is_written(growing: tuple[Path, RunWriter]) -> None:
    folder, writer = growing
    with ViewerServer(create_app(Catalog([folder.parent]), {}, lambda name: None)) as server, httpx.Client() as browser:
        browser.get(server.url, follow_redirects=True)
        base = server.url.split("/?")[0]
        before = browser.get(f"{base}/revision?run=bruno").text
        assert "training" in plain(browser.get(f"{base}/run/bruno"))
        asyncio.run(writer.record(*step_events("bruno", 4)))
        assert browser.get(f"{base}/revision?run=bruno").text != before
        assert "Step 4 / 3" in plain(browser.get(f"{base}/run/bruno"))


def test_many_attempts_that_meet_the_conditions_are_counted_up_to_a_limit(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_r1.viewer.app.MAX_COUNTED", 5)
    monkeypatch.setattr("agent_r1.viewer.app.PAGE", 4)
    page = client.get("/run/alba/attempts?fate=trained")
    assert "more than 5 of 24 in this run" in plain(page) and len(rows(page)) == 4
    assert rows(client.get("/run/alba/attempts?fate=trained&page=2")) == ["4.1", "4.0", "3.2", "3.1"]
    assert "Attempts 4 of 24 in this run" in plain(client.get("/run/alba/attempts?text=style-a/3"))
    assert "Attempts 1 of 13 in this run" in plain(client.get("/run/bruno/attempts?fate=pending"))


def test_a_page_shows_at_most_so_many_tokens_one_by_one_and_further_turns_as_text(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_r1.viewer.app.MAX_TOKENS", 5)
    page = client.get("/run/alba/attempt/1.0.0%3Astyle-a%2F1").text  # two turns of three tokens
    assert page.count(" data-f=") == 3
    assert page.count("because the page has too many tokens") == 1
    assert "&lt;search&gt;Where was Bruno born?&lt;/search&gt;" in page
