// What the device, its links and its loops do, as lanes below the memory.

const COLLECTIVES = ["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"];
const COPIES = { "to host": PALETTE[1], "to device": PALETTE[4] };

const colorOfCopy = (copy) => (copy.kind ? PALETTE[COLLECTIVES.indexOf(copy.kind) + 2] || GREYS.rest : COPIES[copy.direction]);

/** The lane of a copy: its direction, or the outermost link that a collective crosses. */
const laneOf = (copy) => (copy.over.length ? `over ${copy.over[0]}` : copy.direction);

class Streams {
  constructor(timeline) {
    this.timeline = timeline;
    const { instants, copies, blocks } = timeline;
    const starts = instants.map((one) => one.start_s);
    this.kernels = new Steps(starts, instants.at(-1).end_s, instants.map((one) => one.end_s - one.start_s));
    this.again = new Uint32Array(instants.length + 1); // instants before each that run a kernel again
    instants.forEach((one, i) => { this.again[i + 1] = this.again[i] + (one.doing === "recompute"); });
    this.loops = new Spans(blocks);
    this.lanes = [{ name: "compute" }];
    const names = new Set(["to host", "to device", ...copies.map(laneOf)]); // in this order
    for (const name of names) {
      const spans = new Spans(copies.filter((copy) => laneOf(copy) === name));
      if (spans.spans.length) this.lanes.push({ name, spans, color: colorOfCopy });
    }
    if (blocks.length) this.lanes.unshift({ name: "loops", spans: this.loops, color: (block) => BLOCKS[block.kind] });
  }

  draw(chart, panel) {
    const { pen, ink } = chart;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillStyle = ink.soft;
    pen.fillText(panel.lane.name, chart.left - 8, (panel.top + panel.bottom) / 2);
    pen.fillStyle = ink.line;
    pen.globalAlpha = 0.45;
    pen.fillRect(chart.left, panel.top, chart.right - chart.left, panel.bottom - panel.top);
    pen.globalAlpha = 1;
    chart.within(panel, () => (panel.lane.spans ? this.drawSpans(chart, panel) : this.drawKernels(chart, panel)));
  }

  /** The longest kernel of each pixel, and below it whether one of them runs again. */
  drawKernels(chart, panel) {
    const { pen, ink } = chart;
    const high = panel.bottom - panel.top;
    const columns = this.kernels.columns(...chart.view, chart.pixels);
    const waits = []; // neighbours joined
    for (const { from, until, row, first, last } of columns) {
      const one = this.timeline.instants[row];
      const x = chart.x(from);
      const wide = chart.x(until) - x;
      if (wide <= 0) continue;
      const before = waits.at(-1);
      if (one.doing === "wait" && before && x - before.until < 0.5) before.until = x + wide;
      else if (one.doing === "wait") waits.push({ from: x, until: x + wide });
      else {
        pen.fillStyle = this.colorOf(chart, one);
        pen.fillRect(x, panel.top, Math.max(wide - (wide > 3 ? 0.7 : 0), 0.4), high);
      }
      if (one.doing !== "recompute" && this.again[last + 1] === this.again[first + 1]) continue; // nor one that begins here
      pen.fillStyle = ink.again;
      pen.fillRect(x, panel.bottom - 6, wide, 6);
    }
    for (const { from, until } of waits) this.hatch(chart, from, panel.top, until - from, high);
  }

  colorOf(chart, instant) {
    if (chart.grouping === "decision") return instant.doing === "recompute" ? PALETTE[2] : GREYS.output;
    return chart.colors.get(`/${layerOf(instant, chart.depth)}`) || GREYS.rest;
  }

  hatch(chart, x, y, wide, high) {
    const { pen, ink } = chart;
    pen.save();
    pen.beginPath();
    pen.rect(x, y, wide, high);
    pen.clip();
    pen.strokeStyle = ink.wait;
    pen.lineWidth = 1.6;
    pen.beginPath();
    for (let at = x - high - ((x - high) % 6); at < x + wide; at += 6) {
      pen.moveTo(at, y + high);
      pen.lineTo(at + high, y);
    }
    pen.stroke();
    pen.strokeRect(x, y, wide, high);
    pen.restore();
  }

  /** Copies, collectives or loops; a name where there is room for it. */
  drawSpans(chart, panel) {
    const { pen, ink } = chart;
    const { spans, color } = panel.lane;
    const middle = (panel.top + panel.bottom) / 2;
    pen.textAlign = "left";
    for (const { from, until, one } of spans.columns(...chart.view, chart.pixels)) {
      const x = Math.max(chart.x(from), chart.left);
      const wide = Math.max(Math.min(chart.x(until), chart.right) - x, 0.6);
      pen.fillStyle = one ? color(one) : ink.soft;
      pen.fillRect(x, panel.top + 3, wide > 3 ? wide - 0.8 : wide, panel.bottom - panel.top - 6);
      if (one && isLoop(one)) this.drawTrips(chart, panel, one);
      const label = one && wide > 20 && labelsOf(one).find((text) => pen.measureText(text).width < wide - 7);
      if (!label) continue;
      if (isLoop(one)) { // no marks under the name
        pen.fillStyle = color(one);
        pen.fillRect(x, panel.top + 3, pen.measureText(label).width + 8, panel.bottom - panel.top - 6);
      }
      pen.fillStyle = "#10161d"; // on all colours of spans
      pen.fillText(label, x + 4, middle);
    }
  }

  /** A mark where each trip of a loop starts, or every 2nd, 5th, 10th, ... */
  drawTrips(chart, panel, loop) {
    const trip = secondsOf(loop) / loop.count;
    const view = chart.view[1] - chart.view[0];
    const stride = Math.max(1, roundStep(view / trip, chart.pixels / TRIP_WIDTH)) * trip;
    const first = Math.max(1, Math.ceil((chart.view[0] - loop.start_s) / stride));
    chart.pen.fillStyle = "#10161d";
    chart.pen.globalAlpha = 0.45;
    for (let time = loop.start_s + first * stride; time < Math.min(loop.end_s - stride / 2, chart.view[1]); time += stride) {
      chart.pen.fillRect(chart.x(time), panel.top + 3, 1, panel.bottom - panel.top - 6);
    }
    chart.pen.globalAlpha = 1;
  }

  /** The ends of loops, and how often they run, in a panel of memory. */
  drawLoops(chart, panel) {
    const { pen, ink } = chart;
    pen.textAlign = "left";
    for (const loop of this.loops.spans.filter(isLoop)) {
      const [from, until] = [Math.max(chart.left, chart.x(loop.start_s)), Math.min(chart.right, chart.x(loop.end_s))];
      const label = `${loop.count.toLocaleString("en")} ×`;
      if (until - from < pen.measureText(label).width + 8) continue;
      pen.fillStyle = ink.ink;
      pen.fillText(label, from + 4, panel.top + 2);
      pen.fillRect(from, panel.top - 4, 1, 12);
      pen.fillRect(from, panel.top - 4, until - from, 1);
      pen.fillRect(until - 1, panel.top - 4, 1, 12);
    }
  }
}

const BLOCKS = { slabs: "#cc79a7", loop: "#f0c987", branches: "#9bb8d3" };

const TRIP_WIDTH = 7; // pixels between marks of trips at least: closer ones would be a grey

/** Is it a loop whose trips are known? */
const isLoop = (span) => (span.kind === "loop" || span.kind === "slabs") && span.count > 0;

/** `slabs_3: 16 slabs of 2 ms, 32 ms`, `16 ×`; or what is copied. The longest that fits is shown. */
function labelsOf(one) {
  if (!("count" in one)) return [one.kind || one.name];
  const unit = { slabs: "slabs", loop: "trips", branches: "branches" }[one.kind];
  const isInstruction = /^(while|conditional)[.\d]*$/.test(one.name);
  const name = (isInstruction && one.source ? one.source : one.name).split("/").at(-1);
  if (one.count === null) return [`${name}, ${spanOf(one)}`, name];
  const count = one.count.toLocaleString("en");
  if (!isLoop(one)) return [`${name}: ${count} ${unit}, ${spanOf(one)}`, `${count} ${unit}`];
  const trips = `${count} ${unit} of ${seconds(secondsOf(one) / one.count)}, ${spanOf(one)}`;
  return [`${name}: ${trips}`, trips, `${count} ${unit}`, `${count} ×`];
}

/** What the pointer is on in a lane, as lines of text. */
function toldOfLane(lane, time) {
  const one = lane.spans.at(time);
  if (lane.name === "loops") {
    if (!one) return ["no loop"];
    const told = [labelsOf(one)[0], `${seconds(one.start_s)} to ${seconds(one.end_s)}`];
    return [...told, ...(one.source ? [one.source] : [])];
  }
  if (!one) return [`nothing goes ${lane.name}`];
  const what = one.kind ? `${one.kind} in ${one.name}` : one.name;
  const where = one.over.length ? `over ${one.over.join(", ")}` : one.direction;
  const told = [`${what}, ${bytes(one.nbytes)} ${where}`, `${seconds(one.start_s)} to ${seconds(one.end_s)}`];
  return [...told, ...(one.source ? [one.source] : [])];
}
