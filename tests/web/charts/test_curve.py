"""The picture of the curve."""

from __future__ import annotations

from xml.etree import ElementTree

from web.plans import small_curve

from weft.web.charts.curve import curve_svg, share_text

SVG = "{http://www.w3.org/2000/svg}"


def test_shares_are_fractions() -> None:
    assert [share_text(share) for share in (0.125, 0.5, 1, 2.0)] == ["1/8", "1/2", "1", "2"]


def test_the_picture_has_two_charts_and_a_line_for_every_method() -> None:
    small = small_curve()
    root = ElementTree.fromstring(curve_svg(small, (4, 64, 4096), 512, title="small"))
    words = [element.text for element in root.iter(f"{SVG}text")]
    for method in small.methods:
        assert words.count(method.name) == 1
    assert {"1/4", "2", "4", "Best layout of each method"} <= set(words)
    lines = [element for element in root.iter(f"{SVG}path") if element.get("fill") == "none"]
    # Two charts and the legend.
    assert len(lines) == 3 * len(small.methods)
    dashed = [element.get("stroke") for element in lines if element.get("stroke-dasharray")]
    plain = [element.get("stroke") for element in lines if not element.get("stroke-dasharray")]
    assert len(dashed) == 6
    assert set(dashed) <= set(plain)
