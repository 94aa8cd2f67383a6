"""The command that shows runs as they go: `watch`."""

from __future__ import annotations

from pathlib import Path

from weft.cli.output import Flag, Json, console, print_json
from weft.cli.tables.watch import watch_in_terminal
from weft.errors import InputError, Violation
from weft.training.directory.overview import runs_in
from weft.watch.news_record import head_record
from weft.watch.watched_run import Seen, WatchedRun


def watch(
    path: Path = Path("runs"),
    /,
    *,
    terminal: Flag = False,
    port: int | None = None,
    json: Json = False,
) -> None:
    """Show a run, or the runs of a folder, live on a page or a terminal.

    The page is served on this machine only, to whoever has the printed address. It reads the run directory;
    training does not wait for it. It works for running, finished and broken runs.

    Example: weft watch

    Example: weft watch runs/run --terminal

    Parameters
    ----------
    path
        A run directory, or a folder of them.
    terminal
        Show one run here instead of serving a page.
    port
        The port of the page; default: 7878. 0 takes a free one.
    json
        Print the state of one run now, as JSON.
    """
    if not path.is_dir():
        absent = "no such folder; `weft train` makes runs/"
        raise InputError(Violation(str(path), "a file, not a run directory" if path.exists() else absent))
    runs = runs_in(path)
    if not runs and not terminal and not json:
        console().print(f"{path} has no runs yet; the page shows them when they begin", soft_wrap=True)
    if terminal or json:
        run = WatchedRun(_only(path, runs))
        if json:
            print_json(head_record(run.news(Seen())))
        else:
            watch_in_terminal(run)
        return
    # Terminals and JSON need no server.
    from weft.watch.server import DEFAULT_PORT, listen, serve, the_token

    token = the_token()
    serve(path, listen(DEFAULT_PORT if port is None else port), token)


def _only(path: Path, runs: tuple[Path, ...]) -> Path:
    if len(runs) != 1:
        names = ", ".join(run.name for run in runs) or "none"
        raise InputError(Violation(str(path), f"give one run directory; runs in it: {names}"))
    return runs[0]
