"""Contrast of text inside pictures, which axe cannot judge (WCAG 2.2, success criterion 1.4.3)."""

from __future__ import annotations

from web.browser import Browser

# [text, contrast] of each text with too little at its left, its middle or its right. Colours lie over each
# other from the page upwards. A line around letters is their ground; a pattern or a gradient is nothing.
FAINT = """(() => {
  document.head.insertAdjacentHTML("beforeend", "<style>* { pointer-events: auto !important }</style>");
  const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const parsed = new Map();
  const rgba = (colour) => {
    if (!parsed.has(colour)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
      const [red, green, blue, alpha] = pen.getImageData(0, 0, 1, 1).data;
      parsed.set(colour, [red / 255, green / 255, blue / 255, alpha / 255]);
    }
    return parsed.get(colour);
  };
  const opacity = (part) => part ? getComputedStyle(part).opacity * opacity(part.parentElement) : 1;
  const drawn = (colour, share, part) => {
    if (colour === "none" || colour.startsWith("url")) return [0, 0, 0, 0];
    const [red, green, blue, alpha] = rgba(colour);
    return [red, green, blue, alpha * share * opacity(part)];
  };
  const paint = (part) => {
    const style = getComputedStyle(part);
    if (!(part instanceof SVGElement)) return drawn(style.backgroundColor, 1, part);
    if (!(part instanceof SVGGeometryElement)) return [0, 0, 0, 0];
    const outlined = part instanceof SVGLineElement || style.fill === "none";
    const [colour, share] = outlined ? [style.stroke, style.strokeOpacity] : [style.fill, style.fillOpacity];
    return drawn(colour, share, part);
  };
  const over = ([red, green, blue, alpha], ground) =>
    [red, green, blue].map((value, place) => alpha * value + (1 - alpha) * ground[place]);
  const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = (colour) => {
    const [red, green, blue] = colour.map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const faint = [];
  for (const text of document.querySelectorAll("svg text, svg tspan")) {
    const own = [...text.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !text.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    text.scrollIntoView({block: "center", inline: "center", behavior: "instant"});
    const style = getComputedStyle(text), box = text.getBoundingClientRect();
    const size = parseFloat(style.fontSize) * Math.abs(text.getScreenCTM().d);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    const ink = drawn(style.fill, style.fillOpacity, text);
    const around = style.paintOrder.startsWith("stroke") ? style.stroke : "none";
    const halo = drawn(around, style.strokeOpacity, text);
    const ratios = [0.05, 0.5, 0.95].map((share) => {
      const found = document.elementsFromPoint(box.x + share * box.width, box.y + box.height / 2);
      const behind = found.filter((one) => !one.closest("text")).map(paint);
      const page = rgba("Canvas").slice(0, 3);
      const ground = [halo, ...behind].reduceRight((below, one) => over(one, below), page);
      const [low, high] = [luminance(ground), luminance(over(ink, ground))].sort((one, other) => one - other);
      return (high + 0.05) / (low + 0.05);
    });
    if (Math.min(...ratios) < least) faint.push([text.textContent, Math.min(...ratios)]);
  }
  return faint;
})()"""


def faint_texts(browser: Browser) -> list[tuple[str, float]]:
    """Return the texts in pictures with too little contrast, each with its contrast."""
    return [(text, ratio) for text, ratio in browser.run(FAINT)]
