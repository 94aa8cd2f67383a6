// Line and bar charts. Every chart has a title for screen readers and a readout under the pointer.

const CHART_HEIGHT = 230;
const MARGIN = { left: 62, right: 14, top: 12, bottom: 34 };

// chart: {series: [{name, colour, points, dashed, dots, steps}], band: {low, high, colour, name}, format, tick,
//         xName, xFormat, xTick, zero, cap, summary}; points are [x, y or null].
// Returns a function that shows another chart in its place.
function lineChart(root, chart) {
  let shown = chart;
  let key = legend(chart.series, chart.band);
  root.before(key);
  const draw = redrawOnResize(root, (width) => root.replaceChildren(drawLines(shown, width)));
  return (next) => {
    shown = next;
    const fresh = legend(next.series, next.band);
    key.replaceWith(fresh);
    key = fresh;
    draw();
  };
}

function legend(series, band) {
  const entries = [...series.map((one) => [one.name, one.colour, one.dashed]), ...(band ? [[band.name, band.colour, false]] : [])];
  const items = entries.map(([name, colour, dashed]) => {
    const mark = dashed
      ? shape("line", { x1: 0, x2: 11, y1: 6, y2: 6, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": "4 3" })
      : shape("rect", { width: 11, height: 11, rx: 2, fill: colour, opacity: band && name === band.name ? 0.3 : 1 });
    return element("li", {}, shape("svg", { viewBox: "0 0 11 11", "aria-hidden": "true" }, mark), name);
  });
  return element("ul", { class: "legend" }, ...items);
}

// The predicted step across a curve of measured ones, and its interval; `interval` is [step, low, high] or null.
function predictedSteps(interval, points) {
  if (!interval) return [];
  const across = [points[0][0], points.at(-1)[0]].map((step) => [step, interval[0]]);
  return [{ name: `predicted ${seconds(interval[0])}`, colour: "var(--predicted)", points: across, dashed: true, constant: true }];
}

function intervalBand(interval) {
  return interval && { low: interval[1], high: interval[2], colour: "var(--predicted)", name: "90 % interval" };
}

function range(chart) {
  const values = chart.series.flatMap((one) => one.points.map((point) => point[1])).filter((value) => value !== null);
  if (chart.band) values.push(chart.band.low, chart.band.high);
  values.sort((a, b) => a - b);
  let high = values[values.length - 1];
  const usual = values[Math.floor(values.length * 0.9)];
  // A few long steps (the first ones load and compile) must not squash the rest; they are marked at the edge.
  if (chart.cap && high > 2 * usual) high = 1.3 * usual;
  const low = chart.zero ? 0 : values[0];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [chart.zero ? 0 : low - room, high + room];
}

function drawLines(chart, width) {
  const xs = chart.series.flatMap((one) => one.points.map((point) => point[0]));
  const [xLow, xHigh] = [Math.min(...xs), Math.max(...xs)];
  const [yLow, yHigh] = range(chart);
  const x = scale(xLow, xHigh, MARGIN.left, width - MARGIN.right);
  const y = scale(yLow, yHigh, CHART_HEIGHT - MARGIN.bottom, MARGIN.top);
  const picture = shape("svg", { width, height: CHART_HEIGHT, role: "img", "aria-label": chart.summary });
  drawAxes(picture, chart, width, x, y, [xLow, xHigh], [yLow, yHigh]);
  if (chart.band) {
    const top = Math.max(MARGIN.top, y(chart.band.high));
    picture.append(
      shape("rect", {
        class: "band", x: MARGIN.left, y: top, width: width - MARGIN.left - MARGIN.right,
        height: Math.max(1, y(chart.band.low) - top), fill: chart.band.colour,
      }),
    );
  }
  for (const one of chart.series) drawSeries(picture, one, x, y, yHigh);
  addReadout(picture, chart, width, x);
  return picture;
}

// A text in the middle of the last tick would lie half outside.
function anchorAt(x, width) {
  return x > width - 30 ? "end" : "middle";
}

function drawAxes(picture, chart, width, x, y, [xLow, xHigh], [yLow, yHigh]) {
  for (const [value, text] of tickTexts(ticks(yLow, yHigh, 5), chart.tick)) {
    picture.append(
      shape("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      shape("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, text),
    );
  }
  const whole = chart.xTick ? () => true : Number.isInteger;
  for (const [value, text] of tickTexts(ticks(xLow, xHigh, width / 90).filter(whole), chart.xTick ?? String)) {
    picture.append(shape("text", { x: x(value), y: CHART_HEIGHT - MARGIN.bottom + 17, "text-anchor": anchorAt(x(value), width) }, text));
  }
  const bottom = CHART_HEIGHT - MARGIN.bottom;
  picture.append(
    shape("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    shape("text", { x: width - MARGIN.right, y: CHART_HEIGHT - 3, "text-anchor": "end" }, chart.xName),
  );
}

function drawSeries(picture, one, x, y, yHigh) {
  let path = "";
  let pen = "M";
  let previous = null;
  for (const [atX, atY] of one.points) {
    if (atY === null) {
      pen = "M";
      previous = null;
      continue;
    }
    const shown = y(Math.min(atY, yHigh));
    if (one.steps && previous !== null) path += `H${x(atX).toFixed(1)}`;
    path += `${pen}${x(atX).toFixed(1)} ${shown.toFixed(1)}`;
    pen = "L";
    previous = shown;
    if (atY > yHigh) {
      const left = x(atX);
      picture.append(shape("path", { d: `M${left - 4} ${shown + 6}L${left + 4} ${shown + 6}L${left} ${shown}Z`, fill: one.colour }));
    }
  }
  // Dots stand for themselves: nobody knows what lies between two of them.
  if (!one.dots) picture.append(shape("path", { d: path, class: one.dashed ? "series dashed" : "series", stroke: one.colour }));
  const lonely = one.points.length === 1;
  if (one.dots || lonely) {
    for (const [atX, atY] of one.points) {
      if (atY !== null) picture.append(shape("circle", { cx: x(atX), cy: y(Math.min(atY, yHigh)), r: 3.5, fill: one.colour }));
    }
  }
}

function addReadout(picture, chart, width, x) {
  const hair = shape("line", { class: "crosshair", y1: MARGIN.top, y2: CHART_HEIGHT - MARGIN.bottom, visibility: "hidden" });
  picture.append(hair);
  const leave = () => {
    hair.setAttribute("visibility", "hidden");
    tooltip.hide();
  };
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("pointermove", (event) => {
    const at = event.clientX - picture.getBoundingClientRect().left;
    const nearest = (points) => points.reduce((best, point) => (Math.abs(x(point[0]) - at) < Math.abs(x(best[0]) - at) ? point : best));
    const found = chart.series.filter((one) => one.points.length && !one.constant).map((one) => [one, nearest(one.points)]);
    if (!found.length || at < MARGIN.left - 8 || at > width) return leave();
    const position = x(found[0][1][0]);
    hair.setAttribute("x1", position);
    hair.setAttribute("x2", position);
    hair.setAttribute("visibility", "visible");
    const rows = found.map(([one, point]) => element("tr", {}, element("th", {}, one.name), element("td", {}, chart.format(point[1]))));
    const title = `${chart.xName} ${(chart.xFormat ?? String)(found[0][1][0])}`;
    tooltip.show(event.clientX, event.clientY, element("strong", {}, title), element("table", {}, element("tbody", {}, ...rows)));
  });
}

// Horizontal bars of ranks, or of equal ranks together: predicted above measured, with a mark at the capacity.
function memoryBars(root, memory) {
  const kinds = [["predicted", "bar-predicted"], ["measured", "bar-measured"]].filter(([key]) => memory.some((rank) => rank[key] !== null));
  const series = kinds.map(([key]) => ({ name: key, colour: `var(--${key})` }));
  const peak = Math.max(...memory.flatMap((rank) => kinds.map(([key]) => rank[key] ?? 0)));
  const capacities = memory.map((rank) => rank.capacity ?? 0).filter((capacity) => capacity > 0 && capacity < 4 * peak);
  if (capacities.length) series.push({ name: "capacity", colour: "var(--bad)", dashed: true });
  root.before(legend(series, null));
  const highest = Math.max(peak, ...capacities) * 1.02;
  const barHeight = memory.length > 16 ? 5 : 13;
  const rowHeight = kinds.length * (barHeight + 2) + 8;
  redrawOnResize(root, (width) => {
    const height = memory.length * rowHeight + 26;
    const left = Math.max(MARGIN.left, 8 + 6.5 * Math.max(...memory.map((rank) => rank.name.length)));
    const x = scale(0, highest, left, width - MARGIN.right - 64);
    const summary = memory.map((rank) => `${rank.name}: ${kinds.map(([key]) => `${key} ${byteText(rank[key])}`).join(", ")}`).join("; ");
    const picture = shape("svg", { width, height, role: "img", "aria-label": summary });
    for (const [value, text] of tickTexts(ticks(0, highest, width / 130), bytesTick)) {
      picture.append(
        shape("line", { class: "grid", x1: x(value), x2: x(value), y1: 0, y2: height - 20 }),
        shape("text", { x: x(value), y: height - 5, "text-anchor": "middle" }, text),
      );
    }
    memory.forEach((rank, index) => drawRankBars(picture, rank, kinds, index, { left, x, highest, rowHeight, barHeight }));
    root.replaceChildren(picture);
  });
}

function drawRankBars(picture, rank, kinds, index, { left, x, highest, rowHeight, barHeight }) {
  const top = index * rowHeight + 4;
  picture.append(shape("text", { x: left - 8, y: top + rowHeight / 2, "text-anchor": "end", class: "rank" }, rank.name));
  kinds.forEach(([key, name], position) => {
    if (rank[key] === null) return;
    const y = top + position * (barHeight + 2);
    picture.append(shape("rect", { class: name, x: x(0), y, width: Math.max(1, x(rank[key]) - x(0)), height: barHeight, rx: 2 }));
    if (barHeight > 8) picture.append(shape("text", { x: x(rank[key]) + 6, y: y + 11 }, byteText(rank[key])));
  });
  if (rank.capacity !== null && rank.capacity <= highest) {
    picture.append(shape("line", { class: "capacity", x1: x(rank.capacity), x2: x(rank.capacity), y1: top - 2, y2: top + rowHeight - 6 }));
  }
}
