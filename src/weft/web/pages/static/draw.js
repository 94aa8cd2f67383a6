// Small helpers that every picture of the report uses: elements, scales, ticks and quantities for people.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function significant(value, digits = 3) {
  return value === 0 ? "0" : String(Number(value.toPrecision(digits)));
}

// Quantities are written as weft writes them everywhere else: three digits, decimal units.
function threeDigits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

function scaled(value, units, write) {
  if (value === null || value === undefined) return "-";
  if (value === 0) return `0 ${units.find(([, size]) => size === 1)[0]}`;
  // 0.9995 of a unit is written as 1.00 of it, not as 1000 of the next smaller one.
  const [unit, factor] = units.find(([, size]) => Math.abs(value) >= 0.9995 * size) ?? units.at(-1);
  return `${write(value / factor)} ${unit}`;
}

const SECOND_UNITS = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]];
const BYTE_UNITS = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];

function seconds(value) {
  const size = Math.abs(value);
  if (size >= 3600) return `${Math.trunc(Math.round(value / 60) / 60)} h ${String(Math.round(size / 60) % 60).padStart(2, "0")} min`;
  return size >= 300 ? `${(value / 60).toFixed(1)} min` : scaled(value, SECOND_UNITS, threeDigits);
}

function byteText(value) {
  if (value !== null && Math.abs(value) < 1000) return `${value} B`;
  return scaled(value, BYTE_UNITS, threeDigits);
}

const COUNT_UNITS = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]];

// Counts have no unit; a curve of them needs no more than three digits.
function countText(value) {
  return value !== null && Math.abs(value) < 1000 ? significant(value) : scaled(value, COUNT_UNITS, significant);
}

// Ticks are round numbers and are written without trailing zeros; all of an axis have the unit of the largest.
function tickOf(units) {
  const write = (value, [unit, size]) => `${significant(value / size, 6)} ${unit}`;
  const unitOf = (highest) => units.find(([, size]) => highest >= size * 0.9995) ?? units.at(-1);
  const tick = (value) => write(value, unitOf(Math.abs(value)));
  tick.ofAxis = (values) => (value) => write(value, unitOf(Math.max(...values.map(Math.abs))));
  return tick;
}

const secondsTick = tickOf(SECOND_UNITS);
const bytesTick = tickOf(BYTE_UNITS);

// The texts of an axis, as [value, text].
function tickTexts(values, tick) {
  const write = tick.ofAxis ? tick.ofAxis(values) : (value) => tick(value);
  return values.map((value) => [value, write(value)]);
}

// Round numbers from `low` to `high`, at most about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const result = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) result.push(index * step);
  return result;
}

function scale(fromLow, fromHigh, toLow, toHigh) {
  const factor = (toHigh - toLow) / (fromHigh - fromLow || 1);
  return (value) => toLow + (value - fromLow) * factor;
}

function shaded(colour, shade) {
  const channels = [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));
  return `#${channels.map((c) => Math.round(c * (1 - 0.34 * shade)).toString(16).padStart(2, "0")).join("")}`;
}

// Calls `draw(width)` now and whenever the element's width changes. Returns a function that draws again.
function redrawOnResize(node, draw) {
  let width = 0;
  const check = () => {
    if (node.clientWidth !== width && node.clientWidth > 0) {
      width = node.clientWidth;
      draw(width);
    }
  };
  // The next frame, because drawing changes heights and an observer must not cause what it observes.
  new ResizeObserver(() => requestAnimationFrame(check)).observe(node);
  return () => width && draw(width);
}

const tooltip = {
  node: document.getElementById("tooltip"),
  show(x, y, ...children) {
    this.node.replaceChildren(...children);
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
    const top = y + 16 + box.height > innerHeight ? y - 16 - box.height : y + 16;
    this.node.style.left = `${Math.max(8, left)}px`;
    this.node.style.top = `${Math.max(8, top)}px`;
  },
  hide() {
    this.node.hidden = true;
  },
};
