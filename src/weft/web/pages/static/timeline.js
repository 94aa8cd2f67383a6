// The timeline view: the predicted step above a measured one, on one time axis that both share.
// Times are ticks since the start of the step; `row` is an index into the instructions of the report.

const AXIS_HEIGHT = 24;
const TALL_LANE = 24;
const THIN_LANE = 13;
const RANK_GAP = 7;
const LONG_NAME = 15;
const NEAREST_ZOOM = 2e-5;

class TimelineView {
  constructor(root, record, announce) {
    this.root = root;
    this.record = record;
    this.announce = announce;
    this.measured = Math.max(0, record.measured.findIndex((step) => step.reasons.includes("median")));
    this.window = null;
    this.selected = null;
    this.panels = [];
    this.lanes = laneGeometry(record);
    this.rows = new Map();
    root.tabIndex = 0;
    root.setAttribute("role", "application");
    root.setAttribute("aria-label", "Timeline of one step. Arrows choose an instruction, plus and minus zoom, 0 shows the whole step.");
    root.addEventListener("keydown", (event) => this.onKey(event));
    root.addEventListener("blur", () => tooltip.hide());
    redrawOnResize(root, (width) => {
      this.width = width;
      this.gutter = width < 620 ? 78 : 178;
      this.draw();
    });
  }

  // Shows another record of the same plan; the zoom and the chosen instruction stay.
  show(record) {
    const id = this.selected === null ? null : this.record.instructions.id[this.selected];
    this.record = record;
    this.measured = 0;
    this.lanes = laneGeometry(record);
    this.rows = new Map();
    const row = record.instructions.id.indexOf(id);
    this.selected = row < 0 ? null : row;
    this.draw();
  }

  get step() {
    return this.record.measured[this.measured] ?? null;
  }

  // The end of the longer of the two steps: what "whole step" shows.
  get end() {
    return Math.max(...[this.record.predicted, this.step].filter(Boolean).map(lastEnd)) * 1.005 || 1;
  }

  chooseStep(index) {
    this.measured = index;
    this.zoomTo(0, this.end);
  }

  zoomTo(from, to) {
    const length = Math.min(Math.max(to - from, this.end * NEAREST_ZOOM), this.end);
    const start = Math.min(Math.max(from, 0), this.end - length);
    this.window = length >= this.end * 0.9999 ? null : [start, start + length];
    this.draw();
  }

  zoomBy(factor, around = 0.5) {
    const [from, to] = this.range();
    const centre = from + (to - from) * around;
    this.zoomTo(centre - (centre - from) * factor, centre + (to - centre) * factor);
  }

  panBy(share) {
    const [from, to] = this.range();
    this.zoomTo(from + (to - from) * share, to + (to - from) * share);
  }

  range() {
    return this.window ?? [0, this.end];
  }

  draw() {
    if (!this.width) return;
    const [from, to] = this.range();
    this.x = scale(from, to, this.gutter, this.width - 1);
    this.panels = [];
    const children = [this.drawAxis()];
    if (this.record.predicted) children.push(...this.drawPanel("predicted", "predicted", this.record.predicted));
    if (this.step) children.push(...this.drawPanel("measured", `measured, step ${this.step.step}`, this.step));
    this.root.replaceChildren(...children);
    this.mark(this.selected, "selected");
  }

  drawAxis() {
    const [from, to] = this.range();
    const axis = shape("svg", { width: this.width, height: AXIS_HEIGHT, class: "time-axis", "aria-hidden": "true" });
    const unit = this.record.tickNs * 1e-9;
    for (const [value, text] of tickTexts(ticks(from * unit, to * unit, (this.width - this.gutter) / 110), secondsTick)) {
      const x = this.x(value / unit);
      axis.append(shape("text", { x, y: 14, "text-anchor": anchorAt(x, this.width) }, text));
    }
    return axis;
  }

  // Equal ranks of the prediction share lanes; a measured step has lanes of its own for every rank.
  lanesOf(occurrence) {
    return occurrence.names ? laneGeometry(this.record, occurrence.names) : this.lanes;
  }

  drawPanel(name, title, occurrence) {
    const lanes = this.lanesOf(occurrence);
    const picture = shape("svg", {
      width: this.width, height: lanes.height, class: "lanes", id: `lanes-${name}`, role: "img", "aria-label": `${title} step`,
    });
    this.drawLanes(picture, lanes);
    const blocks = this.drawBlocks(picture, occurrence, lanes);
    const end = this.x(lastEnd(occurrence));
    if (end >= this.gutter && end <= this.width) {
      picture.append(shape("line", { class: "step-end", x1: end, x2: end, y1: 0, y2: lanes.height }));
    }
    const panel = { name, picture, occurrence, blocks };
    this.panels.push(panel);
    this.listen(panel);
    const length = seconds(lastEnd(occurrence) * this.record.tickNs * 1e-9);
    return [element("div", { class: "panel-title" }, title, element("span", {}, length)), picture];
  }

  drawLanes(picture, lanes) {
    const narrow = this.gutter < 100;
    const [from, to] = this.range();
    for (const [index, lane] of this.record.lanes.entries()) {
      if (!lanes.lane[index]) continue;
      const { top, height, first, name } = lanes.lane[index];
      picture.append(shape("rect", { class: "lane", x: this.gutter, y: top, width: this.width - this.gutter, height }));
      if (first) picture.append(shape("text", { class: "rank", x: 0, y: top + 15 }, narrow ? name.replace(/^ranks? (\S+?),?( .*)?$/, (_, start, more) => `r${start}${more ? "+" : ""}`) : name));
      const crowded = first && name.length > LONG_NAME;
      const label = narrow ? (lane.stream === "compute" ? "" : lane.symbol) : crowded ? "" : lane.stream.replaceAll("_", " ");
      picture.append(shape("text", { x: this.gutter - 8, y: top + height / 2 + 4, "text-anchor": "end" }, label));
    }
    const unit = this.record.tickNs * 1e-9;
    for (const value of ticks(from * unit, to * unit, (this.width - this.gutter) / 110)) {
      const x = this.x(value / unit);
      picture.append(shape("line", { class: "grid", x1: x, x2: x, y1: 0, y2: lanes.height }));
    }
  }

  // Draws what the window shows; blocks narrower than half a pixel that fall on a drawn one are left out.
  drawBlocks(picture, occurrence, lanes) {
    const { instructions, kinds } = this.record;
    const [from, to] = this.range();
    const blocks = [];
    const drawnTo = new Map();
    const levels = this.levelsOf(occurrence);
    for (const index of levels.order) {
      const [start, end, row] = [occurrence.start[index], occurrence.end[index], occurrence.row[index]];
      const geometry = lanes.lane[instructions.lane[row]];
      if (end < from || start > to || !geometry) continue;
      const height = geometry.height / levels.count[instructions.lane[row]];
      const left = Math.max(this.x(start), this.gutter);
      const width = Math.min(this.x(end), this.width) - left;
      const key = instructions.lane[row] * 64 + levels.level[index];
      if (width < 0.5 && left < (drawnTo.get(key) ?? -1)) continue;
      const shown = Math.max(width, 1.2);
      drawnTo.set(key, left + shown);
      const top = geometry.top + levels.level[index] * height;
      const kind = kinds[instructions.kind[row]];
      const rect = shape("rect", {
        class: "instruction", x: left.toFixed(2), y: top, width: (shown > 3 ? shown - 0.6 : shown).toFixed(2), height: height - (levels.count[instructions.lane[row]] > 1 ? 0.5 : 0),
        rx: shown > 8 ? 1.5 : 0, fill: shaded(kind.colour, instructions.shade[row]), "data-row": row,
      });
      picture.append(rect);
      blocks.push({ row, index, left, right: left + shown, top, bottom: top + height, rect });
      if (height >= TALL_LANE) this.drawLabel(picture, row, left, shown, top);
    }
    return blocks;
  }

  drawLabel(picture, row, left, width, top) {
    const { label, microBatch } = this.record.instructions;
    const text = [label[row], microBatch[row] >= 0 ? String(microBatch[row]) : ""].find((one) => one && one.length * 6.4 + 4 <= width);
    if (text) picture.append(shape("text", { class: "block", x: left + width / 2, y: top + 16 }, text));
  }

  // Which rows of a lane overlap and are drawn under each other; kept, because it does not depend on the zoom.
  levelsOf(occurrence) {
    if (this.rows.has(occurrence)) return this.rows.get(occurrence);
    const { lane } = this.record.instructions;
    const order = occurrence.row.map((_, index) => index).sort((a, b) => occurrence.start[a] - occurrence.start[b]);
    const free = this.record.lanes.map(() => []);
    const level = new Array(order.length);
    for (const index of order) {
      const ends = free[lane[occurrence.row[index]]];
      let found = ends.findIndex((end) => end <= occurrence.start[index]);
      if (found < 0) found = ends.length;
      ends[found] = occurrence.end[index];
      level[index] = found;
    }
    const result = { order, level, count: free.map((ends) => Math.max(1, ends.length)) };
    this.rows.set(occurrence, result);
    return result;
  }

  listen(panel) {
    const { picture } = panel;
    const position = (event) => event.clientX - picture.getBoundingClientRect().left;
    const share = (event) => (position(event) - this.gutter) / (this.width - this.gutter);
    picture.addEventListener("wheel", (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!this.window && (sideways || event.deltaY > 0)) return;
      event.preventDefault();
      if (sideways) this.panBy(event.deltaX / this.width);
      else this.zoomBy(1.0015 ** event.deltaY, Math.min(1, Math.max(0, share(event))));
      this.hover(null);
    }, { passive: false });
    picture.addEventListener("dblclick", () => this.zoomTo(0, this.end));
    picture.addEventListener("pointerdown", (event) => this.drag(event, picture, share));
    picture.addEventListener("pointerleave", () => this.hover(null));
    picture.addEventListener("pointermove", (event) => {
      if (event.buttons) return;
      const y = event.clientY - picture.getBoundingClientRect().top;
      this.hover(blockAt(panel.blocks, position(event), y), event);
    });
  }

  // A drag marks a span to zoom to; with Shift, or by touch, it moves the window.
  drag(start, picture, share) {
    if (start.button !== 0) return;
    const [from, to] = this.range();
    const first = share(start);
    const moving = start.shiftKey || start.pointerType === "touch";
    const box = shape("rect", { class: "selection", y: 0, height: this.lanes.height, width: 0 });
    const host = this.root;
    if (!moving) picture.append(box);
    const at = (event) => {
      const frame = host.getBoundingClientRect();
      return (event.clientX - frame.left - this.gutter) / (this.width - this.gutter);
    };
    const move = (event) => {
      this.hover(null);
      const now = at(event);
      if (moving) this.zoomTo(from - (now - first) * (to - from), to - (now - first) * (to - from));
      const [low, high] = [Math.min(first, now), Math.max(first, now)];
      box.setAttribute("x", this.gutter + low * (this.width - this.gutter));
      box.setAttribute("width", (high - low) * (this.width - this.gutter));
    };
    const stop = (event) => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", stop);
      removeEventListener("pointercancel", stop);
      box.remove();
      const [low, high] = [Math.min(first, at(event)), Math.max(first, at(event))];
      const wide = (high - low) * this.width > 5;
      if (!moving && wide && event.type === "pointerup") this.zoomTo(from + low * (to - from), from + high * (to - from));
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
    addEventListener("pointercancel", stop);
  }

  hover(block, event) {
    this.mark(block?.row ?? null, "twin");
    if (block) tooltip.show(event.clientX, event.clientY, ...this.describe(block.row));
    else tooltip.hide();
  }

  // Outlines an instruction in both panels.
  mark(row, name) {
    for (const { picture, blocks, occurrence } of this.panels) {
      picture.querySelectorAll(`.${name}`).forEach((node) => node.remove());
      const shown = occurrence.twin?.[row] ?? row;
      for (const block of row === null ? [] : blocks.filter((one) => one.row === shown)) {
        const { left, right, top, bottom } = block;
        picture.append(shape("rect", { class: name, x: left, y: top, width: right - left, height: bottom - top, rx: 2, "pointer-events": "none" }));
      }
    }
  }

  times(occurrence, row) {
    const index = occurrence ? occurrence.row.indexOf(row) : -1;
    if (index < 0) return null;
    const unit = this.record.tickNs * 1e-9;
    const { posted, start, end } = occurrence;
    return { start: start[index] * unit, duration: (end[index] - start[index]) * unit, waited: Math.max(0, start[index] - posted[index]) * unit };
  }

  describe(row) {
    const { instructions, kinds, lanes } = this.record;
    const place = [`rank ${lanes[instructions.lane[row]].rank}`];
    if (instructions.stage[row] >= 0) place.push(`stage ${instructions.stage[row]}`);
    if (instructions.microBatch[row] >= 0) place.push(`micro-batch ${instructions.microBatch[row]}`);
    if (instructions.bytes[row] > 0) place.push(byteText(instructions.bytes[row]));
    const columns = [["predicted", this.times(this.record.predicted, row)], ["measured", this.times(this.step, row)]].filter(([, times]) => times);
    const line = (name, key) => element("tr", {}, element("th", {}, name), ...columns.map(([, times]) => element("td", {}, seconds(times[key]))));
    const head = element("tr", {}, element("th", {}), ...columns.map(([name]) => element("th", {}, name)));
    const kind = kinds[instructions.kind[row]].name;
    return [
      element("strong", {}, `${kind} ${instructions.label[row]}`),
      element("span", { class: "where" }, place.join(" · ")),
      element("table", {}, element("tbody", {}, head, line("start", "start"), line("duration", "duration"), line("waited", "waited"))),
      element("span", { class: "id" }, `id ${instructions.id[row]}`),
    ];
  }

  onKey(event) {
    const moves = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "+" || event.key === "=") this.zoomBy(0.6);
    else if (event.key === "-") this.zoomBy(1 / 0.6);
    else if (event.key === "0") this.zoomTo(0, this.end);
    else if (event.key === "Escape") this.select(null);
    else if (moves[event.key]) this.moveSelection(...moves[event.key]);
    else return;
    event.preventDefault();
  }

  moveSelection(along, across) {
    const occurrence = this.step ?? this.record.predicted;
    const { lane } = this.record.instructions;
    const geometry = this.lanesOf(occurrence).lane;
    const shown = [...geometry.keys()].filter((index) => geometry[index]);
    const order = this.levelsOf(occurrence).order.filter((index) => shown.includes(lane[occurrence.row[index]]));
    const current = order.findIndex((index) => occurrence.row[index] === this.selected);
    if (current < 0) return this.select(occurrence.row[order[0]]);
    const here = lane[this.selected];
    if (along) {
      const line = order.filter((index) => lane[occurrence.row[index]] === here);
      const next = line[line.indexOf(order[current]) + along];
      return next === undefined ? undefined : this.select(occurrence.row[next]);
    }
    const start = occurrence.start[order[current]];
    const there = shown[shown.indexOf(here) + across];
    const other = order.filter((index) => lane[occurrence.row[index]] === there);
    if (!other.length) return undefined;
    const distance = (index) => Math.abs(occurrence.start[index] - start);
    return this.select(occurrence.row[other.reduce((best, index) => (distance(index) < distance(best) ? index : best))]);
  }

  select(row) {
    this.selected = row;
    if (row === null) {
      this.mark(null, "selected");
      return tooltip.hide();
    }
    this.reveal(row);
    this.mark(row, "selected");
    const parts = this.describe(row);
    const block = this.panels.at(-1).blocks.find((one) => one.row === row);
    const frame = this.panels.at(-1).picture.getBoundingClientRect();
    if (block) tooltip.show(frame.left + block.left, frame.top + block.bottom, ...parts);
    const measured = this.times(this.step, row);
    const predicted = this.times(this.record.predicted, row);
    const durations = [predicted && `predicted ${seconds(predicted.duration)}`, measured && `measured ${seconds(measured.duration)}`];
    return this.announce([parts[0].textContent, parts[1].textContent, ...durations.filter(Boolean)].join(", "));
  }

  // Moves the window so that it shows the instruction.
  reveal(row) {
    const occurrence = this.step ?? this.record.predicted;
    const index = occurrence.row.indexOf(row);
    const [from, to] = this.range();
    const middle = (occurrence.start[index] + occurrence.end[index]) / 2;
    if (middle < from || middle > to) this.zoomTo(middle - (to - from) / 2, middle + (to - from) / 2);
  }
}

// What the buttons of a timeline do: the id, the name, the text and the action of each.
function timelineActions(view) {
  return [
    ["pan-left", "Earlier", "\u2190", () => view.panBy(-0.3)],
    ["pan-right", "Later", "\u2192", () => view.panBy(0.3)],
    ["zoom-out", "Zoom out", "\u2212", () => view.zoomBy(1 / 0.6)],
    ["zoom-in", "Zoom in", "+", () => view.zoomBy(0.6)],
    ["zoom-reset", "Whole step", "whole step", () => view.zoomTo(0, view.end)],
  ];
}

// The kinds of a record's instructions with their colours.
function timelineLegend({ instructions, kinds }) {
  const used = [...new Set(instructions.kind)].sort((a, b) => a - b);
  return legend(used.map((kind) => kinds[kind]), null);
}

function lastEnd(occurrence) {
  return occurrence.end.reduce((last, end) => Math.max(last, end), 0);
}

// Compute lanes are tall enough for labels, lanes of messages are thin; ranks are set apart. Only ranks with
// one of the `names` have lanes, if there are names.
function laneGeometry(record, names = null) {
  let top = 2;
  let rank = null;
  const lane = record.lanes.map((one) => {
    if (names && !names[one.rank]) return null;
    const first = one.rank !== rank;
    if (first && rank !== null) top += RANK_GAP;
    rank = one.rank;
    const height = one.stream === "compute" ? TALL_LANE : THIN_LANE;
    const geometry = { top, height, first, name: names?.[one.rank] ?? `rank ${one.rank}` };
    top += height + 2;
    return geometry;
  });
  return { lane, height: top };
}

// The block under the pointer; a thin one wins over a wide one, and two pixels beside it still count.
function blockAt(blocks, x, y) {
  const reach = 2;
  const hits = blocks.filter((block) => x >= block.left - reach && x <= block.right + reach && y >= block.top && y < block.bottom);
  const inside = hits.filter((block) => x >= block.left && x <= block.right);
  return (inside.length ? inside : hits).reduce((best, block) => (!best || block.right - block.left < best.right - best.left ? block : best), null);
}
