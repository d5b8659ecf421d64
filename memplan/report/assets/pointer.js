// The chart under a pointer or keys: look, pin a moment, zoom, move.

class Explorer extends Chart {
  /** `onPin(instant)` is called whenever another moment is looked at, `onView(view)` whenever another span of time is. */
  constructor(report, parent, label, onPin, onView = () => {}) {
    super(report, parent, label);
    this.onPin = onPin;
    this.onView = onView;
    this.listen();
  }

  listen() {
    const at = (event) => event.clientX - this.over.getBoundingClientRect().left;
    this.over.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse") this.from = this.time(at(event));
    });
    this.over.addEventListener("pointermove", (event) => {
      this.hover = this.time(at(event));
      if (this.from !== undefined && Math.abs(this.x(this.from) - at(event)) > 4) this.drag = [this.from, this.hover];
      this.drawMarks();
      this.tell(event);
    });
    this.over.addEventListener("pointerup", (event) => {
      if (this.drag) this.zoomTo(Math.min(...this.drag), Math.max(...this.drag));
      else this.pinAt(this.instantAt(this.time(at(event))));
      this.drag = this.from = undefined;
      this.drawMarks();
    });
    this.over.addEventListener("pointerleave", () => {
      this.hover = null;
      this.drag = this.from = undefined;
      this.tip.hidden = true;
      this.drawMarks();
    });
    this.over.addEventListener("dblclick", () => this.zoomTo(0, this.end));
    this.over.addEventListener("wheel", (event) => this.roll(event, this.time(at(event))), { passive: false });
    this.over.addEventListener("keydown", (event) => this.press(event));
  }

  /** Pinching (or Ctrl and the wheel) zooms around the pointer, rolling sideways (or Shift) moves; else the page scrolls. */
  roll(event, time) {
    const [from, until] = this.view;
    if (event.ctrlKey) {
      const factor = 2 ** (event.deltaY / 200);
      this.zoomTo(time - factor * (time - from), time + factor * (until - time));
    } else if (event.deltaX || event.shiftKey) {
      this.move((event.deltaX || event.deltaY) / this.pixels);
    } else return;
    event.preventDefault();
  }

  press(event) {
    const last = this.timeline.instants.length - 1;
    const stride = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
    const moves = {
      ArrowLeft: () => this.pinAt(this.pin - stride),
      ArrowRight: () => this.pinAt(this.pin + stride),
      Home: () => this.pinAt(0),
      End: () => this.pinAt(last),
      PageUp: () => this.move(-0.8),
      PageDown: () => this.move(0.8),
      p: () => this.pinAt(this.peak),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.zoomTo(0, this.end),
    };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move();
  }

  pinAt(index) {
    this.pin = Math.min(this.timeline.instants.length - 1, Math.max(0, index));
    const { start_s: start, end_s: end } = this.timeline.instants[this.pin];
    const wide = this.view[1] - this.view[0];
    if (end < this.view[0] || start > this.view[1]) this.zoomTo(start - wide / 2, start + wide / 2);
    this.drawMarks();
    this.onPin(this.pin);
  }

  zoom(factor) {
    const pinned = this.timeline.instants[this.pin];
    const middle = (pinned.start_s + pinned.end_s) / 2;
    const half = (factor * (this.view[1] - this.view[0])) / 2;
    this.zoomTo(middle - half, middle + half);
  }

  /** By a share of what is seen. */
  move(share) {
    const wide = this.view[1] - this.view[0];
    this.zoomTo(this.view[0] + share * wide, this.view[1] + share * wide);
  }

  zoomTo(from, to) {
    const wide = Math.min(this.end, Math.max(to - from, this.end * 1e-5));
    const start = Math.min(Math.max(0, from), this.end - wide);
    this.show([start, start + wide]);
    this.onView(this.view);
  }

  show(view) {
    this.view = view;
    this.redraw();
  }

  /** Shade the time that values are in memory. */
  mark(stays) {
    const { instants } = this.timeline;
    this.shade(stays.map(({ first, last }) => ({ start_s: instants[first].start_s, end_s: instants[last - 1].end_s })));
  }

  shade(spans) {
    this.shaded = spans;
    this.drawMarks();
  }

  // ---- the tip ----

  tell(event) {
    const box = this.over.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const time = this.time(x);
    const panel = this.panels.find((one) => y >= one.top - GAP / 2 && y <= one.bottom + GAP / 2) || this.panels[0];
    this.tip.replaceChildren(...this.told(time, panel, y));
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth;
    const high = this.tip.offsetHeight;
    this.tip.style.left = `${Math.max(4, x + 16 + wide > this.width ? x - wide - 16 : x + 16)}px`;
    this.tip.style.top = `${Math.max(0, Math.min(y + 14, this.height - high))}px`;
  }

  told(time, panel, y) {
    const rows = [make("b", { textContent: seconds(time) })];
    const row = (text) => rows.push(make("div", { textContent: text }));
    if (panel.lane && panel.lane.spans) {
      toldOfLane(panel.lane, time).forEach(row);
      return rows;
    }
    const index = panel.lane ? this.instantAt(time) : this.drawnAt(panel, time);
    const one = this.timeline.instants[index];
    if (time > this.timeline.instants.at(-1).end_s) row("the step is over");
    else if (one.doing === "wait") row(`waits for a copy, ${spanOf(one)}`);
    else row(`${one.name}${one.doing === "recompute" ? ", again" : ""}, ${spanOf(one)}`);
    const trips = this.tripsOf(one);
    if (trips) row(trips);
    if (one.layer) row(one.layer);
    if (one.source) row(one.source);
    row(`device ${bytes(one.device_bytes)}${one.host_bytes ? `, host ${bytes(one.host_bytes)}` : ""}`);
    const band = panel.kind === "memory" ? this.bandAt(panel, index, y) : null;
    if (band) {
      const swatch = make("i", { className: "swatch" });
      swatch.style.background = band.color;
      rows.push(make("div", {}, swatch, `${band.name}: ${bytes(band[panel.place][index])}`));
    }
    for (const line of this.showsLines && panel.place === "device" ? this.lines : []) {
      if (time <= line.end_s) row(`${line.name}: ${bytes(line.device_bytes[line.steps.at(time)])}`);
    }
    return rows;
  }

  /** The instant that the picture shows at a time: the highest of a pixel. */
  drawnAt(panel, time) {
    const half = (this.view[1] - this.view[0]) / this.pixels / 2;
    const steps = this.steps[panel.place];
    const [first, last] = [steps.at(this.view[0]), steps.at(this.view[1])];
    if (last - first < this.pixels) return steps.at(time);
    return steps.highest.among(steps.at(time - half), steps.at(time + half));
  }

  bandAt(panel, index, y) {
    const count = ((panel.bottom - y) / (panel.bottom - panel.top)) * panel.top_bytes;
    let below = 0;
    for (const band of this.bands) {
      below += band[panel.place][index];
      if (count >= 0 && count < below) return band;
    }
    return null;
  }
}
