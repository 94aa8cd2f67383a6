"""A server of live pages in a thread of the test, and requests to it as a browser makes them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.watch.server import address, listen, server_of, the_token

TIMEOUT_S = 60.0


class LiveServer:
    """A server on a port of the loopback interface that the system has chosen; close it."""

    def __init__(self, folder: Path, port: int = 0, token: str | None = None) -> None:
        self.token = token or the_token()
        listener = listen(port)
        self.port: int = listener.getsockname()[1]
        self.address = address(listener, self.token)
        self._server = server_of(folder, listener, self.token)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        deadline = time.monotonic() + TIMEOUT_S
        while not self._server.started and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def request(
        self, path: str, *, method: str = "GET", trusted: bool = True, **headers: str
    ) -> http.client.HTTPResponse:
        """Return the answer to one request; its connection ends with the answer's `close`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        known = {"Authorization": f"Bearer {self.token}"} if trusted else {}
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers={**known, **given})
        return connection.getresponse()

    def read(self, path: str, **headers: str) -> tuple[int, str]:
        with self.request(path, **headers) as answer:
            return answer.status, answer.read().decode()


def news_in(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """Yield (id, data) of each server-sent event of a stream."""
    about: dict[str, str] = {}
    while line := answer.readline().decode():
        name, _, value = line.rstrip("\r\n").partition(": ")
        if name and value:
            about[name] = value
        elif not name and "data" in about:
            yield about.get("id", ""), json.loads(about["data"])
            about = {}
