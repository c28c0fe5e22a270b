"""The pages of the viewer as a Starlette application. Requests never change a run."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from agent_r1.core.errors import InvalidInput
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.store.reader import AttemptFateName, AttemptFilter, AttemptOrder, AttemptSummary, RunReader
from agent_r1.store.rows import DECODING_ERRORS
from agent_r1.viewer.catalog import Catalog
from agent_r1.viewer.charts import draw_comparison, draw_other, draw_run
from agent_r1.viewer.conversation import Conversation, make_conversation
from agent_r1.viewer.report import differing_settings, interval, read_report, summarize
from agent_r1.viewer.text import as_json, duration, number, one_line, reward_texts, shortened, timing_text, visible
from agent_r1.viewer.tokens import Scale, find_tokenizer, load_tokenizer, make_scales, token_classes, token_figures

HERE = Path(__file__).parent
STATIC: Mapping[str, str] = {"style.css": "text/css", "app.js": "text/javascript", "icon.svg": "image/svg+xml"}
"""The static files that are served, with their MIME types."""

PAGE = 50
"""The number of attempts on a page of the table."""

MAX_COMPARED = 8
"""The largest number of runs on a page that compares runs, and of attempts on a page that compares attempts."""

MAX_SCALED = 32
"""At most this many attempts of a group are read to find the largest advantage, which gets the strongest color."""

MAX_SHOWN, MAX_WHOLE, COLUMN_TEXT = 20_000, 2_000_000, 4000
"""The largest number of characters of each text on a page of one attempt, on such a page for long texts
(``?whole=1``), and on a page with attempts side by side. A longer text is cut."""

MAX_TOKENS = 20_000
"""The largest number of tokens that a page shows one by one. Each attempt gets an equal part of this number."""

MAX_EVENTS = 200

MAX_COUNTED = 1000
"""The attempts of a table are counted only up to this number, because counting all of them can take too long."""

FATES: Sequence[AttemptFateName] = ("trained", "dropped", "pending")

FindModel = Callable[[str], Path | None]
"""A function that takes a run's setting ``model``, and returns the folder of the model, or None."""


@dataclass(frozen=True, slots=True)
class TableQuery:
    """The URL query of the table of attempts: conditions, order and page, such as ``?status=completed&page=2``."""

    where: AttemptFilter = AttemptFilter()  # noqa: RUF009  (a frozen value)
    order: AttemptOrder = "started"
    descending: bool = True
    page: int = 1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> TableQuery:
        """Parse a URL query. Values that cannot be parsed are ignored."""
        where = AttemptFilter(
            status=next((one for one in Status if one.value == query.get("status")), None),
            fate=next((one for one in FATES if one == query.get("fate")), None),
            text=query.get("text", "").strip()[:200] or None,
        )
        order: AttemptOrder = next((one for one in get_args(AttemptOrder) if one == query.get("order")), "started")
        page = query.get("page", "")
        number_of = int(page) if page.isascii() and page.isdecimal() and len(page) < 10 else 1
        return cls(where, order, query.get("direction") != "up", max(1, number_of))

    def write(self, page: int | None = None) -> str:
        """Return the URL query, with another page if ``page`` is given; "" if all values are default values."""
        page = self.page if page is None else page
        values = {
            "status": self.where.status,
            "fate": self.where.fate,
            "text": self.where.text,
            "order": None if self.order == "started" else self.order,
            "direction": None if self.descending else "up",
            "page": None if page == 1 else page,
        }
        given = {name: str(value) for name, value in values.items() if value is not None}
        return f"?{urlencode(given)}" if given else ""

    def sorted_by(self, order: AttemptOrder) -> str:
        """Return the URL query of the first page in another order, or in the reverse of this one."""
        return replace(self, order=order, descending=not self.descending or order != self.order).write(1)


class Viewer:
    """The pages of ``agent-r1 view``. Each method that takes a request returns one kind of page.

    Args:
        defaults: the default of each setting, by its dotted key.
        find_model: finds the model that a run began with. If the run has not saved a tokenizer, the model's tokenizer
            is used.
    """

    def __init__(self, catalog: Catalog, defaults: Mapping[str, Any], find_model: FindModel) -> None:
        self._catalog, self._defaults, self._find_model = catalog, defaults, find_model
        self._static = {name: HERE.joinpath("static", name).read_bytes() for name in STATIC}
        self._pages = _environment()
        self._load_tokenizer = lru_cache(maxsize=8)(load_tokenizer)

    def routes(self) -> list[Route]:
        return [
            Route("/", self.runs),
            Route("/compare", self.compare),
            Route("/revision", self.revision),
            Route("/run/{run}", self.run),
            Route("/run/{run}/attempts", self.attempts),
            Route("/run/{run}/attempt/{attempt:path}", self.attempt),
            Route("/run/{run}/group/{group:int}", self.group),
            Route("/run/{run}/image/{sha256}", self.image),
            Route("/static/{name}", self.static),
        ]

    def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            raise HTTPException(404, "there is no such file")
        return Response(self._static[name], media_type=STATIC[name])

    def image(self, request: Request) -> Response:
        with closing(RunReader(self._find(request)[1])) as reader:
            image = reader.image(request.path_params["sha256"])
        if image is None:
            raise HTTPException(404, "the run holds no image with this hash")
        return Response(image.data, media_type=image.mime)

    def revision(self, request: Request) -> Response:
        """Return a text that changes whenever a run changes, so that a page can notice new data.

        A query such as ``?run=demo&run=other`` names the runs. Without a query, the text is about all runs.
        """
        runs = self._catalog.runs()
        chosen = [run for run in request.query_params.getlist("run")[:MAX_COMPARED] if run in runs]
        parts = []
        for name in chosen or runs:
            try:
                with closing(RunReader(runs[name])) as reader:
                    parts.append(f"{name}:{reader.revision()}")
            except (InvalidInput, sqlite3.Error, OSError):
                parts.append(f"{name}:-")
        return PlainTextResponse(" ".join(parts))

    def runs(self, request: Request) -> Response:
        summaries = [summarize(name, folder) for name, folder in self._catalog.runs().items()]
        return self._page("runs.html", summaries=summaries, places=self._catalog.places)

    def run(self, request: Request) -> Response:
        name, folder = self._find(request)
        with closing(RunReader(folder)) as reader, damage_refused():
            report = read_report(name, folder, reader, self._defaults)
        charts, others = draw_run(report.curves), draw_other(report.curves)
        events = report.events[: -MAX_EVENTS - 1 : -1]
        return self._page(
            "run.html", report=report, summary=report.summary, charts=charts, others=others, events=events
        )

    def compare(self, request: Request) -> Response:
        runs = self._catalog.runs()
        chosen = list(dict.fromkeys(run for run in request.query_params.getlist("run") if run in runs))[:MAX_COMPARED]
        reports = []
        for name in chosen:
            with closing(RunReader(runs[name])) as reader, damage_refused():
                reports.append(read_report(name, runs[name], reader, self._defaults))
        curves = {report.summary.name: report.curves for report in reports}
        return self._page(
            "compare.html",
            summaries=[report.summary for report in reports],
            charts=draw_comparison(curves),
            others=draw_comparison(curves, of_parts=True),
            settings=differing_settings(reports),
            names=[*chosen, *(name for name in runs if name not in chosen)],
        )

    def attempts(self, request: Request) -> Response:
        name, folder = self._find(request)
        query = TableQuery.read(request.query_params)
        start = PAGE * (query.page - 1)
        with closing(RunReader(folder)) as reader:
            # One attempt more than is shown: whether there is a next page.
            found = reader.list_attempts(
                query.where, sort=query.order, descending=query.descending, limit=PAGE + 1, offset=start
            )
            has_condition = query.where != AttemptFilter()
            matching = reader.count_attempts(query.where, MAX_COUNTED + 1) if has_condition else None
            total = sum(reader.count_fates().values())
        return self._page(
            "attempts.html",
            run=name,
            query=query,
            found=found[:PAGE],
            has_more=len(found) > PAGE,
            matching=matching,
            counted=MAX_COUNTED,
            total=total,
            statuses=list(Status),
            fates=FATES,
        )

    def attempt(self, request: Request) -> Response:
        name, folder = self._find(request)
        query = TableQuery.read(request.query_params)
        whole = "whole" in request.query_params
        with closing(RunReader(folder)) as reader, damage_refused():
            summary = reader.find_attempt(request.path_params["attempt"])
            if summary is None:
                raise HTTPException(404, "there is no attempt of this name, or it was superseded")
            siblings = reader.siblings(summary.attempt)
            (conversation,), scales = self._conversations(folder, reader, [summary], siblings)
            before, after = reader.neighbors(summary.attempt, query.where, query.order, query.descending)
        most = MAX_WHOLE if whole else MAX_SHOWN
        return self._page(
            "attempt.html",
            run=name,
            query=query,
            one=summary,
            conversation=conversation,
            scales=scales,
            siblings=siblings,
            before=before,
            after=after,
            most=most,
            has_longer=conversation is not None and conversation.longest_text > most and not whole,
            coloring=request.query_params.get("color", ""),
        )

    def group(self, request: Request) -> Response:
        name, folder = self._find(request)
        group, wanted = request.path_params["group"], request.query_params.getlist("show")
        with closing(RunReader(folder)) as reader, damage_refused():
            # A larger number does not fit into the database.
            found = reader.list_attempts(AttemptFilter(group_id=group), limit=200) if group < 2**63 else ()
            if not found:
                raise HTTPException(404, f"there is no group {group} in this run")
            chosen = [one for one in found if f"{one.attempt.sample_index}.{one.attempt.retry}" in wanted]
            shown = chosen[:MAX_COMPARED] or best_and_worst(found)
            conversations, scales = self._conversations(folder, reader, shown, found)
        columns = list(zip(shown, conversations, strict=True))
        return self._page(
            "group.html", run=name, group=group, found=found, columns=columns, scales=scales, most=COLUMN_TEXT
        )

    def _find(self, request: Request) -> tuple[str, Path]:
        name = request.path_params["run"]
        folder = self._catalog.runs().get(name)
        if folder is None:
            raise HTTPException(404, "there is no run of this name")
        return name, folder

    def _conversations(
        self, folder: Path, reader: RunReader, shown: Sequence[AttemptSummary], group: Sequence[AttemptSummary]
    ) -> tuple[list[Conversation | None], tuple[Scale, ...]]:
        tokenizer = self._load_tokenizer(
            find_tokenizer(folder, self._find_model(str(reader.config().get("model", ""))))
        )
        conversations: list[Conversation | None] = []
        for one in shown:
            trajectory, records = reader.trajectory(one.attempt), reader.token_records(one.attempt)
            each = MAX_TOKENS // len(shown)
            conversations.append(
                None if trajectory is None else make_conversation(trajectory, records, tokenizer, each)
            )
        recorded = [one.attempt for one in group if one.has_token_records][:MAX_SCALED]
        advantages = [
            number for one in recorded for record in reader.token_records(one) for number in record.advantages
        ]
        tokens = [token for one in conversations if one is not None for turn in one.turns for token in turn.tokens]
        return conversations, make_scales(tokens, advantages)

    def _page(self, template: str, **values: Any) -> Response:
        return HTMLResponse(self._pages.get_template(template).render(now=time.time(), **values))


def create_app(catalog: Catalog, defaults: Mapping[str, Any], find_model: FindModel) -> Starlette:
    """Return the web application of the viewer. For the arguments, see :class:`Viewer`.

    The application checks no token: run it behind a :class:`~agent_r1.viewer.server.Guard`.
    """
    viewer = Viewer(catalog, defaults, find_model)
    app = Starlette(routes=viewer.routes())
    pages = _environment()

    def refuse(status: int, line: str) -> Response:
        page = pages.get_template("error.html").render(status=status, line=line, now=time.time())
        return HTMLResponse(page, status)

    app.add_exception_handler(HTTPException, lambda _, error: refuse(error.status_code, error.detail))
    app.add_exception_handler(InvalidInput, lambda _, error: refuse(422, str(error)))
    app.add_exception_handler(OSError, lambda _, error: refuse(422, f"the run cannot be read: {error}"))
    app.add_exception_handler(sqlite3.Error, lambda _, error: refuse(422, f"the database cannot be read: {error}"))
    return app


@contextmanager
def damage_refused() -> Iterator[None]:
    """Raise HTTPException (status 422) if the ``with`` block cannot decode a record of a run."""
    try:
        yield
    except DECODING_ERRORS as error:
        line = f"the record is damaged ({type(error).__name__}: {error}); 'agent-r1 verify RUN' lists all damage"
        raise HTTPException(422, line) from error


def run_path(run: str) -> str:
    return f"/run/{quote_segment(run)}"


def quote_segment(value: object) -> str:
    return quote(str(value), safe="", errors="backslashreplace")


def attempt_path(attempt: AttemptId) -> str:
    """Return the name of an attempt in URLs: the id of the attempt without the name of the run."""
    return str(attempt).removeprefix(f"{attempt.run}:")


def best_and_worst(group: Sequence[AttemptSummary]) -> list[AttemptSummary]:
    """Return the attempts with the two lowest and the two highest totals of rewards, in the order of ``group``."""
    known = sorted((one for one in group if one.reward is not None), key=lambda one: one.reward or 0.0)
    chosen = {one.attempt for one in [*known[:2], *known[-2:]]} or {one.attempt for one in group[:4]}
    return [one for one in group if one.attempt in chosen]


def _environment() -> Environment:
    pages = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    pages.filters |= {
        "number": number,
        "duration": duration,
        "line": one_line,
        "shown": lambda text, most: visible(shortened(text, most)),
        "timing": timing_text,
        "rewards": reward_texts,
        "classes": token_classes,
        "figures": token_figures,
        "interval": interval,
        "path": quote_segment,
        "attempt_path": attempt_path,
        "ago": lambda then, now: duration(round(max(0.0, now - then))),
        "clock": lambda then: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(then)),
        "value": lambda value: value if isinstance(value, str) else as_json(value),
        "setting": lambda value: one_line(value if isinstance(value, str) else as_json(value), 500),
    }
    pages.globals |= {"urlencode": urlencode}
    return pages
