"""The server of live pages, on the loopback interface: pages, news as server-sent events, reports. Read-only.

News have ids. A browser that lost its connection gives the last one, and gets everything since.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import uvicorn
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from weft.errors import InputError, Violation
from weft.training.directory.overview import RunOverview, runs_in
from weft.watch.access import TokenRequired
from weft.watch.news_record import news_record
from weft.watch.prometheus import exposition
from weft.watch.watched_run import Seen, WatchedRun
from weft.web.pages.watch import list_record, watch_page

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 7878
TOKEN_VARIABLE = "WEFT_WATCH_TOKEN"
SHORTEST_TOKEN = 16
POLL_S = 0.5
LIST_POLL_S = 1.0
# Streams end with their next look.
GRACE_S = 5
# A viewer that has gone is noticed when something is sent to it.
SILENT_S = 15.0


class Runs:
    """The runs of a folder, or a run directory alone. Each run is followed once, for all its viewers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._watched: dict[Path, WatchedRun] = {}
        self._news: dict[Path, NewsOfRun] = {}

    def path_of(self, name: str) -> Path:
        """Return the directory of a run, found by its name.

        Raises:
            HTTPException: if there is no run of this name: 404.
        """
        for path in runs_in(self.folder):
            if path.name == name:
                return path
        raise HTTPException(404, f"no run {name!r} in {self.folder}")

    def watched(self, path: Path) -> WatchedRun:
        """Return the follower of a run directory."""
        return self._watched.setdefault(path, WatchedRun(path))

    def news(self, path: Path) -> NewsOfRun:
        """Return the news of a run directory for all its viewers."""
        return self._news.setdefault(path, NewsOfRun(self.watched(path)))

    def overviews(self) -> list[RunOverview]:
        """Return the runs that can be read, the newest first."""
        found = []
        for path in runs_in(self.folder):
            with suppress(InputError):
                found.append(self.watched(path).overview())
        return sorted(found, key=lambda one: one.newest_s, reverse=True)


def watch_app(folder: Path, token: str, port: int, ends: Callable[[], bool]) -> Starlette:
    """Return the application for a folder of runs, or for one run directory.

    Args:
        ends: whether the server is to end, and streams with it.
    """
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
        path = await run_sync(runs.path_of, request.path_params["name"])
        seen = Seen.parse(request.headers.get("last-event-id", ""))
        return _stream(runs.news(path).events(seen), ends, POLL_S)

    def metrics(request: Request) -> Response:
        found = exposition(runs.overviews(), request.headers.get("accept", ""))
        return Response(found.body, headers={"Content-Type": found.content_type})

    async def list_news(request: Request) -> Response:
        return _stream(_changes(lambda: list_record(runs.overviews())), ends, LIST_POLL_S)

    return Starlette(
        routes=[
            Route("/", front),
            Route("/run/{name}", one),
            Route("/compare/{first}/{second}", two),
            Route("/report/{name}", report),
            Route("/metrics", metrics),
            Route("/news", list_news),
            Route("/news/{name}", news),
        ],
        middleware=[Middleware(TokenRequired, token=token, port=port)],
    )


def _addresses(path: Path) -> dict[str, str]:
    """Return a run's name and addresses, relative to the page's own."""
    name = quote(path.name, safe="")
    return {"name": path.name, "news": f"/news/{name}", "report": f"/report/{name}"}


def _stream(looks: AsyncIterator[str], ends: Callable[[], bool], poll_s: float) -> Response:
    """Return the texts of looks as a response; a look without news has an empty text."""

    async def texts() -> AsyncIterator[str]:
        silent_s = 0.0
        async for text in looks:
            silent_s = 0.0 if text else silent_s + poll_s
            if text or silent_s >= SILENT_S:
                silent_s = 0.0
                yield text or ": still here\n\n"
            if ends():
                return
            # All viewers look at the same time, so that they share a look.
            await asyncio.sleep(poll_s - time.monotonic() % poll_s)

    return StreamingResponse(texts(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


class _Look(NamedTuple):
    """The news since a viewer's state, as an event; they are the same as others with an equal `now`."""

    now: object
    seen: Seen
    event: str


class NewsOfRun:
    """The news of a run for all its viewers. Those who have seen the same get the same text at a look."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run
        self._turn = -1
        self._looks: dict[Seen, asyncio.Future[_Look]] = {}

    async def since(self, seen: Seen) -> _Look:
        """Return the news since a state, read and rendered once in each interval of `POLL_S`.

        Raises:
            InputError: see `WatchedRun.news`.
        """
        turn = int(time.monotonic() / POLL_S)
        if turn != self._turn:
            self._turn, self._looks = turn, {}
        if seen not in self._looks:
            self._looks[seen] = asyncio.ensure_future(run_sync(self._look, seen))
        # A viewer that goes does not take the look of the others along.
        return await asyncio.shield(self._looks[seen])

    def _look(self, seen: Seen) -> _Look:
        news = self._run.news(seen)
        now = (tuple(news.figures), news.overview.state, news.seen, news.problem)
        return _Look(now, news.seen, _event("run", news_record(news), str(news.seen)))

    async def events(self, seen: Seen) -> AsyncIterator[str]:
        """Yield the run's state at the first look, and its news whenever something has changed."""
        told: object = None
        while True:
            text = ""
            with suppress(InputError):  # a file that is being replaced; the next look reads it
                look = await self.since(seen)
                if look.now != told:
                    text, told, seen = look.event, look.now, look.seen
            yield text


async def _changes(record: Callable[[], Any]) -> AsyncIterator[str]:
    """Yield a record at the first look, and whenever it differs from the former one."""
    told = ""
    while True:
        text = _event("runs", await run_sync(record))
        yield text if text != told else ""
        told = text


def _event(name: str, record: Any, identity: str = "") -> str:
    """Return a server-sent event; JSON in one line needs no more than one line of data."""
    data = json.dumps(record, separators=(",", ":"), allow_nan=False)
    return (f"id: {identity}\n" if identity else "") + f"event: {name}\ndata: {data}\n\n"


def the_token() -> str:
    """Return the token of the environment, else a new one that nobody can guess.

    Raises:
        InputError: if the environment's is easy to guess.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if given is None:
        return secrets.token_urlsafe(SHORTEST_TOKEN)
    if len(given) < SHORTEST_TOKEN or quote(given, safe="") != given:
        problem = f"{len(given)} characters; a token has at least {SHORTEST_TOKEN} letters, digits, _, . or -"
        raise InputError(Violation(TOKEN_VARIABLE, problem))
    return given


def listen(port: int) -> socket.socket:
    """Return a socket on the loopback interface; port 0 lets the system choose one.

    Raises:
        InputError: if another process has the port.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        # Whoever opens the printed address at once waits for the server, and is not refused.
        listener.listen()
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
    app = watch_app(folder, token, listener.getsockname()[1], lambda: server.should_exit)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S, lifespan="off"
    )
    server = uvicorn.Server(config)
    return server


def serve(folder: Path, listener: socket.socket, token: str) -> None:
    """Print the address, and serve live pages until SIGINT or SIGTERM; open streams are closed then."""
    server = server_of(folder, listener, token)
    # uvicorn gives a signal that ended it to the former handler, too.
    former = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # Whoever reads the address may send a signal at once.
        print(f"watch: {address(listener, token)}", flush=True)
        server.run(sockets=[listener])
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
