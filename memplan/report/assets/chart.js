// Memory over the step and the streams below it, on two canvases: what stands still, and the pointer's marks above it.

const LANES = [
  ["compute", null],
  ["to host", "to host"],
  ["to device", "to device"],
];
const LINE_STYLES = [[6, 3], [2, 3]];
const GAP = 10;

class Chart {
  constructor(report, parent) {
    this.report = report;
    this.timeline = report.timeline;
    this.base = make("canvas", { className: "base", ariaHidden: "true" });
    this.over = make("canvas", { className: "over", tabIndex: 0, role: "slider", ariaLabel: "Moment of the step" });
    this.tip = make("div", { className: "tip", role: "status", hidden: true });
    this.frame = make("div", { className: "chart" }, this.base, this.over, this.tip);
    parent.append(this.frame);
    this.end = Math.max(this.timeline.instants.at(-1).end_s, ...this.timeline.copies.map((copy) => copy.end_s),
      ...report.lines.map((line) => line.end_s)) || 1e-9;
    this.view = [0, this.end];
    this.showsLines = true;
    this.picked = null; // a band's key
    this.marked = []; // stays of a value
    this.pin = peakOf(this.timeline);
    this.hover = null;
    new ResizeObserver(() => this.frame.clientWidth !== this.width && this.draw()).observe(this.frame);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  group(grouping, depth) {
    this.grouping = grouping;
    this.depth = depth;
    this.bands = bandsOf(this.timeline, grouping, depth);
    this.colors = new Map(this.bands.map((band) => [band.key, band.color]));
    this.picked = null;
    this.draw();
  }

  // ---- geometry ----

  layOut() {
    const width = this.frame.clientWidth;
    const narrow = width < 640;
    const hasHost = this.timeline.instants.some((instant) => instant.host_bytes);
    const lanes = [...LANES];
    if (this.timeline.copies.some((copy) => copy.direction === "to devices")) lanes.push(["to devices", "to devices"]);
    this.left = narrow ? 70 : 78;
    this.right = width - (narrow ? 6 : 14);
    let y = 10;
    this.panels = [];
    const add = (kind, height, more) => {
      this.panels.push({ kind, top: y, bottom: y + height, ...more });
      y += height + GAP;
    };
    add("memory", narrow ? 240 : 320, { place: "device", top_bytes: this.highest("device") });
    if (hasHost) add("memory", narrow ? 70 : 96, { place: "host", top_bytes: this.highest("host") });
    for (const [name, direction] of lanes) add("lane", 22, { name, direction });
    this.width = width;
    this.height = y + 18;
    this.axis = y - GAP + 4;
  }

  highest(place) {
    const curve = this.timeline.instants.map((instant) => (place === "device" ? instant.device_bytes : instant.host_bytes));
    let top = curve.reduce((most, count) => Math.max(most, count), 1);
    if (place === "device") {
      for (const line of this.report.lines) if (this.showsLines) top = line.device_bytes.reduce((a, b) => Math.max(a, b), top);
      if (this.report.budget_bytes <= 2 * top) top = Math.max(top, this.report.budget_bytes);
    }
    return 1.07 * top;
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

  draw() {
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
      else this.drawLane(panel);
    }
    this.drawTimes();
    this.drawMarks();
  }

  fit(canvas) {
    const dots = window.devicePixelRatio || 1;
    canvas.width = Math.round(this.width * dots);
    canvas.height = Math.round(this.height * dots);
    canvas.style.height = `${this.height}px`;
    this.frame.style.height = `${this.height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(dots, dots);
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

  visible() {
    const last = this.timeline.instants.length - 1;
    return [instantAt(this.timeline, this.view[0]), Math.min(last, instantAt(this.timeline, this.view[1]) + 1)];
  }

  drawMemory(panel) {
    const { pen, ink } = this;
    const step = binaryStep(panel.top_bytes, panel.place === "device" ? 6 : 2);
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
    if (panel.place === "host") pen.fillText("host", this.left + 6, panel.top + 6);
    if (panel.place === "device") this.drawLimits(panel);
  }

  drawStack(panel) {
    const { pen, ink } = this;
    const [first, last] = this.visible();
    const { instants } = this.timeline;
    const below = new Float64Array(instants.length);
    for (const band of this.bands) {
      const counts = band[panel.place];
      pen.beginPath();
      for (let i = first; i <= last; i += 1) {
        const y = this.y(panel, below[i] + counts[i]);
        pen.lineTo(this.x(instants[i].start_s), y);
        pen.lineTo(this.x(instants[i].end_s), y);
      }
      for (let i = last; i >= first; i -= 1) {
        const y = this.y(panel, below[i]);
        pen.lineTo(this.x(instants[i].end_s), y);
        pen.lineTo(this.x(instants[i].start_s), y);
        below[i] += counts[i];
      }
      pen.closePath();
      pen.globalAlpha = this.picked && this.picked !== band.key ? 0.13 : 0.92;
      pen.fillStyle = band.color;
      pen.fill();
      pen.globalAlpha = 1;
      if (last - first > this.width) continue; // edges would cover what they part
      pen.lineWidth = 0.6;
      pen.strokeStyle = ink.panel;
      pen.stroke();
    }
    pen.lineWidth = 1.2;
    pen.strokeStyle = ink.ink;
    this.outline(panel, instants.slice(first, last + 1).flatMap((one, i) => [[one.start_s, below[first + i]], [one.end_s, below[first + i]]]));
    if (panel.place !== "device" || !this.showsLines) return;
    this.report.lines.forEach((line, index) => {
      pen.setLineDash(LINE_STYLES[index % 2]);
      pen.lineWidth = 1.6;
      pen.strokeStyle = index ? ink.ink : ink.soft;
      const points = line.starts_s.flatMap((start, i) => [
        [start, line.device_bytes[i]],
        [i + 1 < line.starts_s.length ? line.starts_s[i + 1] : line.end_s, line.device_bytes[i]],
      ]);
      this.outline(panel, points);
      pen.setLineDash([]);
    });
  }

  outline(panel, points) {
    this.pen.beginPath();
    for (const [time, count] of points) this.pen.lineTo(this.x(time), this.y(panel, count));
    this.pen.stroke();
  }

  drawLimits(panel) {
    const { budget_bytes: budget, floor_bytes: floor } = this.report;
    if (budget <= panel.top_bytes) this.limit(panel, budget, `budget ${bytes(budget)}`, this.ink.budget, [], 1.6);
    if (floor) this.limit(panel, floor, `floor ${bytes(floor)}`, this.ink.ink, [2, 3], 1);
    const peak = this.timeline.instants[peakOf(this.timeline)];
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

  limit(panel, count, label, color, dash, width) {
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
    pen.fillRect(this.right - wide, y - 17, wide, 15);
    pen.globalAlpha = 1;
    pen.fillStyle = color;
    pen.textAlign = "right";
    pen.fillText(label, this.right - 4, y - 9);
    pen.restore();
  }

  drawLane(panel) {
    const { pen, ink } = this;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillStyle = ink.soft;
    pen.fillText(panel.name, this.left - 8, (panel.top + panel.bottom) / 2);
    pen.fillStyle = ink.line;
    pen.globalAlpha = 0.45;
    pen.fillRect(this.left, panel.top, this.right - this.left, panel.bottom - panel.top);
    pen.globalAlpha = 1;
    this.within(panel, () => (panel.direction ? this.drawCopies(panel) : this.drawKernels(panel)));
  }

  drawKernels(panel) {
    const [first, last] = this.visible();
    for (let i = first; i <= last; i += 1) {
      const one = this.timeline.instants[i];
      const x = this.x(one.start_s);
      const wide = this.x(one.end_s) - x;
      if (wide <= 0) continue;
      if (one.doing === "wait") {
        this.hatch(x, panel.top, wide, panel.bottom - panel.top);
        continue;
      }
      this.pen.fillStyle = this.colorOf(one);
      this.pen.fillRect(x, panel.top, Math.max(wide - (wide > 3 ? 0.7 : 0), 0.4), panel.bottom - panel.top);
      if (one.doing === "recompute") {
        this.pen.fillStyle = this.ink.again;
        this.pen.fillRect(x, panel.bottom - 6, wide, 6);
      }
    }
  }

  colorOf(instant) {
    if (this.grouping === "decision") return instant.doing === "recompute" ? PALETTE[2] : GREYS.output;
    return this.colors.get(`/${layerOf(instant, this.depth)}`) || GREYS.rest;
  }

  hatch(x, y, wide, high) {
    const { pen } = this;
    pen.save();
    pen.beginPath();
    pen.rect(x, y, wide, high);
    pen.clip();
    pen.strokeStyle = this.ink.wait;
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

  drawCopies(panel) {
    const { pen } = this;
    const copies = this.timeline.copies.filter((copy) => copy.direction === panel.direction);
    for (const copy of copies) {
      const x = this.x(copy.start_s);
      const wide = Math.max(this.x(copy.end_s) - x, 0.6);
      pen.fillStyle = panel.direction === "to host" ? PALETTE[1] : PALETTE[4];
      pen.fillRect(x, panel.top + 3, wide > 3 ? wide - 0.8 : wide, panel.bottom - panel.top - 6);
    }
    if (copies.length) return;
    pen.textAlign = "left";
    pen.fillStyle = this.ink.soft;
    pen.fillText("none", this.left + 6, (panel.top + panel.bottom) / 2);
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
      pen.fillText(timeTick(tick, step), x, this.axis + 3);
    }
  }

  // ---- marks above it ----

  drawMarks() {
    const pen = this.fit(this.over);
    const high = this.axis - 4;
    pen.fillStyle = this.ink.ink;
    pen.globalAlpha = 0.16;
    for (const stay of this.marked) {
      const x = Math.max(this.left, this.x(this.timeline.instants[stay.first].start_s));
      const end = Math.min(this.right, this.x(this.timeline.instants[stay.last - 1].end_s));
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
