"""The page of `weft plan --curve --report`: every method's best layout for each batch, and its trade-off."""

from __future__ import annotations

import re

from web.plans import small_curve

from weft.web.charts.curve import fitting_methods, share_text
from weft.web.pages.curve import curve_page

DEVICES = (4, 64, 4096)


def test_the_page_has_every_point_and_every_choice_of_the_curve() -> None:
    curve = small_curve()
    page = curve_page(curve, DEVICES, 512, ["assumed: <nothing>"])
    layouts, trade_off = (_rows(page, name) for name in ("layouts", "trade-off"))
    assert {(row[0], row[1]) for row in layouts} == {
        (share_text(point.samples_per_device), point.method.name) for point in curve.points
    }
    best = max(point.utilisation for point in curve.points if point.candidate)
    assert f"{best:.1%}" in {row[2] for row in layouts}
    assert len(trade_off) == len(DEVICES) * len(fitting_methods(curve))
    assert "assumed: &lt;nothing&gt;" in page


def _rows(page: str, name: str) -> list[list[str]]:
    """Return the cells of a section's table, row by row."""
    section = page[page.index(f'<section id="{name}"') :]
    body = section[section.index("<tbody>") : section.index("</tbody>")]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body.split("</tr>")[:-1]]
