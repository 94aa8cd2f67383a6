// Puts the parts of the page together. Names from the run reach the page only as text, never as markup.

const data = JSON.parse(document.getElementById("report-data").textContent);

function section(id) {
  const node = document.getElementById(id);
  node.hidden = false;
  return node.querySelector(".chart");
}

function stepName(step) {
  return step.reasons.length ? `${step.step} (${step.reasons.join(", ")})` : String(step.step);
}

function showTimeline(record) {
  const root = document.getElementById("timeline");
  root.hidden = false;
  const announcement = document.getElementById("announcement");
  const view = new TimelineView(document.getElementById("timeline-view"), record, (text) => {
    announcement.textContent = text;
  });
  document.getElementById("legend").replaceWith(timelineLegend(record));
  const heading = document.getElementById("timeline-title");
  if (!record.measured.length) heading.textContent = "One step, predicted";
  if (!record.predicted) heading.textContent = "One step, measured";
  if (record.shownRanks < record.ranks) {
    document.getElementById("timeline-note").textContent = `Showing ranks 0 to ${record.shownRanks - 1} of ${record.ranks}; the run's Parquet files hold all of them.`;
  }
  if (record.measured.length > 1) {
    document.getElementById("step-choice").hidden = false;
    const select = document.getElementById("step-select");
    select.append(...record.measured.map((step, index) => element("option", { value: index }, stepName(step))));
    select.value = String(view.measured);
    select.addEventListener("change", () => view.chooseStep(Number(select.value)));
  }
  for (const [id, , , action] of timelineActions(view)) document.getElementById(id).addEventListener("click", action);
}

function numberText(value) {
  return value === null ? "not finite" : significant(value, 4);
}

// The first and the last value of each curve.
function ends(series) {
  return series.map((one) => `${one.name} from ${numberText(one.points[0][1])} to ${numberText(one.points.at(-1)[1])}`).join("; ");
}

function showLoss(losses, heldOut) {
  const series = [
    { name: "training", colour: "var(--measured)", points: losses },
    { name: "held out", colour: "var(--held-out)", points: heldOut, dots: true },
  ].filter((one) => one.points.length);
  lineChart(section("loss"), { series, format: numberText, tick: significant, xName: "step", summary: `Loss: ${ends(series)}` });
}

function showStepTimes(points, interval, measured) {
  const series = [{ name: "measured", colour: "var(--measured)", points }, ...predictedSteps(interval, points)];
  lineChart(section("step-time"), {
    series,
    band: intervalBand(interval),
    format: seconds, tick: secondsTick, xName: "step", zero: true, cap: true,
    summary: `Step time: measured median ${seconds(measured)}${interval ? `, predicted ${seconds(interval[0])}` : ""}`,
  });
}

function showLive(curves) {
  const series = curves.map((curve, index) => ({ name: curve.name, colour: `var(--series-${index % 8})`, points: curve.points, steps: true }));
  const peaks = curves.map((curve) => `${curve.name}: peak of ${byteText(Math.max(...curve.points.map((point) => point[1])))}`);
  lineChart(section("live"), { series, format: byteText, tick: bytesTick, xFormat: seconds, xTick: secondsTick, xName: "time", zero: true, summary: `Live memory: ${peaks.join("; ")}` });
}

function showChart({ section: name, title, xName, curves }) {
  const series = curves.map((curve, index) => ({ name: curve.name, colour: `var(--series-${index % 8})`, points: curve.points }));
  lineChart(section(name), { series, format: numberText, tick: significant, xName, zero: true, summary: `${title}: ${ends(series)}` });
}

if (data.timeline) showTimeline(data.timeline);
if (data.loss.length || data.heldOut.length) showLoss(data.loss, data.heldOut);
if (data.stepTimes.length) showStepTimes(data.stepTimes, data.interval, data.measuredStep);
if (document.getElementById("memory")) memoryBars(section("memory"), data.memory);
if (data.live.length) showLive(data.live);
for (const chart of data.charts) showChart(chart);
// What has nothing to show would leave a gap in the grid.
for (const node of document.querySelectorAll(".charts > section[hidden]")) node.remove();
