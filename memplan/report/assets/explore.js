// The section with memory over the step: one chart, or two under one another that are moved together.

const ORIGINS = {
  compiled: "the compiler's own schedule and buffers, at the predicted times of its kernels",
};
const LOOPS = "A loop has a mark at each trip, or at every 2nd, 5th, 10th, ... of them.";
const KEYS = "Click to hold a moment, drag to zoom, double click for all; Ctrl and the wheel zoom, Shift and the wheel move. " +
  "Keys: arrows for the next moment (Shift: farther), Home, End, p for the peak, + and − to zoom, Page Up and Page Down to move, 0 for all.";

/**
 * Charts of some reports in a section. `onPin(chart, instant)` hears of every moment that is looked at.
 * `titles`: above each chart, where there are several.
 */
function explore(section, reports, titles, onPin) {
  const controls = make("div", { className: "controls" });
  const legend = make("div", { className: "legend", role: "group", ariaLabel: "Bands" });
  section.append(controls);
  const charts = reports.map((report, index) => {
    if (titles[index]) section.append(make("h3", { textContent: titles[index] }));
    const together = (view) => charts.forEach((other) => other !== chart && other.show(view));
    const label = `Moment of the step${titles[index] ? `, ${titles[index]}` : ""}`;
    const chart = new Explorer(report, section, label, (instant) => onPin(chart, instant), together);
    return chart;
  });
  if (charts.length > 1) {
    const end = Math.max(...charts.map((chart) => chart.end));
    const top = Math.max(...charts.map((chart) => chart.highest("device") / 1.07));
    for (const chart of charts) Object.assign(chart, { end, view: [0, end], least_top_bytes: top, showsLines: true });
  }
  section.append(legend);
  drawControls(controls, legend, charts);
  return charts;
}

function drawControls(parent, legend, charts) {
  const timelines = charts.map((chart) => chart.timeline);
  const deep = Math.max(...timelines.map((timeline) => deepest(layersOf(timeline))));
  const depth = make("select", { ariaLabel: "Depth of layers" });
  for (let level = 1; level <= deep; level += 1) {
    depth.append(make("option", { value: String(level), textContent: level === 1 ? "outermost" : `depth ${level}` }));
  }
  depth.value = String(usualDepth(layersOf(timelines[0])));
  const group = (grouping) => {
    const layers = largestLayers(timelines, Number(depth.value));
    for (const chart of charts) chart.group(grouping, Number(depth.value), layers);
    depth.hidden = grouping !== "layer" || deep < 2;
    drawLegend(legend, charts);
  };
  const choice = choiceOf("Stacked by", [["layer", "by layer"], ["decision", "by decision"]], group);
  depth.onchange = () => group("layer");
  const decided = (value) => DECISIONS.some(([key]) => key && key === value.decision);
  choice.hidden = !timelines.some((timeline) => timeline.values.some(decided));
  const button = (text, label, action) => make("button", { type: "button", textContent: text, title: label, ariaLabel: label, onclick: action });
  const lines = make("input", { type: "checkbox", checked: charts[0].showsLines });
  lines.onchange = () => charts.forEach((chart) => {
    chart.showsLines = lines.checked;
    chart.redraw();
  });
  parent.append(choice, depth);
  if (charts.some((chart) => chart.lines.length)) parent.append(make("label", {}, lines, charts.length > 1 ? " show the other step" : " show the unmodified step"));
  const [first] = charts; // the others follow its view
  const all = (action) => () => charts.forEach(action);
  parent.append(make("span", { className: "spring" }),
    button("−", "Zoom out", () => first.zoom(2)), button("+", "Zoom in", () => first.zoom(0.5)),
    button("whole step", "The whole step", () => first.zoomTo(0, first.end)), button("peak", "To the peak", all((chart) => chart.pinAt(chart.peak))));
  group("layer");
}

function drawLegend(legend, charts) {
  const bands = new Map(charts.flatMap((chart) => chart.bands).map((band) => [band.key, band]));
  const entries = [...bands.values()].reverse().map((band) => {
    const swatch = make("i", { className: "swatch" });
    swatch.style.background = band.color;
    const button = make("button", { type: "button", ariaPressed: "false" }, swatch, band.name);
    button.onclick = () => {
      const picked = charts[0].picked === band.key ? null : band.key;
      for (const other of legend.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button && picked !== null));
      for (const chart of charts) {
        chart.picked = picked;
        chart.draw();
      }
    };
    return button;
  });
  const key = (className, text) => make("span", {}, make("i", { className: `swatch ${className}` }), text);
  const paint = (color, text) => {
    const entry = key("", text);
    entry.firstChild.style.background = color;
    return entry;
  };
  legend.replaceChildren(...entries);
  charts[0].lines.forEach((line, index) => legend.append(key(index ? "dotted" : "dashed", charts.length > 1 ? "the other step" : line.name)));
  const does = (what) => charts.some((chart) => chart.timeline.instants.some((one) => one.doing === what));
  if (does("recompute")) legend.append(key("again", "runs again"));
  const kinds = new Set(charts.flatMap((chart) => chart.timeline.copies).filter((copy) => copy.kind).map((copy) => copy.kind));
  if (does("wait")) legend.append(key("waits", kinds.size ? "waits for a copy or a collective" : "waits for a copy"));
  for (const kind of kinds) legend.append(paint(colorOfCopy({ kind }), kind));
}
