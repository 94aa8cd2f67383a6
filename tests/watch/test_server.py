"""The server of live pages over real sockets: who is let in, what it sends, and that it only reads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from growing_runs import GrowingRun, growing
from interruptible import interruptible
from live_server import LiveServer, news_in
from prometheus_client.parser import text_string_to_metric_families

from weft.errors import InputError
from weft.training.directory.run_directory import RunDirectory
from weft.watch import server as server_module
from weft.watch.server import TOKEN_VARIABLE, NewsOfRun, listen, the_token
from weft.watch.watched_run import News, Seen, WatchedRun

MOST_BYTES = 300_000


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GrowingRun]]:
    monkeypatch.setattr(server_module, "POLL_S", 0.02)
    monkeypatch.setattr(server_module, "LIST_POLL_S", 0.02)
    with growing(tmp_path / "runs", "first", "second & <last>") as grown:
        yield grown


@pytest.fixture
def server(runs: list[GrowingRun]) -> Iterator[LiveServer]:
    server = LiveServer(runs[0].path.parent)
    yield server
    server.close()


@pytest.mark.parametrize(
    "path", ["/", "/run/first", "/metrics", "/news", "/news/first", "/report/first", "/nothing"]
)
def test_nobody_is_let_in_without_the_token(server: LiveServer, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"weft_watch_{server.port}=wrong"}):
        status, text = server.read(path, trusted=False, **headers)
        assert status == 403
        assert "first" not in text
    assert server.read(f"{path}?token=wrong", trusted=False)[0] == 403


def test_the_printed_address_gives_a_cookie_and_leaves_no_token_in_the_address(server: LiveServer) -> None:
    with server.request(f"/run/first?token={server.token}", trusted=False) as answer:
        assert answer.status == 303
        assert answer.headers["Location"].endswith("/run/first")
        cookie = answer.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    status, text = server.read("/run/first", trusted=False, Cookie=cookie.partition(";")[0])
    assert status == 200
    assert server.token not in text


def test_a_name_of_another_machine_is_refused(server: LiveServer) -> None:
    """So a page of that name cannot read what is served here, wherever the name leads."""
    assert server.read("/", Host="harm.example")[0] == 400
    assert server.read("/", Host=f"localhost:{server.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(server: LiveServer, method: str) -> None:
    with server.request("/run/first", method=method) as answer:
        assert answer.status == 405


@pytest.mark.parametrize(
    "path", ["/run/third", "/run/..", "/run/%2e%2e", "/news/..%2f..", "/report/first", "/compare/first/third"]
)
def test_only_runs_of_the_folder_are_found(server: LiveServer, path: str) -> None:
    assert server.read(path)[0] == 404


def test_pages_are_small_and_complete_and_name_runs_as_text(server: LiveServer) -> None:
    for path in ("/", "/run/first", "/compare/first/second%20%26%20%3Clast%3E"):
        status, text = server.read(path)
        assert status == 200
        assert len(text.encode()) < MOST_BYTES
        assert "<last>" not in text
        assert "://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_prometheus_reads_the_newest_figures_of_all_runs(server: LiveServer, runs: list[GrowingRun]) -> None:
    for steps in (3, 2):
        runs[0].train(steps)
        _, text = server.read("/metrics", Authorization=f"Bearer {server.token}")
        (gauge,) = [one for one in text_string_to_metric_families(text) if one.name == "weft_run_step"]
        found = {sample.labels["run"]: sample.value for sample in gauge.samples}
        assert found == {"first": len(RunDirectory(runs[0].path).metrics()), "second & <last>": 0}
    with server.request("/metrics", Accept="application/openmetrics-text; version=1.0.0") as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert answer.read().endswith(b"# EOF\n")


def test_news_come_as_they_happen_and_from_where_a_viewer_left(
    server: LiveServer, runs: list[GrowingRun]
) -> None:
    runs[0].train(3)
    with server.request("/news/first") as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        news = news_in(answer)
        _, all_of_it = next(news)
        assert all_of_it["anew"]
        assert [step for step, _ in all_of_it["curves"]["loss"]] == [0, 1, 2]
        assert all_of_it["timeline"]["measured"][0]["step"] == 2
        runs[0].train(1)
        seen, later = next(news)
        assert not later["anew"]
        assert later["curves"]["loss"] == [[3, 5.97]]
        assert later["head"]["figures"][0]["value"] == "4/50"
    runs[0].train(2)
    with server.request("/news/first", Last_Event_ID=seen) as answer:
        _, rest = next(news_in(answer))
    assert not rest["anew"]
    assert [step for step, _ in rest["curves"]["loss"]] == [4, 5]
    assert rest["notes"] == []


def test_viewers_who_look_together_share_one_reading_and_one_text(
    runs: list[GrowingRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "POLL_S", 1e9)
    asked: list[Seen] = []

    class Counted(WatchedRun):
        def news(self, seen: Seen) -> News:
            asked.append(seen)
            return super().news(seen)

    runs[0].train(2)
    news = NewsOfRun(Counted(runs[0].path))

    async def looks() -> None:
        first, *others = await asyncio.gather(*(news.since(Seen()) for _ in range(8)))
        assert all(one.event is first.event for one in others)
        assert asked == [Seen()]
        later = await asyncio.gather(*(news.since(first.seen) for _ in range(8)))
        assert asked == [Seen(), first.seen]
        assert all(json.loads(one.event.partition("data: ")[2])["curves"] == {} for one in later)

    asyncio.run(looks())


def test_a_server_that_was_started_again_goes_on_where_a_viewer_left(runs: list[GrowingRun]) -> None:
    runs[0].train(4)
    seen = ""
    for steps in ([0, 1, 2, 3], [4]):
        server = LiveServer(runs[0].path)
        with server.request("/news/first", Last_Event_ID=seen) as answer:
            seen, news = next(news_in(answer))
        server.close()
        assert [step for step, _ in news["curves"]["loss"]] == steps
        runs[0].train(1)


def test_the_list_tells_of_runs_that_begin_and_grow(server: LiveServer, runs: list[GrowingRun]) -> None:
    with server.request("/news") as answer:
        news = news_in(answer)
        _, listed = next(news)
        assert {row["name"]: row["figures"][0] for row in listed} == {
            "first": "0/50",
            "second & <last>": "0/50",
        }
        runs[1].train(2)
        # A look may fall between the two steps.
        while (listed := next(news)[1])[0]["figures"][0] != "2/50":
            pass
        assert listed[0]["name"] == "second & <last>"


def test_the_server_writes_nothing(server: LiveServer, runs: list[GrowingRun]) -> None:
    runs[0].train(2)
    before = states(runs[0].path)
    with server.request("/news/first") as answer:
        next(news_in(answer))
    for path in ("/", "/run/first"):
        server.read(path)
    assert states(runs[0].path) == before


def states(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_a_port_that_is_taken_is_named(server: LiveServer) -> None:
    with pytest.raises(InputError, match=rf"--port: {server.port}: Address already in use .*0 takes a free"):
        listen(server.port)
    with pytest.raises(InputError, match="--port: 70000"):
        listen(70_000)


def test_a_token_can_be_given_and_must_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert the_token() != the_token()
    monkeypatch.setenv(TOKEN_VARIABLE, "known-to-a-scraper")
    assert the_token() == "known-to-a-scraper"
    for bad in ("short", "has spaces and is long", "semicolons;are;no;letters"):
        monkeypatch.setenv(TOKEN_VARIABLE, bad)
        with pytest.raises(InputError, match="at least 16 letters"):
            the_token()


@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_its_address_and_ends_on_a_signal(
    runs: list[GrowingRun], number: signal.Signals, viewed: bool
) -> None:
    """As soon as the address is known, and with a viewer whose stream is open."""
    command = interruptible("-m", "weft", "watch", str(runs[0].path.parent), "--port", "0")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        printed = process.stdout.readline()
        assert printed.startswith("watch: http://127.0.0.1:")
        here = LiveServer.__new__(LiveServer)
        here.port, here.token = int(printed.split(":")[3].split("/")[0]), printed.strip().partition("=")[2]
        with here.request("/news/first") if viewed else nullcontext() as answer:
            if answer is not None:
                next(news_in(answer))
            process.send_signal(number)
            assert process.wait(60) == 0
        assert process.stderr.read() == ""
