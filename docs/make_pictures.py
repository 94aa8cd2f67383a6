"""Make the pictures of README and site from real commands: `make pictures`. They need a headless Chromium.

The machine should be idle: it is measured, and a small model is trained on it twice. The first run teaches
predictions how this machine differs, as `weft corrections` does for every user.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

from live_server import LiveServer
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text
from web.browser import Browser, find_browser

from weft.cli.main import run
from weft.predict.abstract import simulate_schedule
from weft.web.charts.timeline import timeline_svg

FOLDER = Path(__file__).parent / "pictures"
DEMO = Path(__file__).parent.parent / "examples" / "demo" / "demo.toml"
PLAN = "weft plan llama-7b --on 16xa100-80gb"
RUNS = (
    "weft measure gpt-1m --sequence 256",
    f"weft train {DEMO} --steps 40 --directory first",
    "weft corrections first",
    f"weft train {DEMO} --steps 40 --directory run",
)
WATCH = "weft watch run --terminal"
COLUMNS = 92
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
# Fonts that no page may fetch.
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
WEBP = {"format": "webp", "quality": 75}
REPORT = {"timeline": ("#timeline",), "report": ("#loss", "#step-time", "#memory", "#live")}
LIVE = {"watch": ("header", "main > div:nth-child(1)", "main > div:nth-child(2)")}
# A live page has drawn its step when this is true.
DRAWN = "document.querySelectorAll('.late').length === 2"
# The rectangle around parts of a page, with a margin.
AROUND = """
(() => {
  const boxes = [...document.querySelectorAll("%s")].map((part) => part.getBoundingClientRect());
  const edge = (choose, side) => choose(...boxes.map((box) => box[side]));
  const x = edge(Math.min, "left") - 8, y = edge(Math.min, "top") - 8;
  return {x, y, width: edge(Math.max, "right") + 8 - x, height: edge(Math.max, "bottom") + 8 - y};
})()
"""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    draw_schedule()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        draw_terminal(PLAN, "plan")
        for command in RUNS:
            printed(command)
        draw_terminal(WATCH, "watch-terminal")
        with opened_browser() as browser:
            photograph(browser, Path(folder) / "run" / "report.html", REPORT)
            server = LiveServer(Path(folder) / "run")
            photograph(browser, server.address, LIVE, drawn=DRAWN)
            server.close()
    total = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"{len([*FOLDER.iterdir()])} pictures of {total:,} bytes in {FOLDER}")


def draw_schedule() -> None:
    figures = simulate_schedule("breadth-first", devices=4, loops=2, micro_batches=8)
    title = "Breadth-first: 4 devices, 2 stages on each, 8 micro-batches"
    picture = timeline_svg(figures.timeline, title=title)
    (FOLDER / "breadth-first.svg").write_text(picture, encoding="utf-8")


def printed(command: str) -> str:
    """Return what a command prints on a terminal, with its colours; keep what weft remembers in this folder.

    Raises:
        RuntimeError: when the command fails.
    """
    print(f"$ {command}", file=sys.stderr)
    output, errors = io.StringIO(), io.StringIO()
    colours = {"FORCE_COLOR": "1", "COLORTERM": "truecolor"}
    words = {**colours, "COLUMNS": str(COLUMNS), "WEFT_HOME": os.path.abspath("home")}
    printing = (contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors))
    with mock.patch.dict(os.environ, words), printing[0], printing[1]:
        if run(shlex.split(command)[1:]) != 0:
            raise RuntimeError(f"{command} failed: {errors.getvalue()}")
    return output.getvalue()


def draw_terminal(command: str, name: str) -> None:
    """Draw a command and its answer as a terminal shows them."""
    answer = printed(command)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {command}\n"), Text.from_ansi(answer), sep="\n")
    for scheme, theme in THEMES.items():
        picture = console.export_svg(title="", theme=theme, clear=False, unique_id=f"{name}-{scheme}")
        (FOLDER / f"{name}-{scheme}.svg").write_text(FONTS.sub("", picture), encoding="utf-8")


def photograph(
    browser: Browser, page: Path | str, pictures: Mapping[str, Sequence[str]], drawn: str = "true"
) -> None:
    """Take pictures of parts of a page, each named by selectors, in light and dark."""
    for scheme in THEMES:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.call("Emulation.setEmulatedMedia", features=[feature])
        browser.open(page, width=1100, height=900)
        browser.run("document.documentElement.style.scrollbarWidth = 'none'")
        while not browser.run(drawn):
            time.sleep(0.1)
        for name, sections in pictures.items():
            clip = {**browser.run(AROUND % ", ".join(sections)), "scale": 1}
            shot = browser.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True, **WEBP)
            (FOLDER / f"{name}-{scheme}.webp").write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def opened_browser() -> Iterator[Browser]:
    binary = find_browser()
    if binary is None:
        sys.exit("no headless browser is installed, such as chromium")
    browser = Browser(binary)
    yield browser
    browser.close()


if __name__ == "__main__":
    main()
