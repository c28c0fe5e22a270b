"""In Chromium: the pages work by mouse and keyboard, live, in both themes, and run no script and load nothing else.

    PYTHONPATH=tests python tests/viewer/test_browser.py RUNS FOLDER

takes the pictures of the documents from the runs in RUNS, and writes them to FOLDER.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hostile_texts import HOSTILE
from viewed_runs import GROUP_SIZE, HOSTILE_RUN, step_events

from agent_r1.store.reader import RunReader
from agent_r1.store.writer import RunWriter
from agent_r1.viewer.app import attempt_path, create_app
from agent_r1.viewer.catalog import Catalog
from agent_r1.viewer.server import ViewerServer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("Chromium is not installed (apt-get install chromium)", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make install)")

OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
PATIENCE_MS = 120_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        yield browser
        browser.close()


class Window:
    """A page of the browser that has opened the viewer. It notes every message, dialog and request to elsewhere."""

    def __init__(self, chromium: Any, server: ViewerServer, **options: Any) -> None:
        self.base = server.url.split("/?")[0]
        self.complaints: list[str] = []
        self.context = chromium.new_context(viewport={"width": 1360, "height": 900}, **options)
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.complaints.append("dialog"), dialog.dismiss()))
        self.page.on("request", self._on_request)
        self.page.goto(server.url)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith(f"{self.base}/"):
            self.complaints.append(f"request: {request.url}")

    def go(self, path: str) -> Any:
        self.page.goto(self.base + path)
        return self.page

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def rows(self) -> list[str]:
        return list(self.page.locator("[data-open]").all_inner_texts())


@pytest.fixture
def window(chromium: Any, server: ViewerServer) -> Iterator[Window]:
    window = Window(chromium, server)
    yield window
    window.context.close()
    assert window.complaints == []


def test_filter_sort_and_search_by_mouse(window: Window) -> None:
    page = window.go("/run/alba/attempts")
    page.select_option("select[name=status]", "out_of_turns")  # a choice filters at once
    page.wait_for_url("**/attempts?status=out_of_turns")
    assert window.rows() == ["5.1", "4.1", "3.1", "2.1", "1.1", "0.1"]
    page.click("[data-sort=credit]")
    page.wait_for_url("**order=credit")
    assert page.locator("[aria-sort=descending]").text_content() == "Credit↓"
    page.click("[data-sort=credit]")
    page.wait_for_url("**direction=up")
    assert window.rows()[0] == "0.1"
    page.fill("[data-search]", "a/2")
    page.press("[data-search]", "Enter")
    page.wait_for_url("**text=a%2F2**")
    assert window.rows() == ["2.1"] and "from=" not in page.url
    page.click("text=Clear")
    page.wait_for_url("**/attempts")
    assert len(window.rows()) == 24


def test_the_printed_address_opens_from_a_link_on_another_site(chromium: Any, server: ViewerServer) -> None:
    base, _, token = server.url.partition("/?")
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    tab.goto(f"{base.replace('127.0.0.1', 'localhost')}/")  # for a browser, localhost is another site than 127.0.0.1
    link = f"Object.assign(document.createElement('a'), {{href: '{base}/run/alba?{token}'}})"
    with tab.expect_navigation():
        tab.evaluate(f"document.body.appendChild({link}).click()")
    assert tab.title().endswith(" · agent-r1") and tab.url == f"{base}/run/alba"
    context.close()


def test_the_keyboard_leads_through_list_attempts_turns_and_pages(window: Window) -> None:
    page = window.go("/run/alba/attempts?status=completed")
    window.press("j", "j", "k", "j")
    assert page.locator("tr.current [data-open]").inner_text() == "5.0"
    window.press("Enter")
    page.wait_for_url("**/attempt/5.0.0**")
    window.press("j")
    page.wait_for_url("**/attempt/4.2.0**")
    window.press("k")
    page.wait_for_url("**/attempt/5.0.0**")
    window.press("g", "s")
    page.wait_for_url("**/group/5")
    window.press("g", "a")
    page.wait_for_url("**/attempts")
    window.press("/")
    assert page.evaluate("document.activeElement.name") == "text"
    window.press("j")  # in a field, a letter is text
    assert page.input_value("[data-search]") == "j"
    window.press("Escape")
    window.press("g", "o")
    page.wait_for_url("**/run/alba")
    window.press("?")
    assert page.locator("dialog[open] kbd").count() > 10
    window.press("Escape", "g", "r")
    page.wait_for_url(f"{window.base}/")


def test_charts_and_tokens_show_exact_figures_to_pointer_and_keyboard(window: Window) -> None:
    page = window.go("/run/alba")
    page.locator(".plot svg").first.hover(position={"x": 60, "y": 60})
    assert page.locator(".tip").inner_text().split("\n")[:3] == ["step 1", "total", "0.1"]
    page.locator(".plot svg").nth(2).focus()
    window.press("ArrowLeft")
    assert page.locator(".tip").inner_text().startswith("step 5\nentropy\n0.4")
    page = window.go("/run/alba/attempt/1.0.0%3Astyle-a%2F1")
    page.locator(".tokens .t").nth(1).hover()
    assert "gap\n0.25\nadvantage\n1.5" in page.locator(".tip").inner_text()
    page.set_viewport_size({"width": 1360, "height": 500})
    token = page.locator(".tokens .t").nth(4)
    token.evaluate("token => token.scrollIntoView({block: 'end'})")
    token.hover()  # at the lower end of the window, the figures stand above the token
    token_box, tip_box = token.bounding_box(), page.locator(".tip").bounding_box()
    assert tip_box["y"] + tip_box["height"] <= token_box["y"]
    page.locator(".tokens").first.focus()
    window.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert "loss weight\n0\n" in page.locator(".tip").inner_text()


def test_the_coloring_of_tokens_changes_and_is_remembered(window: Window) -> None:
    color = "getComputedStyle(document.querySelectorAll('.tokens .t')[1]).backgroundColor"
    page = window.go("/run/alba/attempt/1.1.0%3Astyle-a%2F1")
    by_advantage = page.evaluate(color)
    page.click("text=Log-probability gap")
    assert page.locator(".scale:visible").get_attribute("data-scale") == "g"
    by_gap = page.evaluate(color)
    window.press("j")
    page.wait_for_url("**/attempt/1.0.0**")
    assert page.locator(".segment[aria-checked=true]").inner_text() == "Log-probability gap"
    window.press("c")
    assert page.locator(".segment[aria-checked=true]").inner_text() == "Log-probability"
    page.click("text=Plain")
    assert page.evaluate(color) == "rgba(0, 0, 0, 0)"
    assert len({by_advantage, by_gap, "rgba(0, 0, 0, 0)"}) == 3


def test_the_theme_follows_the_system_and_can_be_switched(chromium: Any, server: ViewerServer) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    colors = {}
    for scheme in ("light", "dark"):
        window = Window(chromium, server, color_scheme=scheme)
        colors[scheme] = window.page.evaluate(ground)
        window.page.click("[data-action=theme]")
        switched = window.page.evaluate(ground)
        window.page.reload()
        assert window.page.evaluate(ground) == switched != colors[scheme]
        window.context.close()
        assert window.complaints == []
    assert colors["light"] != colors["dark"]


LOW_CONTRAST = """() => {
  const channels = (color) => [...color.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const luminance = (rgb) => rgb.map((one) => one / 255)
    .map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
  const ground = (element) => {
    const color = channels(getComputedStyle(element).backgroundColor);
    return color[3] === 1 ? color.slice(0, 3) : ground(element.parentElement);
  };
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  return [...document.querySelectorAll("body *")].filter(hasText).filter((element) => {
    if (!element.getClientRects().length || element.matches(".sep, .sr, :disabled, .off")) return false;
    const style = getComputedStyle(element);
    const color = channels(element.closest("svg") ? style.fill : style.color).slice(0, 3);
    const [low, high] = [luminance(color), luminance(ground(element))].sort((one, other) => one - other);
    return (high + 0.05) / (low + 0.05) < 4.5;
  }).map((element) => `${element.tagName}.${element.getAttribute("class")}: ${element.textContent.slice(0, 40)}`);
}"""
"""Returns the elements with text whose contrast is below 4.5, the minimum of WCAG 2.1 (level AA)."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(chromium: Any, server: ViewerServer, scheme: str) -> None:
    window = Window(chromium, server, color_scheme=scheme)
    for path in ("/run/alba", "/run/alba/attempts", "/run/alba/group/1?show=1.0&show=2.0&show=3.0"):
        assert window.go(path).evaluate(LOW_CONTRAST) == [], path
    window.context.close()


def test_a_page_grows_with_its_run_and_keeps_what_is_chosen(chromium: Any, growing: tuple[Path, RunWriter]) -> None:
    folder, writer = growing
    with ViewerServer(create_app(Catalog([folder.parent]), {}, lambda name: None)) as server:
        window = Window(chromium, server)
        window.page.check("input[name=run]")
        page = window.context.new_page()
        page.goto(f"{window.base}/run/bruno")
        page.wait_for_selector(".live.on")
        assert page.locator(".stats dd").first.inner_text() == "3 / 3"
        with ThreadPoolExecutor(1) as thread:  # playwright runs an event loop in this thread
            thread.submit(asyncio.run, writer.record(*step_events("bruno", 4))).result()
        sync_api.expect(page.locator(".stats dd").first).to_have_text("4 / 3", timeout=PATIENCE_MS)
        assert (
            '"step 4' not in page.content() and page.locator(".line").first.get_attribute("data-values").count("[") == 5
        )
        sync_api.expect(window.page.locator("tbody")).to_contain_text("4 / 3", timeout=PATIENCE_MS)
        assert window.page.is_checked("input[name=run]")
        window.context.close()
    assert window.complaints == []


def test_narrow_windows_do_not_scroll_sideways(chromium: Any, server: ViewerServer) -> None:
    window = Window(chromium, server)
    window.page.set_viewport_size({"width": 390, "height": 800})
    pages = ("/", "/run/alba", "/run/alba/attempts", "/run/alba/attempt/1.0.0%3Astyle-a%2F1", "/run/alba/group/1")
    for path in (*pages, "/compare?run=alba&run=bruno", f"/run/{quote(HOSTILE_RUN, safe='')}"):
        page = window.go(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
    cells = "all => all.map(e => [e.innerText, e.getBoundingClientRect().right <= innerWidth])"
    shown = window.go("/").eval_on_selector_all("tr:has([href='/run/alba']) > :nth-child(-n + 6)", cells)
    assert shown[1:3] == [["alba", True], ["complete\n6 / 6", True]] and shown[4:] == [["0.6", True], ["0.5", True]]
    widths = window.go("/run/alba").eval_on_selector_all(".events td:last-child", "all => all.map(e => e.clientWidth)")
    assert widths and min(widths) > 250  # a detail has a line of its own
    crumbs = "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"
    assert window.go(pages[3]).eval_on_selector_all(".crumbs a", crumbs) == []
    window.context.close()


def test_hostile_texts_run_nothing(window: Window) -> None:
    name = quote(HOSTILE_RUN, safe="")
    own = "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes]).filter(a => /^on|^style$/.test(a.name))"
    foreign = "document.querySelectorAll('iframe, object, embed, img, video, audio, base, style, math, template')"
    whole = "&".join(f"show={index}.0" for index in range(GROUP_SIZE))
    groups = [f"/run/{name}/group/{group}?{whole}" for group in range(len(HOSTILE) // GROUP_SIZE)]
    for path in ("/", f"/run/{name}", f"/run/{name}/attempts", f"/compare?run={name}&run=alba", *groups):
        page = window.go(path)
        assert page.title().endswith(" · agent-r1"), path
        assert page.evaluate(f"[document.scripts.length, {foreign}.length, {own}.length]") == [1, 0, 0], path
        for place in (".tokens .t", ".plot svg"):
            if page.locator(place).count():
                page.locator(place).first.hover()
                assert page.evaluate(f"[document.scripts.length, {foreign}.length]") == [1, 0], path
    assert page.locator(".column").count() == GROUP_SIZE
    window.go(f"/run/{name}/attempts")
    window.press("j", "Enter")
    window.page.wait_for_url("**/attempt/**")
    assert window.page.evaluate(f"[document.scripts.length, {foreign}.length, {own}.length - 0]")[:2] == [1, 0]


def take_pictures(runs: Path, folder: Path) -> None:
    """Write the pictures of the documents, from runs that were trained."""
    from agent_r1.commands.recorded_run import default_settings, find_model

    folder.mkdir(exist_ok=True)
    with (
        sync_api.sync_playwright() as playwright,
        ViewerServer(create_app(Catalog([runs]), default_settings(), find_model)) as server,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        for name, (path, scheme, height) in PICTURES.items():
            window = Window(browser, server, color_scheme=scheme)
            window.page.set_viewport_size({"width": 1280, "height": height})
            page = window.go(path.format(grpo=recorded_attempt(runs / GRPO), ppo=recorded_attempt(runs / PPO)))
            page.wait_for_timeout(500)
            page.screenshot(path=folder / f"viewer-{name}.png")
            window.context.close()


def recorded_attempt(run: Path) -> str:
    """Return the page of an attempt of the latest step whose tokens were recorded, with the highest return."""
    with closing(RunReader(run)) as reader:
        recorded = [
            one for one in reader.list_attempts(sort="step", descending=True, limit=600) if one.has_token_records
        ]
        best = max((one for one in recorded if one.step == recorded[0].step), key=lambda one: one.reward or 0.0)
    return f"/run/{run.name}/attempt/{quote(attempt_path(best.attempt), safe='')}"


GRPO, PPO = "tinywiki-grpo", "tinywiki-ppo"
PICTURES = {
    "runs": ("/", "light", 360),
    "run": (f"/run/{GRPO}", "light", 1000),
    "run-dark": (f"/run/{GRPO}", "dark", 1000),
    "compare": (f"/compare?run={GRPO}&run={PPO}", "light", 800),
    "attempts": (f"/run/{GRPO}/attempts?order=credit", "light", 700),
    "attempt": ("{ppo}?color=a", "light", 1000),
    "attempt-dark": ("{grpo}?color=e", "dark", 1000),
    "group": (f"/run/{GRPO}/group/0", "light", 820),
}

if __name__ == "__main__":
    take_pictures(Path(sys.argv[1]), Path(sys.argv[2]))
