// The layers of a placement on the ranks that compute them, drawn on a canvas: thousands stay fluent.
// Wheel, plus and minus zoom; a drag moves; arrows choose a layer; 0 or a double click shows the whole pass.

const LANE = 26;
const GAP = 6;
const AXIS = 20;
const NEAREST = 1e-5;

class PlacedLayersView {
  constructor(root, record) {
    this.record = record;
    this.canvas = root.querySelector("canvas");
    this.readout = root.querySelector("output");
    this.end = record.end.reduce((one, other) => Math.max(one, other), 0) || 1;
    this.window = [0, this.end];
    this.chosen = null;
    // By lane, the layers in the order of time.
    this.order = record.lanes.map((_, lane) => record.lane.flatMap((one, layer) => (one === lane ? [layer] : [])));
    for (const layers of this.order) layers.sort((a, b) => record.start[a] - record.start[b]);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  x(time) {
    const [from, to] = this.window;
    return this.gutter + ((time - from) / (to - from)) * (this.width - this.gutter);
  }

  zoomBy(factor, x) {
    const [from, to] = this.window;
    const centre = from + ((x - this.gutter) / (this.width - this.gutter)) * (to - from);
    this.show(centre - (centre - from) * factor, centre + (to - centre) * factor);
  }

  show(from, to) {
    const length = Math.min(Math.max(to - from, this.end * NEAREST), this.end);
    const start = Math.min(Math.max(from, 0), this.end - length);
    this.window = [start, start + length];
    this.draw();
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.gutter = this.width < 620 ? 92 : 190;
    const height = AXIS + this.record.lanes.length * (LANE + GAP);
    this.canvas.style.height = `${height}px`;
    this.canvas.width = this.width * ratio;
    this.canvas.height = height * ratio;
    const pen = this.canvas.getContext("2d");
    const style = getComputedStyle(this.canvas);
    const colour = (name) => style.getPropertyValue(name);
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    this.drawAxis(pen, colour);
    for (const [lane, name] of this.record.lanes.entries()) {
      const top = AXIS + lane * (LANE + GAP);
      pen.fillStyle = colour("--lane");
      pen.fillRect(this.gutter, top, this.width - this.gutter, LANE);
      pen.fillStyle = colour("--ink");
      pen.textAlign = "right";
      pen.fillText(name, this.gutter - 10, top + 17, this.gutter - 14);
      this.drawLayers(pen, this.order[lane], top, colour("--ink"));
    }
  }

  drawAxis(pen, colour) {
    pen.fillStyle = colour("--soft");
    const [from, to] = this.window;
    for (const [time, text] of tickTexts(ticks(from, to, (this.width - this.gutter) / 110), secondsTick)) {
      pen.textAlign = this.x(time) > this.width - 40 ? "right" : "center";
      pen.fillText(text, this.x(time), 12);
    }
  }

  // Layers narrower than half a pixel that fall on a drawn one are left out.
  drawLayers(pen, layers, top, ink) {
    const { start, end, kind, stage, colours, names } = this.record;
    let [drawn, others] = [-1, -1];
    for (const [place, layer] of layers.entries()) {
      if (place === 0 || stage[layers[place - 1]] !== stage[layer]) others += 1;
      const left = Math.max(this.x(start[layer]), this.gutter);
      const right = Math.min(this.x(end[layer]), this.width);
      if (right < this.gutter || left > this.width) continue;
      if (right - left < 0.5 && left < drawn && layer !== this.chosen) continue;
      const width = Math.max(right - left, 0.8);
      drawn = left + width;
      // Every other stage of a rank is darker.
      pen.fillStyle = shaded(colours[Math.min(kind[layer], colours.length - 1)], others % 2);
      pen.fillRect(left, top, width > 3 ? width - 0.6 : width, LANE);
      if (layer === this.chosen) {
        pen.strokeStyle = ink;
        pen.lineWidth = 2;
        pen.strokeRect(left + 1, top + 1, Math.max(width - 2, 1), LANE - 2);
      }
      if (width > 20 && pen.measureText(names[layer]).width + 6 < width) {
        pen.fillStyle = "#ffffff";
        pen.textAlign = "center";
        pen.fillText(names[layer], left + width / 2, top + 17);
      }
    }
  }

  at(x, y) {
    const lane = Math.floor((y - AXIS) / (LANE + GAP));
    const near = (layer) => this.x(this.record.start[layer]) <= x + 0.5 && x - 0.5 <= this.x(this.record.end[layer]);
    return (this.order[lane] ?? []).find(near) ?? null;
  }

  choose(layer) {
    this.chosen = layer;
    const { names, kinds, kind, lanes, lane, stage, start, end, parameters } = this.record;
    this.readout.textContent = layer === null ? this.readout.dataset.none : [
      names[layer], kinds[kind[layer]], `stage ${stage[layer]} on ${lanes[lane[layer]]}`,
      `${seconds(end[layer] - start[layer])} from ${seconds(start[layer])}`, `${countText(parameters[layer])} parameters`,
    ].join(", ");
    this.draw();
  }

  // The next layer of the lane, or the one of another lane at the same time; it comes into view.
  step(along, across) {
    const { lane, start, end } = this.record;
    if (this.chosen === null) return this.choose(this.order.find((layers) => layers.length)?.[0] ?? null);
    const layers = this.order[Math.min(Math.max(lane[this.chosen] + across, 0), this.order.length - 1)];
    const place = across ? layers.findLastIndex((one) => start[one] <= start[this.chosen]) : layers.indexOf(this.chosen) + along;
    this.choose(layers[Math.min(Math.max(place, 0), layers.length - 1)]);
    const [from, to] = this.window;
    if (end[this.chosen] < from || start[this.chosen] > to) {
      const middle = (start[this.chosen] + end[this.chosen]) / 2;
      this.show(middle - (to - from) / 2, middle + (to - from) / 2);
    }
  }

  listen() {
    const { canvas } = this;
    const keys = {
      ArrowRight: () => this.step(1, 0), ArrowLeft: () => this.step(-1, 0), ArrowDown: () => this.step(0, 1), ArrowUp: () => this.step(0, -1),
      "+": () => this.zoomBy(0.5, this.middle()), "-": () => this.zoomBy(2, this.middle()), 0: () => this.show(0, this.end),
    };
    canvas.addEventListener("keydown", (event) => {
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    canvas.addEventListener("wheel", (event) => {
      const [from, to] = this.window;
      // Zooming out of the whole pass scrolls the page.
      if (event.deltaY > 0 && to - from >= this.end) return;
      event.preventDefault();
      this.zoomBy(1.0015 ** event.deltaY, event.offsetX);
    }, { passive: false });
    canvas.addEventListener("dblclick", () => this.show(0, this.end));
    canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
    canvas.addEventListener("pointermove", (event) => {
      if (!event.buttons) return this.choose(this.at(event.offsetX, event.offsetY));
      const [from, to] = this.window;
      const moved = (event.movementX / (this.width - this.gutter)) * (to - from);
      this.show(from - moved, to - moved);
    });
  }

  // Zooming by keys keeps the chosen layer where it is.
  middle() {
    const { start, end } = this.record;
    return this.chosen === null ? (this.gutter + this.width) / 2 : this.x((start[this.chosen] + end[this.chosen]) / 2);
  }
}

const placedLayers = document.getElementById("placed-layers-data");
if (placedLayers) new PlacedLayersView(document.getElementById("placed-layers"), JSON.parse(placedLayers.textContent));
