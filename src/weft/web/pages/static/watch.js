// A page that news from the server keep up to date. Names from runs reach it only as text, never as markup.

const page = JSON.parse(document.getElementById("page-data").textContent);
const main = document.getElementById("main");
const MAXIMUM_POINTS = 4000;
const MAXIMUM_NOTES = 200;

// Each entry: the curve's name in the news, its title, and how its values are written.
const CURVES = [
  { key: "loss", title: "Loss", unit: "per target", format: (value) => significant(value, 4), tick: significant },
  { key: "step_s", title: "Step time", unit: "", format: seconds, tick: secondsTick, zero: true, cap: true },
  { key: "tokens_per_s", title: "Tokens per second", unit: "", format: countText, tick: countText, zero: true },
  { key: "memory_bytes", title: "Memory", unit: "tensors of rank 0, peak so far", format: byteText, tick: bytesTick, zero: true },
];

// The connection to the server. The browser itself connects again, with the id of the last news.
function follow(address, name, show) {
  const status = document.getElementById("connection");
  const source = new EventSource(address);
  const tell = (text, lost) => {
    status.textContent = text;
    status.classList.toggle("lost", lost);
  };
  source.addEventListener("open", () => tell("live", false));
  source.addEventListener(name, (event) => {
    tell(`live, news of ${new Date().toLocaleTimeString()}`, false);
    show(JSON.parse(event.data));
  });
  source.addEventListener("error", () => {
    const ended = source.readyState === EventSource.CLOSED;
    tell(ended ? "the server has ended; start weft watch again" : "connection lost, trying again", true);
  });
}

function stateBadge(state) {
  return element("span", { class: `state ${state.split(" ")[0]}` }, state);
}

function card(title, unit, ...children) {
  const heading = element("h2", {}, title, ...(unit ? [" ", element("small", {}, unit)] : []));
  return element("section", { "aria-label": title }, heading, ...children);
}

// A card whose picture `save.js` saves.
function pictureCard(title, unit, ...children) {
  const section = card(title, unit, ...children);
  const head = element("div", { class: "section-head" });
  section.prepend(head);
  head.append(head.nextSibling, element("button", { type: "button", class: "save", "aria-label": `save as SVG: ${title}` }, "save as SVG"));
  return section;
}

// A table that scrolls sideways where it is wider than the page, also by keyboard.
function scrolling(title, table) {
  return element("div", { class: "scroll", role: "group", "aria-label": title, tabindex: 0 }, table);
}

// Adds points of later steps; a step that is trained again replaces what followed it.
function extend(points, added) {
  if (!added.length) return points;
  const kept = points.filter((point) => point[0] < added[0][0]).concat(added);
  return kept.length <= MAXIMUM_POINTS ? kept : thinned(kept);
}

// Keeps the lowest and the highest of each four points.
function thinned(points) {
  const result = [];
  for (let first = 0; first < points.length; first += 4) {
    const bucket = points.slice(first, first + 4).filter((point) => point[1] !== null).sort((a, b) => a[1] - b[1]);
    if (bucket.length) result.push(...[...new Set([bucket[0], bucket.at(-1)])].sort((a, b) => a[0] - b[0]));
  }
  return result;
}

// What the page knows of one run.
class Followed {
  constructor(run, changed) {
    this.name = run.name;
    this.head = null;
    this.forget();
    follow(run.news, "run", (news) => {
      if (news.anew) this.forget();
      this.head = news.head;
      for (const { key } of CURVES) this.curves[key] = extend(this.curves[key], news.curves[key] ?? []);
      this.heldOut = extend(this.heldOut, news.heldOut);
      this.notes = this.notes.concat(news.notes).slice(-MAXIMUM_NOTES);
      changed(this, news);
    });
  }

  forget() {
    this.curves = Object.fromEntries(CURVES.map(({ key }) => [key, []]));
    this.heldOut = [];
    this.notes = [];
  }
}

function figureTile({ label, value, detail, tone }) {
  return element(
    "li", {}, element("span", { class: "label" }, label),
    element("span", { class: `value ${tone}` }, value), element("span", { class: "detail" }, detail),
  );
}

function stepsBar(run, done) {
  return element("progress", { max: 1, value: done, "aria-label": `steps of ${run.name}` });
}

function runLink(run) {
  return element("a", { href: `/run/${encodeURIComponent(run.name)}` }, run.name);
}

function reportLink(run, head) {
  return head.state === "finished" ? [element("a", { href: run.report }, "report")] : [];
}

// The state and figures of one run.
function headOf(run, head) {
  const line = element("div", { class: "run-head" }, stateBadge(head.state), ...reportLink(run, head));
  return [line, stepsBar(run, head.done), element("ul", { class: "tiles" }, ...head.figures.map(figureTile))];
}

// The states and figures of several runs, one column each.
function headsTable(runs, heads) {
  const titles = runs.map((run, index) => {
    const head = heads[index];
    const state = head ? [" ", stateBadge(head.state), " ", ...reportLink(run, head), stepsBar(run, head.done)] : [];
    return element("th", { scope: "col" }, runLink(run), ...state, element("small", {}, head ? `${head.model}: ${head.plan}` : ""));
  });
  const labels = [...new Set(heads.flatMap((head) => (head ? head.figures.map((figure) => figure.label) : [])))];
  const rows = labels.map((label) => element("tr", {}, element("th", { scope: "row" }, label), ...heads.map((head) => figureCell(head, label))));
  const top = element("thead", {}, element("tr", {}, element("th", { scope: "col" }, ""), ...titles));
  return scrolling("Side by side", element("table", {}, top, element("tbody", {}, ...rows)));
}

function figureCell(head, label) {
  const figure = head?.figures.find((one) => one.label === label);
  return figure ? element("td", {}, element("strong", {}, figure.value), element("small", {}, figure.detail)) : element("td", {}, "-");
}

// One chart for each curve that any of the runs has.
class Curves {
  constructor(place) {
    this.place = place;
    this.charts = new Map();
  }

  show(runs) {
    for (const curve of CURVES) {
      const series = runs.flatMap((run, index) => curveSeries(curve, run, index, runs.length));
      if (!series.some((one) => one.points.length && !one.constant)) continue;
      const chart = this.chartOf(curve, series, runs);
      const update = this.charts.get(curve.key);
      if (update) {
        update(chart);
      } else {
        const root = element("div", { class: "chart" });
        this.place.append(pictureCard(curve.title, curve.unit, root));
        this.charts.set(curve.key, lineChart(root, chart));
      }
    }
  }

  chartOf(curve, series, runs) {
    const interval = runs.length === 1 && curve.key === "step_s" ? runs[0].head.interval : null;
    const words = series.filter((one) => !one.constant).map((one) => `${one.name} ${curve.format(one.points.at(-1)[1])}`);
    const format = (value) => (value === null ? "not finite" : curve.format(value));
    return {
      series, format, tick: curve.tick, xName: "step", zero: curve.zero, cap: curve.cap,
      band: intervalBand(interval),
      summary: `${curve.title}: ${words.join("; ")}`,
    };
  }
}

function curveSeries(curve, run, index, count) {
  if (!run.head) return [];
  const points = run.curves[curve.key];
  const colour = count === 1 ? "var(--measured)" : `var(--series-${2 * index})`;
  const series = [{ name: count === 1 ? (curve.key === "loss" ? "training" : "measured") : run.name, colour, points }];
  if (curve.key === "loss" && run.heldOut.length) {
    const own = count === 1 ? "var(--held-out)" : `var(--series-${2 * index + 1})`;
    series.push({ name: count === 1 ? "held out" : `${run.name}, held out`, colour: own, points: run.heldOut, dots: true });
  }
  if (curve.key === "step_s" && points.length && count === 1) series.push(...predictedSteps(run.head.interval, points));
  return series.filter((one) => one.points.length);
}

// One step, predicted above measured, and the ranks and instructions that are late in it.
class Step {
  constructor(place) {
    this.place = place;
    this.view = null;
  }

  show(news) {
    if (!news.timeline) {
      if (news.head.problem && !this.view) this.place.replaceChildren(card("One step", "", element("p", { class: "note" }, `No instructions are shown: ${news.head.problem}`)));
      return;
    }
    if (this.view) this.view.show(news.timeline);
    else this.open(news.timeline);
    this.note.textContent = news.timeline.shownRanks < news.timeline.ranks ? `Showing ranks 0 to ${news.timeline.shownRanks - 1} of ${news.timeline.ranks}.` : "";
    this.late.replaceChildren(...lateness(news.lateness));
  }

  open(record) {
    const view = element("div", { id: "timeline-view" });
    const announcement = element("p", { class: "visually-hidden", "aria-live": "polite" });
    this.note = element("p", { class: "note" });
    this.late = element("div", { class: "columns" });
    const group = element("span", { class: "buttons", role: "group", "aria-label": "Zoom and pan" });
    const parts = [group, timelineLegend(record), view, this.note, announcement];
    this.place.replaceChildren(pictureCard("The newest step, predicted above measured", "", ...parts), this.late);
    this.view = new TimelineView(view, record, (text) => {
      announcement.textContent = text;
    });
    for (const [, name, text, action] of timelineActions(this.view)) {
      const button = element("button", { type: "button", "aria-label": name, title: name }, text);
      button.addEventListener("click", action);
      group.append(button);
    }
  }
}

function lateness({ steps, kinds, ranks, left_out, worst }) {
  const column = (name) => element("th", { scope: "col" }, name);
  const rows = ranks.map(({ rank, late, cells }) => {
    const own = cells.map((times) => (times ? lateCell(times[1] - times[0], times[0]) : element("td", {}, "-")));
    const total = cells.reduce((sum, times) => sum + (times ? times[0] : 0), 0);
    return element("tr", {}, element("th", { scope: "row" }, `rank ${rank}`), lateCell(late, total), ...own);
  });
  const head = element("tr", {}, column("rank"), column("all"), ...kinds.map(column));
  const more = left_out ? [element("p", { class: "note" }, `${left_out} more ranks are closer to their predictions.`)] : [];
  const table = element("table", { class: "late" }, element("thead", {}, head), element("tbody", {}, ...rows));
  const worstRows = worst.map(({ rank, name, times }) => element(
    "tr", {}, element("th", { scope: "row" }, `${name}, rank ${rank}`),
    ...times.map((time) => element("td", {}, seconds(time))),
  ));
  const worstHead = element("tr", {}, ...["instruction", "predicted", "measured"].map(column));
  const worstTable = element("table", { class: "late words" }, element("thead", {}, worstHead), element("tbody", {}, ...worstRows));
  const unit = steps === 1 ? "seconds of a step above the prediction" : `seconds of a step above the prediction, medians of ${steps} steps`;
  const ofRanks = card("Lateness of ranks", unit, scrolling("Lateness of ranks", table), ...more);
  const latest = card("Latest instructions", "", scrolling("Latest instructions", worstTable));
  // Half the page has room for four kinds. Side by side or one above the other, they fill it.
  for (const one of [ofRanks, latest]) one.classList.toggle("wide", kinds.length > 4);
  return [ofRanks, latest];
}

// Differences of more than a fifth of the predicted time stand out.
function lateCell(late, predicted) {
  const tone = late > 0.2 * predicted ? "much" : late < -0.2 * predicted ? "early" : "";
  return element("td", { class: tone }, `${late > 0 ? "+" : late < 0 ? "\u2212" : ""}${seconds(Math.abs(late))}`);
}

function noteRow([time, text, bad]) {
  const moment = new Date(time * 1000);
  return element("li", {}, element("time", { datetime: moment.toISOString() }, moment.toLocaleTimeString()), element("span", { class: bad ? "bad" : "" }, text));
}

function showRun(run) {
  const head = element("div", {});
  const steps = element("div", {});
  const charts = element("div", { class: "charts" });
  main.append(head, steps, charts);
  const [curves, step] = [new Curves(charts), new Step(steps)];
  const notes = element("ul", { class: "notes", tabindex: "0", "aria-label": "Events" });
  main.append(card("Events", "the newest first", notes));
  new Followed(run, (followed, news) => {
    document.getElementById("subtitle").textContent = `${followed.head.model}: ${followed.head.plan}`;
    head.replaceChildren(...headOf(run, followed.head));
    step.show(news);
    curves.show([followed]);
    if (news.notes.length || news.anew) notes.replaceChildren(...followed.notes.toReversed().map(noteRow));
  });
}

function showSideBySide(runs) {
  const table = card("Side by side", "");
  table.classList.add("side-by-side");
  const charts = element("div", { class: "charts" });
  main.append(table, charts);
  const curves = new Curves(charts);
  const all = runs.map((run) => new Followed(run, () => {
    table.replaceChildren(headsTable(runs, all.map((one) => one.head)));
    curves.show(all.filter((one) => one.head));
  }));
}

function showList() {
  const body = element("tbody", {});
  const chosen = new Set();
  const button = element("button", { type: "button", disabled: "" }, "compare two runs");
  button.addEventListener("click", () => {
    location.href = `/compare/${[...chosen].map(encodeURIComponent).join("/")}`;
  });
  const choose = (name, box) => {
    if (box.checked) chosen.add(name);
    else chosen.delete(name);
    button.disabled = chosen.size !== 2;
  };
  const head = ["", "run", "state", ...page.head].map((name, index) => element("th", { scope: "col", class: index > 2 ? "number" : "" }, name));
  const table = element("table", { class: "runs" }, element("thead", {}, element("tr", {}, ...head)), body);
  main.append(card("Runs", "the newest first", element("div", { class: "controls" }, button), scrolling("Runs", table)));
  follow("/news", "runs", (runs) => {
    body.replaceChildren(...runs.map((run) => listRow(run, chosen.has(run.name), choose)));
  });
}

function listRow(run, isChosen, choose) {
  const box = element("input", { type: "checkbox", "aria-label": `choose ${run.name}` });
  box.checked = isChosen;
  box.addEventListener("change", () => choose(run.name, box));
  const name = element("th", { scope: "row" }, runLink(run), element("span", { class: "plan" }, `${run.model}: ${run.plan}`));
  const state = element("td", {}, stateBadge(run.state), stepsBar(run, run.done));
  return element("tr", {}, element("td", {}, box), name, state, ...run.figures.map((figure) => element("td", { class: "number" }, figure)));
}

if (page.runs === null) showList();
else if (page.runs.length === 1) showRun(page.runs[0]);
else showSideBySide(page.runs);
