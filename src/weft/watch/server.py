"""The server of live pages, on the loopback interface: pages, news as server-sent events, reports. Read-only.

News have ids. A browser that lost its connection gives the last one, and gets everything since.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn
from anyio.to_thread import run_sync
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from weft.errors import InputError, Violation
from weft.training.directory.overview import RunOverview, look_at, runs_in
from weft.watch.access import TokenRequired
from weft.watch.news_record import news_record
from weft.watch.watched_run import News, Seen, WatchedRun
from weft.web.pages.watch import list_record, watch_page

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 7878
POLL_S = 0.5
# The list of runs is read whole each time.
LIST_POLL_S = 2.0
# Proxies and browsers give up silent connections.
PING_S = 15


class Runs:
    """The runs of a folder, or a run directory alone. Each run is followed once, for all its viewers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._watched: dict[str, WatchedRun] = {}

    def path_of(self, name: str) -> Path:
        """Return the directory of a run, found by its name.

        Raises:
            HTTPException: if there is no run of this name: 404.
        """
        for path in runs_in(self.folder):
            if path.name == name:
                return path
        raise HTTPException(404, f"no run {name!r} in {self.folder}")

    def watched(self, name: str) -> WatchedRun:
        path = self.path_of(name)
        return self._watched.setdefault(name, WatchedRun(path))

    def overviews(self) -> list[RunOverview]:
        """Return the runs that can be read, the newest first."""
        found = []
        for path in runs_in(self.folder):
            with suppress(InputError):
                found.append(look_at(path))
        return sorted(found, key=lambda one: one.newest_s, reverse=True)


def watch_app(folder: Path, token: str, port: int) -> Starlette:
    """Return the application for a folder of runs, or for one run directory."""
    runs = Runs(folder)
    alone = (folder / "plan.json").is_file()

    def run_page(names: list[str]) -> Response:
        addresses = [_addresses(runs.path_of(name)) for name in names]
        return HTMLResponse(watch_page(" and ".join(names), addresses))

    def front(request: Request) -> Response:
        return run_page([folder.name]) if alone else HTMLResponse(watch_page(f"Runs in {folder}", None))

    def one(request: Request) -> Response:
        return run_page([request.path_params["name"]])

    def two(request: Request) -> Response:
        return run_page([request.path_params["first"], request.path_params["second"]])

    def report(request: Request) -> Response:
        path = runs.path_of(request.path_params["name"]) / "report.html"
        if not path.is_file():
            raise HTTPException(404, "the run has no report yet; it is written when the run ends")
        return FileResponse(path)

    async def news(request: Request) -> Response:
        run = await run_sync(runs.watched, request.path_params["name"])
        seen = Seen.parse(request.headers.get("last-event-id", ""))
        return EventSourceResponse(_news_of(run, seen), ping=PING_S)

    async def list_news(request: Request) -> Response:
        return EventSourceResponse(_changes(lambda: list_record(runs.overviews())), ping=PING_S)

    return Starlette(
        routes=[
            Route("/", front),
            Route("/run/{name}", one),
            Route("/compare/{first}/{second}", two),
            Route("/report/{name}", report),
            Route("/news", list_news),
            Route("/news/{name}", news),
        ],
        middleware=[Middleware(TokenRequired, token=token, port=port)],
    )


def _addresses(path: Path) -> dict[str, str]:
    """Return a run's name and addresses, relative to the page's own."""
    name = quote(path.name, safe="")
    return {"name": path.name, "news": f"/news/{name}", "report": f"/report/{name}"}


async def _news_of(run: WatchedRun, seen: Seen) -> AsyncIterator[ServerSentEvent]:
    """Yield the run's state, and again whenever something has changed."""
    told: object = None
    while True:
        with suppress(InputError):  # a file that is being replaced; the next look reads it
            news: News = await run_sync(run.news, seen)
            now = (news.figures, news.overview.state, news.seen, news.problem)
            if now != told:
                record = await run_sync(news_record, news)
                told, seen = now, news.seen
                yield ServerSentEvent(_json(record), event="run", id=str(seen))
        await asyncio.sleep(POLL_S)


async def _changes(record: Callable[[], Any]) -> AsyncIterator[ServerSentEvent]:
    """Yield a record whenever it differs from the former one."""
    told = None
    while True:
        now = _json(await run_sync(record))
        if now != told:
            told = now
            yield ServerSentEvent(now, event="runs")
        await asyncio.sleep(LIST_POLL_S)


def _json(record: Any) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


def new_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_urlsafe(16)


def listen(port: int) -> socket.socket:
    """Return a socket on the loopback interface; port 0 lets the system choose one.

    Raises:
        InputError: if another process has the port.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(Violation("--port", f"{port}: {reason}", "0 takes a free one")) from None
    return listener


def address(listener: socket.socket, token: str) -> str:
    """Return the address of the front page, with the token."""
    return f"http://{LOOPBACK}:{listener.getsockname()[1]}/?token={token}"


def server_of(folder: Path, listener: socket.socket, token: str) -> uvicorn.Server:
    """Return the server of a folder's live pages, for `run(sockets=[listener])`."""
    app = watch_app(folder, token, listener.getsockname()[1])
    return uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off"
        )
    )


def serve(folder: Path, listener: socket.socket, token: str) -> None:
    """Serve live pages until SIGINT or SIGTERM; open streams are closed then."""
    with suppress(KeyboardInterrupt):
        server_of(folder, listener, token).run(sockets=[listener])
