"""The pages of the viewer as a Starlette application. Requests never change a run."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from agent_r1.core.errors import InvalidInput
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.store.attempt_list import AttemptFilter, AttemptSummary
from agent_r1.store.attempt_search import AttemptPage
from agent_r1.store.invariants import DECODING_ERRORS
from agent_r1.store.reader import RunReader, read_file
from agent_r1.viewer.attempt_page import Conversation, RecordedAttempt, make_conversation, shared_scales
from agent_r1.viewer.catalog import Catalog, opened, read_curves, summarize, summarize_reader
from agent_r1.viewer.charts import draw_compared_parts, draw_comparison, draw_other, draw_run
from agent_r1.viewer.tables import (
    FATES,
    PAGE,
    TableQuery,
    algorithm_settings,
    differing_settings,
    listed_events,
    own_settings,
    read_table,
)
from agent_r1.viewer.text import MAX_SHOWN, MAX_WHOLE, as_json, duration, number, one_line, visible
from agent_r1.viewer.tokens import MAX_TOKENS, Scale, find_tokenizer, load_tokenizer

HERE = Path(__file__).parent
STATIC: Mapping[str, str] = {"style.css": "text/css", "app.js": "text/javascript", "icon.svg": "image/svg+xml"}
"""The static files that are served, with their MIME types."""

MAX_COMPARED = 8
"""The largest number of runs on a page that compares runs, and of attempts on a page that compares attempts."""

MAX_SCALED = 32
"""At most this many attempts of a group are read to find the largest advantage. This advantage gets the strongest
color."""

COLUMN_TEXT = 4000
"""The largest number of characters that are shown of each text on a page with attempts side by side."""

MAX_EVENTS = 200

MAX_COUNTED = 1000
"""The attempts of a table are counted only up to this number, because counting all of them can take too long."""

Settings = Mapping[str, Any]

FindModel = Callable[[str], Path | None]
"""A function that takes a run's setting ``model``, and returns the folder of the model, or None."""


class Viewer:
    """The pages of ``agent-r1 view``. Each method that takes a request returns one kind of page.

    Args:
        defaults: the default of each setting, by its dotted key.
        find_model: finds the model that a run began with. If the run has not saved a tokenizer, the model's tokenizer
            is used.
    """

    def __init__(self, catalog: Catalog, defaults: Settings, find_model: FindModel) -> None:
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
        _, folder = self._find(request)
        with opened(folder) as reader:
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
                with opened(runs[name]) as reader:
                    parts.append(f"{name}:{reader.revision()}")
            except (InvalidInput, sqlite3.Error, OSError):
                parts.append(f"{name}:-")
        return PlainTextResponse(" ".join(parts))

    def runs(self, request: Request) -> Response:
        summaries = [summarize(name, folder) for name, folder in self._catalog.runs().items()]
        return self._page("runs.html", summaries=summaries, places=self._catalog.places)

    def run(self, request: Request) -> Response:
        name, folder = self._find(request)
        with opened(folder) as reader:
            curves, config = read_curves(reader), reader.config()
            return self._page(
                "run.html",
                summary=summarize_reader(name, folder, reader),
                charts=draw_run(curves),
                others=draw_other(curves),
                settings=own_settings(config, self._defaults),
                algorithm=algorithm_settings(config),
                statuses=reader.count_statuses(),
                fates=reader.count_fates(),
                events=listed_events(reader, MAX_EVENTS),
                results=read_table(reader),
                file=read_file(reader),
            )

    def compare(self, request: Request) -> Response:
        runs = self._catalog.runs()
        chosen = list(dict.fromkeys(run for run in request.query_params.getlist("run") if run in runs))[:MAX_COMPARED]
        summaries, curves, configs = [], {}, {}
        for name in chosen:
            with opened(runs[name]) as reader:
                summaries.append(summarize_reader(name, runs[name], reader))
                curves[name], configs[name] = read_curves(reader), reader.config()
        return self._page(
            "compare.html",
            summaries=summaries,
            charts=draw_comparison(curves),
            others=draw_compared_parts(curves),
            settings=differing_settings(configs),
            names=[*chosen, *(name for name in runs if name not in chosen)],
        )

    def attempts(self, request: Request) -> Response:
        name, folder = self._find(request)
        query = TableQuery.read(request.query_params)
        with opened(folder) as reader:
            last = self._summary(reader, query.after).attempt if query.after else None
            with damage_refused():
                found = reader.page_attempts(query.listed, after=last, limit=PAGE)
            matching = _count_matching(reader, query, found)
            return self._page(
                "attempts.html",
                run=name,
                query=query,
                found=found,
                matching=matching,
                counted=MAX_COUNTED,
                total=sum(reader.count_fates().values()),
                statuses=list(Status),
                fates=FATES,
            )

    def attempt(self, request: Request) -> Response:
        name, folder = self._find(request)
        query = TableQuery.read(request.query_params)
        with opened(folder) as reader:
            summary = self._summary(reader, request.path_params["attempt"])
            whole = "whole" in request.query_params
            most = MAX_WHOLE if whole else MAX_SHOWN
            siblings = reader.siblings(summary.attempt)
            with damage_refused():
                scales, (conversation,) = self._conversations(folder, reader, [summary], siblings, most)
                before = reader.page_attempts(query.listed, after=summary.attempt, limit=1, backwards=True)
                after = reader.page_attempts(query.listed, after=summary.attempt, limit=1)
            return self._page(
                "attempt.html",
                run=name,
                query=query,
                one=summary,
                conversation=conversation,
                scales=scales,
                siblings=siblings,
                before=_first(before),
                after=_first(after),
                whole=whole,
                coloring=request.query_params.get("color", ""),
            )

    def group(self, request: Request) -> Response:
        name, folder = self._find(request)
        with opened(folder) as reader:
            group = request.path_params["group"]
            # A larger number does not fit into the database.
            found = reader.list_attempts(AttemptFilter(group_id=group), limit=200) if group < 2**63 else ()
            if not found:
                raise HTTPException(404, f"there is no group {group} in this run")
            wanted = request.query_params.getlist("show")
            chosen = [one for one in found if f"{one.attempt.sample_index}.{one.attempt.retry}" in wanted][
                :MAX_COMPARED
            ]
            shown = chosen or best_and_worst(found)
            with damage_refused():
                scales, conversations = self._conversations(folder, reader, shown, found, COLUMN_TEXT)
            columns = list(zip(shown, conversations, strict=True))
            return self._page("group.html", run=name, group=group, found=found, columns=columns, scales=scales)

    def _find(self, request: Request) -> tuple[str, Path]:
        name = request.path_params["run"]
        folder = self._catalog.runs().get(name)
        if folder is None:
            raise HTTPException(404, "there is no run of this name")
        return name, folder

    def _summary(self, reader: RunReader, path: str) -> AttemptSummary:
        summary = reader.find_attempt(path)
        if summary is None:
            raise HTTPException(404, "there is no attempt of this name, or it was superseded")
        return summary

    def _conversations(
        self,
        folder: Path,
        reader: RunReader,
        shown: Sequence[AttemptSummary],
        group: Sequence[AttemptSummary],
        most: int,
    ) -> tuple[tuple[Scale, ...], list[Conversation | None]]:
        file = find_tokenizer(folder, self._find_model(str(reader.config().get("model", ""))))
        tokenizer = None if file is None else self._load_tokenizer(file)
        recorded: list[RecordedAttempt | None] = []
        for one in shown:
            trajectory = reader.trajectory(one.attempt)
            records = reader.token_records(one.attempt)
            recorded.append(None if trajectory is None else RecordedAttempt(trajectory, records))
        with_records = [one.attempt for one in group if one.has_token_records][:MAX_SCALED]
        of_group = [record for attempt in with_records for record in reader.token_records(attempt)]
        scales = shared_scales(filter(None, recorded), of_group)
        each = MAX_TOKENS // max(1, len(recorded))
        views = [None if one is None else make_conversation(one, scales, tokenizer, most, each) for one in recorded]
        return scales, views

    def _page(self, template: str, **values: Any) -> Response:
        return HTMLResponse(self._pages.get_template(template).render(now=time.time(), **values))


def create_app(catalog: Catalog, defaults: Settings, find_model: FindModel) -> Starlette:
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


def _count_matching(reader: RunReader, query: TableQuery, found: AttemptPage) -> int | None:
    # A search for a text is not counted, because it would read every conversation.
    listed = query.listed
    if listed.text is not None or listed.where == AttemptFilter():
        return None
    if found.last is None and not query.after:
        return len(found.attempts)
    return reader.count_attempts(listed.where, MAX_COUNTED + 1)


def _first(page: AttemptPage) -> AttemptId | None:
    return page.attempts[0].attempt if page.attempts else None


def run_path(run: str) -> str:
    return f"/run/{quote_segment(run)}"


def quote_segment(value: object) -> str:
    return quote(str(value), safe="", errors="backslashreplace")


def attempt_path(attempt: AttemptId) -> str:
    """Return the name of an attempt in URLs: the id of the attempt without the name of the run.

    Example:
        >>> attempt_path(AttemptId(run="demo", task="style-a/7", group_id=3, sample_index=1, retry=0))
        '3.1.0:style-a/7'
    """
    return str(attempt).removeprefix(f"{attempt.run}:")


def best_and_worst(group: Sequence[AttemptSummary]) -> list[AttemptSummary]:
    """Return the attempts with the two lowest and the two highest totals of rewards, in the order of ``group``.

    If no attempt has a reward, return the first four attempts.
    """
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
        "visible": visible,
        "path": quote_segment,
        "attempt_path": attempt_path,
        "ago": lambda then, now: duration(round(max(0.0, now - then))),
        "clock": lambda then: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(then)),
        "setting": lambda value: one_line(value if isinstance(value, str) else as_json(value), 500),
    }
    pages.globals |= {"urlencode": urlencode}
    return pages
