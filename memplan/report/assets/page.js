// Puts the page of a report together from its JSON, which stands in it.

const report = unpacked(JSON.parse(byId("report").textContent));
const { timeline } = report;

function drawTiles() {
  const isPlanned = report.planner !== "none";
  const peak = report.compiled_peak_bytes ?? report.predicted_peak_bytes;
  const plain = report.baseline_peak_bytes;
  const [step, before] = [report.predicted_step_s, report.baseline_step_s];
  byId("tiles").append(
    tile("Peak", bytes(peak), bar(peak, report.budget_bytes), `${percent(peak, report.budget_bytes)} of the budget`,
      report.compiled_peak_bytes === null ? "predicted" : "by XLA's account",
      report.observed_peak_bytes === null ? "" : `${bytes(report.observed_peak_bytes)} observed`),
    tile("Saved", bytes(!isPlanned ? 0 : plain && plain - peak),
      !isPlanned ? "the step runs as it is" : plain ? `${percent(plain - peak, plain)} of the unmodified step's ${bytes(plain)}` : ""),
    tile("Time", seconds(step), before && isPlanned ? `${change(step, before)} against ${seconds(before)} unmodified` : "", "predicted"),
    tile("Host", bytes(report.host_peak_bytes), report.offloaded_bytes ? `${bytes(report.offloaded_bytes)} go there and back` : "nothing is offloaded",
      report.copy_s ? `${percent(report.hidden_copy_s || 0, report.copy_s)} of copies under computation` : ""),
  );
}

// ---- memory over the step ----

function drawMemory() {
  const section = byId("memory");
  if (!timeline || !timeline.instants.length) {
    section.append(make("p", { className: "note", textContent:
      "No memory over time: the compiler of this device tells no schedule, and nothing was planned." }));
    return null;
  }
  const live = drawLive();
  const lines = report.planner === "none" ? [] : report.lines; // the step as it is would be drawn over itself
  const [chart] = explore(section, [{ ...report, lines }], [""], live);
  const notes = [`Filled: ${ORIGINS[timeline.origin]}. Its peak is ${bytes(timeline.instants[chart.peak].device_bytes)}.`];
  const drawn = ["Dashed", "Dotted"];
  lines.forEach((line, index) => notes.push(`${drawn[index % 2]}, ${line.name}: ${ORIGINS[line.origin]}.`));
  if (!chart.showsLines) notes.push('It goes far above the picture: tick "show the unmodified step" to see it.');
  if (timeline.blocks.some(isLoop)) notes.push(LOOPS);
  notes.push(chart.hostNote);
  if (report.budget_bytes > chart.highest("device")) notes.push(`The budget of ${bytes(report.budget_bytes)} lies above the picture.`);
  section.append(make("p", { className: "note", textContent: [...notes, ...timeline.notes].filter(Boolean).join(" ") }));
  section.append(make("p", { className: "note", textContent: KEYS }));
  live(chart, chart.pin);
  return chart;
}

/** A value in memory, as a row. */
class Held {
  constructor(value, stay) {
    this.value = value;
    this.stay = stay;
  }

  get name() { return this.value.buffer || this.value.name; }

  get nbytes() { return this.value.nbytes; }

  get decision() { return this.value.decision; }

  get shape() { return this.value.shape; }

  get layer() { return this.value.layer; }

  get source() { return this.value.source; }

  get place() { return this.stay ? this.stay.place : "device"; }
}

/** The table of what is in memory at the pinned moment; answers a function that fills it. */
function drawLive() {
  const place = { title: "place", text: (row) => row.place, key: (row) => row.place, width: "4.2rem" };
  const columns = [COLUMNS.bytes, COLUMNS.value, COLUMNS.decision, COLUMNS.shape, COLUMNS.layer, COLUMNS.source];
  if (timeline.stays.some((stay) => stay.place === "host")) columns.splice(3, 0, place);
  const rows = timeline.stays.map((stay) => new Held(timeline.values[stay.value], stay)).sort((a, b) => b.value.nbytes - a.value.nbytes);
  let marking = () => {};
  const table = new Table(byId("live-table"), "In memory at the chosen moment", filled(columns, rows), (row) => marking(row));
  return (chart, index) => {
    const one = timeline.instants[index];
    const there = rows.filter(({ stay }) => stay.first <= index && index < stay.last);
    if (one.other_bytes) {
      const { other_bytes: nbytes, layer, source } = one;
      there.push(new Held({ name: "scratch and fragments", nbytes, decision: "other", shape: "", layer, source }, null));
    }
    marking = (row) => chart.mark(row && row.stay ? [row.stay] : []);
    const peak = index === chart.peak ? "At the peak, " : "At ";
    byId("live-title").textContent = `${peak}${seconds(one.start_s)}`;
    const doing = one.doing === "wait" ? "waiting for a copy" : one.name + (one.doing === "recompute" ? ", again" : "");
    byId("live-told").textContent = [`${bytes(one.device_bytes)} on the device`,
      one.host_bytes ? `${bytes(one.host_bytes)} on the host` : "", doing, chart.tripsOf(one), one.layer, one.source,
      counted(there.length, "array")].filter(Boolean).join(" · ");
    table.fill(there);
  };
}

// ---- decisions ----

const CHOICES = { keep: "keep", recompute: "recompute", host: "offload" }; // column -> the decision
const WIDTHS = { keep: "7.2rem", recompute: "6.9rem", host: "6rem" };

/** What a choice costs: {text, sentence, figure to sort by}. */
function costOf(row, choice) {
  const made = CHOICES[choice] === row.decision;
  if (!row.choices) {
    const kept = made && choice === "keep" ? "+0 B" : "";
    const taken = made && row.seconds ? seconds(row.seconds) : "";
    return { text: taken ? `+${taken}` : kept, sentence: taken ? `it takes ${taken}` : "", figure: row.seconds };
  }
  const { keep_bytes: keep, recompute_s: again, host_s: host, host_wait_s: wait, no_recompute: noAgain, no_host: noHost } = row.choices;
  const no = (reason) => ({ text: "–", sentence: `not possible: ${reason}`, figure: Infinity });
  if (choice === "keep") {
    return { text: `+${bytes(keep)}`, sentence: keep ? `the peak rises by ${bytes(keep)}` : "the peak stays", figure: keep };
  }
  if (choice === "recompute") {
    return again === null ? no(noAgain) : { text: `+${seconds(again)}`, sentence: `kernels take ${seconds(again)}`, figure: again };
  }
  if (host === null) return no(noHost);
  const copies = `copies take ${seconds(host)}`;
  if (wait === null) return { text: seconds(host), sentence: `${copies}, inside of a loop`, figure: host };
  const text = wait ? `+${seconds(wait)}` : "hidden";
  return { text, sentence: wait ? `${copies}, of which kernels wait ${seconds(wait)}` : `${copies}, beside kernels`, figure: wait };
}

function whyOf(row) {
  const told = Object.keys(CHOICES).map((choice) => [choice, costOf(row, choice).sentence]).filter(([, sentence]) => sentence);
  return told.map(([choice, sentence]) => `${choice}: ${sentence}`).join("; ");
}

const costColumn = (choice) => ({
  title: choice, right: true, width: WIDTHS[choice], key: (row) => costOf(row, choice).figure, tip: whyOf, text: (row) => costOf(row, choice).text,
  cell: (row) => make("span", { className: CHOICES[choice] === row.decision ? "made" : "unmade" }, costOf(row, choice).text),
});

function drawDecisions(chart) {
  const stays = new Map(); // by the buffer's name
  const layers = new Map();
  for (const stay of timeline ? timeline.stays : []) {
    const { buffer, layer } = timeline.values[stay.value];
    if (!stays.has(buffer)) stays.set(buffer, []);
    stays.get(buffer).push(stay);
    layers.set(buffer, layer);
  }
  const shapeOf = (row) => `${row.dtype}[${row.shape.join(",")}]`;
  const root = timeline ? rootOf(layersOf(timeline)) : "";
  const layerNamed = (row) => (layers.get(row.name) || "").replace(root, "");
  const costs = Object.keys(CHOICES).map(costColumn);
  const value = { ...COLUMNS.value, cell: (row) => make("span", {}, row.name, make("span", { className: "unmade" }, ` ${layerNamed(row)}`)) };
  const columns = [COLUMNS.bytes, COLUMNS.decision, ...costs, value, { ...COLUMNS.shape, text: shapeOf, key: shapeOf }, COLUMNS.source];
  const told = make("p", { className: "note", role: "status" });
  const rest = "keep, recompute, host: what each choice adds to the device's peak or to the step, while all others stay. " +
    "Point at a row, or choose one by the arrow keys, to read why.";
  told.textContent = rest;
  searched(byId("decisions"), "Decisions", columns, report.decisions, {
    kinds: ["keep", "offload", "recompute", "split"],
    kindOf: (row) => row.decision,
    textOf: (row) => `${row.name} ${layerNamed(row)} ${row.source} ${shapeOf(row)}`,
    sum: (found) => bytes(found.reduce((sum, row) => sum + row.nbytes, 0)),
    onRow: (row) => {
      if (chart) chart.mark((row && stays.get(row.name)) || []);
      told.textContent = row ? `${row.name}, ${bytes(row.nbytes)}, ${row.decision}. ${whyOf(row)}` : rest;
    },
  });
  byId("decisions").append(told);
}

// ---- collectives ----

function drawCollectives(chart, collectives) {
  const { links } = report.mesh;
  const bandwidthOf = (name) => links.filter((link) => link.name === name).map((link) => `${name}: ${(link.bandwidth / 1e9).toFixed(1)} GB/s`);
  const over = (row) => row.over.join(", ");
  const columns = [
    { title: "takes", text: spanOf, key: secondsOf, right: true, first: true, width: "6.2rem" },
    { title: "collective", text: (row) => row.kind, key: (row) => row.kind, width: "10rem" },
    { ...COLUMNS.bytes, first: false },
    { title: "over", text: over, key: over, tip: (row) => row.over.flatMap(bandwidthOf).join(", "), width: "9rem" },
    { ...COLUMNS.value, title: "layer" },
    COLUMNS.source,
  ];
  searched(byId("collectives"), "Collectives", columns, collectives, {
    kinds: COLLECTIVES,
    kindOf: (row) => row.kind,
    textOf: (row) => `${row.kind} ${row.name} ${row.source} ${over(row)}`,
    sum: (rows) => seconds(rows.reduce((sum, row) => sum + secondsOf(row), 0)),
    onRow: (row) => chart.shade(row ? [row] : []),
  });
}

// ---- the whole ----

document.documentElement.classList.add("drawn");
drawTiles();
const chart = drawMemory();
byId("live").hidden = !chart;
if (report.decisions.length) drawDecisions(chart);
else byId("decisions").hidden = true;
const collectives = timeline ? timeline.copies.filter((copy) => copy.kind) : [];
if (chart && collectives.length && report.mesh) drawCollectives(chart, collectives);
else byId("collectives").hidden = true;
drawTheme(chart ? [chart] : []);
