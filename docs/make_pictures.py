"""Draw the pictures that the README shows: `python docs/make_pictures.py`."""

from __future__ import annotations

from pathlib import Path

from weft.predict.abstract import simulate_schedule
from weft.web.charts.timeline import timeline_svg

FOLDER = Path(__file__).parent / "pictures"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    figures = simulate_schedule("breadth-first", devices=4, loops=2, micro_batches=8)
    title = "Breadth-first: 4 devices, 2 stages on each, 8 micro-batches"
    path = FOLDER / "breadth-first.svg"
    path.write_text(timeline_svg(figures.timeline, title=title), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
