// Memory over a step and its streams below, on two canvases: what stands still, and the pointer's marks above it.

const LINE_STYLES = [[6, 3], [2, 3]];
const GAP = 10;
const LEAST_HIGH = 40; // pixels of the host's memory: room for its name
const MOST_ABOVE = 8; // a line that goes higher, in multiples of the step itself, is not shown at first: it would be flat

class Chart {
  /** `report`: with a timeline, lines of other programs, budget_bytes and floor_bytes (or null). `label`: of the picture. */
  constructor(report, parent, label) {
    this.report = report;
    this.timeline = report.timeline;
    this.base = make("canvas", { className: "base", ariaHidden: "true" });
    this.over = make("canvas", { className: "over", tabIndex: 0, role: "slider", ariaLabel: label });
    this.tip = make("div", { className: "tip", role: "status", hidden: true });
    this.frame = make("div", { className: "chart" }, this.base, this.over, this.tip);
    parent.append(this.frame);
    const { instants, copies } = this.timeline;
    const ends = [instants.at(-1), ...report.lines].map((one) => one.end_s);
    this.end = copies.reduce((most, copy) => Math.max(most, copy.end_s), Math.max(...ends)) || 1e-9;
    const starts = instants.map((one) => one.start_s);
    const steps = (figure) => new Steps(starts, instants.at(-1).end_s, instants.map(figure));
    this.steps = { device: steps((one) => one.device_bytes), host: steps((one) => one.host_bytes) };
    this.lines = report.lines.map((line) => ({ ...line, steps: new Steps(line.starts_s, line.end_s, line.device_bytes) }));
    this.peak = this.steps.device.highest.among(0, instants.length - 1);
    this.streams = new Streams(this.timeline);
    this.view = [0, this.end];
    this.least_top_bytes = 0; // of the panel of device memory, to compare two charts
    this.showsLines = this.lines.every((line) => line.steps.top <= MOST_ABOVE * this.steps.device.top);
    this.picked = null; // a band's key
    this.shaded = []; // spans of time, such as those of a value in memory
    this.pin = this.peak;
    this.hover = null;
    new ResizeObserver(() => this.frame.clientWidth !== this.width && this.draw()).observe(this.frame);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  group(grouping, depth, layers) {
    this.grouping = grouping;
    this.depth = depth;
    this.bands = bandsOf(this.timeline, grouping, depth, layers);
    this.colors = new Map(this.bands.map((band) => [band.key, band.color]));
    this.picked = null;
    this.draw();
  }

  instantAt(time) {
    return this.steps.device.at(time);
  }

  // ---- geometry ----

  layOut() {
    const width = this.frame.clientWidth;
    const narrow = width < 640;
    this.left = narrow ? 70 : 84;
    this.right = width - (narrow ? 6 : 14);
    let y = 10;
    this.panels = [];
    const add = (kind, height, more) => {
      this.panels.push({ kind, top: y, bottom: y + height, ...more });
      y += height + GAP;
    };
    const high = narrow ? 240 : 320;
    add("memory", high, { place: "device", top_bytes: this.highest("device") });
    if (this.steps.host.top) {
      const top = this.highest("host") / this.hostShrink;
      const tall = Math.max(LEAST_HIGH, (high * top) / this.highest("device"));
      add("memory", tall, { place: "host", top_bytes: (tall / high) * this.highest("device") * this.hostShrink });
    }
    for (const lane of this.streams.lanes) add("lane", 22, { lane });
    this.width = width;
    this.height = y + 18;
    this.axis = y - GAP + 4;
  }

  /** Bytes at the top of a panel. */
  highest(place) {
    let top = Math.max(1, this.steps[place].top);
    if (place === "device") {
      if (this.showsLines) for (const { steps } of this.lines) top = Math.max(top, steps.top);
      if (this.report.budget_bytes <= 2 * top) top = Math.max(top, this.report.budget_bytes);
      top = Math.max(top, this.least_top_bytes);
    }
    return 1.07 * top;
  }

  /** So many of the host's bytes are as high as one of the device's: 1, unless the host has more than the device's panel. */
  get hostShrink() {
    return Math.max(1, Math.ceil(this.highest("host") / this.highest("device")));
  }

  get hostName() {
    const shrink = this.hostShrink === 1 ? "" : `, drawn 1/${this.hostShrink} as high as the device's`;
    return `host, at most ${bytes(this.steps.host.top)}${shrink}`;
  }

  get hostNote() {
    if (!this.steps.host.top) return "";
    return this.hostShrink === 1 ? "The host's memory has the device's scale."
      : `The host's memory is drawn 1/${this.hostShrink} as high as the device's.`;
  }

  /** `in 2,000 trips, 45 µs each`, for an instant inside of a loop; else ''. */
  tripsOf(instant) {
    const loop = this.streams.loops.at((instant.start_s + instant.end_s) / 2);
    if (!loop || !isLoop(loop)) return "";
    return `in ${counted(loop.count, "trip")}, ${seconds(secondsOf(instant) / loop.count)} each`;
  }

  get pixels() {
    return Math.max(1, Math.round(this.right - this.left));
  }

  x(time) {
    return this.left + ((time - this.view[0]) / (this.view[1] - this.view[0])) * (this.right - this.left);
  }

  time(x) {
    const share = Math.min(1, Math.max(0, (x - this.left) / (this.right - this.left)));
    return this.view[0] + share * (this.view[1] - this.view[0]);
  }

  y(panel, count) {
    return panel.bottom - (count / panel.top_bytes) * (panel.bottom - panel.top);
  }

  // ---- what stands still ----

  /** Draw before the next frame, once, however often it is asked for until then. */
  redraw() {
    this.asked ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    if (this.asked) cancelAnimationFrame(this.asked);
    this.asked = undefined;
    if (!this.bands || !this.frame.clientWidth) return;
    this.layOut();
    const style = getComputedStyle(document.documentElement);
    this.ink = Object.fromEntries(
      ["ink", "soft", "line", "panel", "wait", "again", "budget"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
    );
    this.pen = this.fit(this.base);
    this.pen.font = "12px system-ui, sans-serif";
    for (const panel of this.panels) {
      if (panel.kind === "memory") this.drawMemory(panel);
      else this.streams.draw(this, panel);
    }
    this.drawTimes();
    this.drawMarks();
  }

  /** The pen of an empty canvas of the chart's size. */
  fit(canvas) {
    const dots = window.devicePixelRatio || 1;
    const [wide, high] = [Math.round(this.width * dots), Math.round(this.height * dots)];
    const pen = canvas.getContext("2d");
    if (canvas.width !== wide || canvas.height !== high) {
      Object.assign(canvas, { width: wide, height: high });
      canvas.style.height = this.frame.style.height = `${this.height}px`;
    }
    pen.setTransform(dots, 0, 0, dots, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    return pen;
  }

  within(panel, draw) {
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(this.left, panel.top - 6, this.right - this.left, panel.bottom - panel.top + 7);
    this.pen.clip();
    draw();
    this.pen.restore();
  }

  drawMemory(panel) {
    const { pen, ink } = this;
    const device = this.highest("device");
    const step = binaryStep(panel.place === "device" ? device : device * this.hostShrink, 6);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const tick of ticks(0, panel.top_bytes, step)) {
      const y = Math.round(this.y(panel, tick)) + 0.5;
      pen.strokeStyle = ink.line;
      pen.beginPath();
      pen.moveTo(this.left, y);
      pen.lineTo(this.right, y);
      pen.stroke();
      pen.fillStyle = ink.soft;
      pen.fillText(byteTick(tick), this.left - 8, y);
    }
    this.within(panel, () => this.drawStack(panel));
    pen.textAlign = "left";
    pen.fillStyle = ink.ink;
    if (panel.place === "host") pen.fillText(this.hostName, this.left + 6, panel.top + 6);
    if (panel.place === "device") {
      this.streams.drawLoops(this, panel);
      this.drawLimits(panel);
    }
  }

  drawStack(panel) {
    const { pen, ink } = this;
    const columns = this.steps[panel.place].columns(...this.view, this.pixels);
    const below = new Float64Array(columns.length);
    for (const band of this.bands) {
      const counts = band[panel.place];
      pen.beginPath();
      columns.forEach(({ from, until, row }, i) => {
        const y = this.y(panel, below[i] + counts[row]);
        pen.lineTo(this.x(from), y);
        pen.lineTo(this.x(until), y);
      });
      for (let i = columns.length - 1; i >= 0; i -= 1) {
        const y = this.y(panel, below[i]);
        pen.lineTo(this.x(columns[i].until), y);
        pen.lineTo(this.x(columns[i].from), y);
        below[i] += counts[columns[i].row];
      }
      pen.closePath();
      pen.globalAlpha = this.picked && this.picked !== band.key ? 0.13 : 0.92;
      pen.fillStyle = band.color;
      pen.fill();
      pen.globalAlpha = 1;
      if (columns.length > this.pixels / 2) continue; // edges would cover what they part
      pen.lineWidth = 0.6;
      pen.strokeStyle = ink.panel;
      pen.stroke();
    }
    pen.lineWidth = 1.2;
    pen.strokeStyle = ink.ink;
    this.outline(panel, columns, (_, i) => below[i]);
    if (panel.place !== "device" || !this.showsLines) return;
    this.lines.forEach((line, index) => {
      const columns = line.steps.columns(...this.view, this.pixels);
      const figure = ({ row }) => line.device_bytes[row];
      pen.lineWidth = 4; // so that the dashes stand out on all bands
      pen.globalAlpha = 0.55;
      pen.strokeStyle = ink.panel;
      this.outline(panel, columns, figure);
      pen.globalAlpha = 1;
      pen.setLineDash(LINE_STYLES[index % 2]);
      pen.lineWidth = 1.6;
      pen.strokeStyle = ink.ink;
      this.outline(panel, columns, figure);
      pen.setLineDash([]);
    });
  }

  outline(panel, columns, figure) {
    this.pen.beginPath();
    columns.forEach((column, i) => {
      const y = this.y(panel, figure(column, i));
      this.pen.lineTo(this.x(column.from), y);
      this.pen.lineTo(this.x(column.until), y);
    });
    this.pen.stroke();
  }

  drawLimits(panel) {
    const { budget_bytes: budget, floor_bytes: floor } = this.report;
    if (budget <= panel.top_bytes) this.limit(panel, budget, `budget ${bytes(budget)}`, this.ink.budget, [], 1.6);
    const isNear = Math.abs(this.y(panel, budget) - this.y(panel, floor)) < 18; // their names stand side by side
    if (floor) this.limit(panel, floor, `floor ${bytes(floor)}`, this.ink.ink, [2, 3], 1, isNear ? 150 : 0);
    const peak = this.timeline.instants[this.peak];
    const x = this.x((peak.start_s + peak.end_s) / 2);
    if (x < this.left || x > this.right) return;
    const y = this.y(panel, peak.device_bytes);
    this.pen.fillStyle = this.ink.ink;
    this.pen.beginPath();
    this.pen.moveTo(x, y - 1);
    this.pen.lineTo(x - 5, y - 9);
    this.pen.lineTo(x + 5, y - 9);
    this.pen.fill();
  }

  limit(panel, count, label, color, dash, width, aside = 0) {
    const { pen } = this;
    const y = Math.round(this.y(panel, count)) + 0.5;
    pen.save();
    pen.strokeStyle = color;
    pen.lineWidth = width;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(this.left, y);
    pen.lineTo(this.right, y);
    pen.stroke();
    const wide = pen.measureText(label).width + 8;
    pen.fillStyle = this.ink.panel;
    pen.globalAlpha = 0.85;
    pen.fillRect(this.right - wide - aside, y - 17, wide, 15);
    pen.globalAlpha = 1;
    pen.fillStyle = color;
    pen.textAlign = "right";
    pen.fillText(label, this.right - 4 - aside, y - 9);
    pen.restore();
  }

  drawTimes() {
    const { pen } = this;
    const step = roundStep(this.view[1] - this.view[0], Math.max(3, (this.right - this.left) / 110));
    pen.textBaseline = "top";
    pen.fillStyle = this.ink.soft;
    for (const tick of ticks(this.view[0], this.view[1], step)) {
      const x = this.x(tick);
      pen.fillRect(x, this.axis - 4, 1, 4);
      pen.textAlign = x > this.right - 24 ? "right" : x < this.left + 12 ? "left" : "center";
      pen.fillText(timeTick(tick, this.view[1]), x, this.axis + 3);
    }
  }

  // ---- marks above it ----

  drawMarks() {
    if (!this.bands) return;
    const pen = this.fit(this.over);
    const high = this.axis - 4;
    pen.fillStyle = this.ink.ink;
    pen.globalAlpha = 0.16;
    for (const span of this.shaded) {
      const x = Math.max(this.left, this.x(span.start_s));
      const end = Math.min(this.right, this.x(span.end_s));
      if (end > x) pen.fillRect(x, 4, Math.max(end - x, 1), high - 4);
    }
    if (this.drag) {
      const [a, b] = this.drag.map((time) => this.x(time));
      pen.fillRect(Math.min(a, b), 4, Math.abs(b - a), high - 4);
    }
    pen.globalAlpha = 1;
    const cross = (time, width, dash) => {
      const x = this.x(time);
      if (x < this.left - 1 || x > this.right + 1) return;
      pen.strokeStyle = this.ink.ink;
      pen.lineWidth = width;
      pen.setLineDash(dash);
      pen.beginPath();
      pen.moveTo(x, 4);
      pen.lineTo(x, high);
      pen.stroke();
    };
    const pinned = this.timeline.instants[this.pin];
    cross((pinned.start_s + pinned.end_s) / 2, 1.6, []);
    if (this.hover !== null) cross(this.hover, 1, [3, 3]);
    this.over.setAttribute("aria-valuemin", 0);
    this.over.setAttribute("aria-valuemax", this.timeline.instants.length - 1);
    this.over.setAttribute("aria-valuenow", this.pin);
    this.over.setAttribute("aria-valuetext", `${seconds(pinned.start_s)}: ${bytes(pinned.device_bytes)} on the device`);
  }
}
