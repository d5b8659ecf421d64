// Puts the page together from the report, which stands in it as JSON.

const report = JSON.parse(byId("report").textContent);
const { timeline } = report;

function tile(title, figure, ...told) {
  return make("div", { className: "tile" }, make("h3", { textContent: title }), make("strong", { textContent: figure }),
    ...told.filter(Boolean).map((text) => (typeof text === "string" ? make("p", { textContent: text }) : text)));
}

function bar(part, whole) {
  const filled = make("i");
  filled.style.width = `${Math.min(100, (100 * part) / whole)}%`;
  if (part > whole) filled.className = "over";
  return make("div", { className: "bar", role: "img", ariaLabel: percent(part, whole) }, filled);
}

function drawTiles() {
  const peak = report.compiled_peak_bytes ?? report.predicted_peak_bytes;
  const said = report.compiled_peak_bytes === null ? "predicted" : "measured by the compiler";
  const plain = report.baseline_peak_bytes;
  const [step, before] = [report.predicted_step_s, report.baseline_step_s];
  const isPlanned = report.planner !== "none";
  const hidden = report.copy_s ? `${percent(report.hidden_copy_s || 0, report.copy_s)} of copies under computation` : "";
  byId("tiles").append(
    tile("Device peak", bytes(peak), bar(peak, report.budget_bytes),
      `${percent(peak, report.budget_bytes)} of the budget of ${bytes(report.budget_bytes)}; ${said}`,
      report.compiled_peak_bytes !== null && peak !== report.predicted_peak_bytes
        ? `${bytes(report.predicted_peak_bytes)} predicted` : "",
      report.observed_peak_bytes !== null ? `${bytes(report.observed_peak_bytes)} observed` : ""),
    tile("Unmodified step", bytes(plain), !isPlanned ? "it runs as it is" : plain ? `${change(peak, plain)} with this plan` : "",
      report.jit_peak_bytes && report.jit_peak_bytes !== plain ? `${bytes(report.jit_peak_bytes)} by jax.jit, where XLA rematerializes` : "",
      report.floor_bytes ? `no order goes below ${bytes(report.floor_bytes)}` : ""),
    tile("Step time", seconds(step), before && isPlanned ? `${change(step, before)} against ${seconds(before)} unmodified; predicted` : "predicted",
      report.lower_bound_s ? `no plan beats ${seconds(report.lower_bound_s)}` : ""),
    tile("To the host and back", bytes(report.offloaded_bytes), `${bytes(report.host_peak_bytes)} on the host at most`, hidden),
    tile("Computed again", operations(report.recomputed_flops), isPlanned ? `planner ${report.planner}, ${report.attempts} compiled` : ""),
  );
}

// ---- memory over the step ----

const ORIGINS = {
  compiled: "the compiler's own schedule and buffers, at the times of a roofline model",
};

function drawMemory() {
  if (!timeline || !timeline.instants.length) {
    byId("memory").append(make("p", { className: "note", textContent:
      "No memory over time: the compiler of this device tells no schedule, and nothing was planned." }));
    return null;
  }
  const controls = make("div", { className: "controls" });
  const legend = make("div", { className: "legend", role: "group", ariaLabel: "Bands" });
  byId("memory").append(controls);
  const live = drawLive();
  const chart = new Explorer(report, byId("memory"), (index) => live(chart, index));
  byId("memory").append(legend);
  drawControls(controls, legend, chart);
  const notes = [`Filled: ${ORIGINS[timeline.origin]}. Its peak is ${bytes(timeline.instants[chart.pin].device_bytes)}.`];
  const drawn = ["Dashed", "Dotted"];
  report.lines.forEach((line, index) => notes.push(`${drawn[index % 2]}, ${line.name}: ${ORIGINS[line.origin]}.`));
  if (report.budget_bytes > chart.highest("device")) notes.push(`The budget of ${bytes(report.budget_bytes)} lies above the picture.`);
  byId("memory").append(make("p", { className: "note", textContent: [...notes, ...timeline.notes].join(" ") }));
  byId("memory").append(make("p", { className: "note", textContent:
    "Click to hold a moment, drag to zoom. Keys: arrows for the next moment, Home, End, p for the peak, + and − to zoom, 0 for all." }));
  live(chart, chart.pin);
  return chart;
}

function drawControls(parent, legend, chart) {
  const usual = usualDepth(timeline);
  const depth = make("select", { ariaLabel: "Depth of layers" });
  for (let level = 1; level <= deepest(timeline); level += 1) {
    depth.append(make("option", { value: String(level), textContent: level === 1 ? "outermost" : `depth ${level}` }));
  }
  depth.value = String(usual || 1);
  const group = (grouping) => {
    chart.group(grouping, Number(depth.value));
    depth.hidden = grouping !== "layer" || deepest(timeline) < 2;
    for (const button of choice.children) button.setAttribute("aria-pressed", String(button.dataset.grouping === grouping));
    drawLegend(legend, chart);
  };
  const choice = make("div", { className: "choice", role: "group", ariaLabel: "Stacked by" });
  for (const grouping of ["layer", "decision"]) {
    const button = make("button", { type: "button", textContent: `by ${grouping}`, onclick: () => group(grouping) });
    button.dataset.grouping = grouping;
    choice.append(button);
  }
  depth.onchange = () => group("layer");
  choice.hidden = !timeline.values.some((value) => DECISIONS.some(([key]) => key && key === value.decision));
  const button = (text, label, action) => make("button", { type: "button", textContent: text, title: label, ariaLabel: label, onclick: action });
  const lines = make("input", { type: "checkbox", checked: true });
  lines.onchange = () => {
    chart.showsLines = lines.checked;
    chart.draw();
  };
  parent.append(choice, depth);
  if (report.lines.length) parent.append(make("label", {}, lines, " other programs"));
  parent.append(make("span", { className: "spring" }),
    button("−", "Zoom out", () => chart.zoom(2)), button("+", "Zoom in", () => chart.zoom(0.5)),
    button("whole step", "The whole step", () => chart.zoomTo(0, chart.end)), button("peak", "To the peak", () => chart.pinAt(peakOf(timeline))));
  group("layer");
}

function drawLegend(legend, chart) {
  const entries = [...chart.bands].reverse().map((band) => {
    const swatch = make("i", { className: "swatch" });
    swatch.style.background = band.color;
    const button = make("button", { type: "button", ariaPressed: "false" }, swatch, band.name);
    button.onclick = () => {
      chart.picked = chart.picked === band.key ? null : band.key;
      for (const other of legend.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button && chart.picked !== null));
      chart.draw();
    };
    return button;
  });
  const key = (className, text) => make("span", {}, make("i", { className: `swatch ${className}` }), text);
  legend.replaceChildren(...entries);
  report.lines.forEach((line, index) => legend.append(key(index ? "dotted" : "dashed", line.name)));
  if (timeline.instants.some((one) => one.doing === "recompute")) legend.append(key("again", "runs again"));
  if (timeline.instants.some((one) => one.doing === "wait")) legend.append(key("waits", "waits for a copy"));
}

/** The table of what is in memory at the pinned moment; answers a function that fills it. */
function drawLive() {
  const place = { title: "place", text: (row) => row.place, key: (row) => row.place };
  const columns = [COLUMNS.bytes, COLUMNS.value, COLUMNS.decision, COLUMNS.shape, COLUMNS.layer, COLUMNS.source];
  if (timeline.stays.some((stay) => stay.place === "host")) columns.splice(3, 0, place);
  let marking = () => {};
  const table = new Table(byId("live-table"), "In memory at the chosen moment", columns, (row) => marking(row));
  return (chart, index) => {
    const one = timeline.instants[index];
    const rows = liveAt(timeline, index).map((stay) => ({ ...timeline.values[stay.value], place: stay.place, stay }));
    if (one.other_bytes) {
      rows.push({ name: "scratch and fragments", nbytes: one.other_bytes, decision: "other", shape: "", layer: one.layer,
        source: one.source, place: "device", stay: null });
    }
    marking = (row) => chart.mark(row && row.stay ? [row.stay] : []);
    const peak = index === peakOf(timeline) ? "At the peak, " : "At ";
    byId("live-title").textContent = `${peak}${seconds(one.start_s)}`;
    const doing = one.doing === "wait" ? "waiting for a copy" : one.name + (one.doing === "recompute" ? ", again" : "");
    byId("live-told").textContent = [`${bytes(one.device_bytes)} on the device`,
      one.host_bytes ? `${bytes(one.host_bytes)} on the host` : "", doing, one.layer, one.source].filter(Boolean).join(" · ");
    table.fill(rows.sort((a, b) => b.nbytes - a.nbytes));
  };
}

// ---- decisions ----

function drawDecisions(chart) {
  const stays = new Map();
  for (const stay of timeline ? timeline.stays : []) {
    const { name } = timeline.values[stay.value];
    stays.set(name, [...(stays.get(name) || []), stay]);
  }
  const layers = new Map((timeline ? timeline.values : []).map((value) => [value.name, value.layer]));
  const rows = report.decisions.map((one) => ({ ...one, shape: `${one.dtype}[${one.shape.join(",")}]`, layer: layers.get(one.name) || "" }));
  const costs = { title: "costs", text: (row) => (row.seconds ? seconds(row.seconds) : "–"), key: (row) => row.seconds, right: true };
  const columns = [COLUMNS.bytes, COLUMNS.value, COLUMNS.decision, costs, COLUMNS.shape, COLUMNS.layer, COLUMNS.source];
  const search = make("input", { type: "search", placeholder: "search values, layers, lines", ariaLabel: "Search decisions" });
  const told = make("span", { className: "told", role: "status" });
  const choice = make("div", { className: "choice", role: "group", ariaLabel: "Decision" });
  byId("decisions").append(make("div", { className: "controls" }, choice, search, told));
  const table = new Table(byId("decisions"), "Decisions", columns, (row) => chart && chart.mark((row && stays.get(row.name)) || []));
  let chosen = "all";
  const refill = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => (chosen === "all" || row.decision === chosen)
      && words.every((word) => `${row.name} ${row.layer} ${row.source} ${row.shape}`.toLowerCase().includes(word)));
    told.textContent = `${found.length} of ${rows.length}, ${bytes(found.reduce((sum, row) => sum + row.nbytes, 0))}`;
    table.fill(found);
  };
  const split = rows.some((row) => row.decision === "split") ? ["split"] : [];
  for (const decision of ["all", "keep", "offload", "recompute", ...split]) {
    const count = decision === "all" ? rows.length : rows.filter((row) => row.decision === decision).length;
    const button = make("button", { type: "button", ariaPressed: String(decision === "all"), onclick: () => {
      chosen = decision;
      for (const other of choice.children) other.setAttribute("aria-pressed", String(other === button));
      refill();
    } }, `${decision} ${count}`);
    button.dataset.decision = decision;
    choice.append(button);
  }
  search.oninput = refill;
  refill();
}

// ---- the whole ----

function drawTheme(chart) {
  const themes = ["auto", "light", "dark"];
  const button = byId("theme");
  button.hidden = false;
  button.onclick = () => {
    const now = themes[(themes.indexOf(document.documentElement.dataset.theme || "auto") + 1) % themes.length];
    if (now === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = now;
    button.textContent = `theme: ${now}`;
    if (chart) chart.draw();
  };
  const redraw = () => chart && chart.draw();
  addEventListener("beforeprint", redraw);
  addEventListener("afterprint", redraw);
}

document.documentElement.classList.add("drawn");
drawTiles();
const chart = drawMemory();
byId("live").hidden = !chart;
if (report.decisions.length) drawDecisions(chart);
else byId("decisions").hidden = true;
drawTheme(chart);
