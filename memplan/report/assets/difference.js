// Puts the page of a difference together from its JSON, which stands in it.

const difference = unpacked(JSON.parse(byId("report").textContent));
const { old, new: now } = difference;
const sides = [["before", old], ["now", now]];

/** `+3.0 MiB`, `−1.5 KiB`. */
const signed = (count) => `${count < 0 ? "−" : "+"}${bytes(Math.abs(count))}`;

function drawTiles() {
  const risen = (title, before, after, text, more) => tile(title, text(after), after === before ? "as before"
    : `${text(before)} before${before ? `: ${change(after, before)}` : ""}`, more);
  byId("tiles").append(
    risen("Device peak", old.compiled_bytes, now.compiled_bytes, bytes,
      now.compiled_bytes !== old.compiled_bytes ? `${signed(now.compiled_bytes - old.compiled_bytes)}` : ""),
    risen("Step time", old.step_s, now.step_s, seconds, "predicted"),
    risen("Host peak", old.host_bytes, now.host_bytes, bytes, ""),
    tile("Buffers at the peak", String(difference.buffers.length), "that are new, gone, larger or smaller",
      old.other_bytes !== now.other_bytes ? `${signed(now.other_bytes - old.other_bytes)} between buffers` : ""),
  );
}

function drawMemory() {
  const section = byId("memory");
  const known = sides.filter(([, side]) => side.timeline && side.timeline.instants.length);
  if (!known.length) {
    section.append(make("p", { className: "note", textContent: "Neither report has memory over time." }));
    return [];
  }
  const lineOf = ([name, { timeline }]) => ({ name, starts_s: timeline.instants.map((one) => one.start_s),
    device_bytes: timeline.instants.map((one) => one.device_bytes), end_s: timeline.instants.at(-1).end_s });
  const shown = known.map((one) => ({ timeline: one[1].timeline, budget_bytes: one[1].budget_bytes, floor_bytes: null,
    lines: known.filter((other) => other !== one).map(lineOf) }));
  const titles = known.map(([name, side]) => `${name}: ${bytes(side.compiled_bytes)}${side.peak_kernel ? ` while ${side.peak_kernel} runs` : ""}`);
  const told = make("p", { className: "note", role: "status" });
  const tell = () => {
    told.textContent = charts.map((chart, index) => {
      const { start_s: start, device_bytes: device, layer, name } = chart.timeline.instants[chart.pin];
      return `${known[index][0]}, at ${seconds(start)}: ${bytes(device)}, ${layer || name || "waiting"}`;
    }).join("; ");
  };
  const charts = explore(section, shown, titles, tell);
  section.append(told);
  tell();
  const notes = known.length > 1 ? "Both have the same scales, and the dashed line is the other step."
    : `The report of the step as it was ${known[0][0] === "now" ? "before" : "now"} has no memory over time.`;
  section.append(make("p", { className: "note", textContent: `${notes} Filled: ${ORIGINS.compiled}.` }));
  section.append(make("p", { className: "note", textContent: KEYS }));
  return charts;
}

function drawBuffers(charts) {
  const rows = difference.buffers.map((one) => ({ ...one, more: one.new_bytes - one.old_bytes,
    shape: [...new Set([one.old_shape, one.new_shape].filter(Boolean))].join(" → ") }));
  const figure = (title, of, text) => ({ title, text: (row) => text(of(row)), key: of, right: true, width: "7rem" });
  const more = { ...figure("more", (row) => row.more, signed), key: (row) => Math.abs(row.more), first: true };
  const kind = { title: "change", cell: (row) => pill(row.kind), key: (row) => row.kind, width: "6rem" };
  const columns = [more, kind, figure("before", (row) => row.old_bytes, bytes), figure("now", (row) => row.new_bytes, bytes),
    { ...COLUMNS.shape, width: "20rem" }, COLUMNS.source, { ...COLUMNS.value, title: "buffer" }];
  searched(byId("buffers"), "Buffers at the peak", columns, rows, {
    kinds: ["new", "larger", "smaller", "gone"],
    kindOf: (row) => row.kind,
    textOf: (row) => `${row.name} ${row.source} ${row.shape}`,
    sum: (found) => signed(found.reduce((sum, row) => sum + row.more, 0)),
    onRow: (row) => charts.forEach((chart) => chart.mark(row ? alike(chart, row) : [])),
  });
}

/** Where a buffer at the peak is in a chart: its values of that name and shape. */
function alike({ timeline, peak }, row) {
  return timeline.stays.filter(({ value, first, last }) => {
    const one = timeline.values[value];
    return first <= peak && peak < last && one.name === row.name && (one.shape === row.old_shape || one.shape === row.new_shape);
  });
}

document.documentElement.classList.add("drawn");
drawTiles();
const charts = drawMemory();
if (difference.buffers.length) drawBuffers(charts);
else byId("buffers").append(make("p", { className: "note", textContent: "At the peak, both hold the same." }));
drawTheme(charts);
