// Tables of any length: the page has only those rows that are seen.

const ROW = 28; // pixels, as in the style
const SPARE = 6; // rows above and below those that are seen
const PRINTED = 100;

class Table {
  /**
   * `columns`: {title, width, key(row) to sort by, text(row) or cell(row), tip(row), right, wide: not on a phone}.
   * `onRow(row or null)` hears which row the pointer is on, or else the one that was chosen by keys or a click.
   */
  constructor(parent, caption, columns, onRow = () => {}) {
    this.columns = columns;
    this.onRow = onRow;
    this.order = { column: columns.findIndex((column) => column.first), down: true };
    this.given = this.rows = [];
    this.chosen = -1; // of the rows
    this.body = make("tbody");
    this.heads = columns.map((column, index) => this.head(column, index));
    const widths = columns.map((column) => {
      const col = make("col", { className: column.wide ? "roomy" : "" });
      if (column.width) col.style.width = column.width;
      return col;
    });
    this.table = make("table", {}, make("caption", { className: "unseen", textContent: caption }), make("colgroup", {}, ...widths),
      make("thead", {}, make("tr", { "aria-rowindex": 1 }, ...this.heads)), this.body);
    this.box = make("div", { className: "rows", tabIndex: 0, role: "region", ariaLabel: `${caption}; arrow keys choose a row` }, this.table);
    parent.append(this.box);
    this.listen();
  }

  listen() {
    this.box.addEventListener("scroll", () => this.show(), { passive: true });
    this.box.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.show()).observe(this.box);
    addEventListener("beforeprint", () => this.draw(0, Math.min(PRINTED, this.rows.length)));
    addEventListener("afterprint", () => this.show(true));
  }

  head(column, index) {
    const button = make("button", { type: "button", textContent: column.title, onclick: () => this.sort(index) });
    return make("th", { className: this.classOf(column), scope: "col" }, button);
  }

  classOf(column) {
    return [column.right ? "right" : "", column.wide ? "roomy" : ""].join(" ").trim();
  }

  sort(index) {
    const down = this.order.column === index ? !this.order.down : Boolean(this.columns[index].right);
    this.order = { column: index, down };
    this.fill(this.given);
  }

  /** Show these rows, from the first. */
  fill(rows) {
    const { column, down } = this.order;
    this.given = rows;
    this.rows = rows;
    if (column >= 0) {
      const { key } = this.columns[column];
      const sign = down ? -1 : 1;
      const keys = rows.map(key);
      const compare = (a, b) => (a < b ? -sign : a > b ? sign : 0);
      this.rows = [...keys.keys()].sort((a, b) => compare(keys[a], keys[b])).map((index) => rows[index]);
    }
    this.heads.forEach((head, at) => head.setAttribute("aria-sort", at !== column ? "none" : down ? "descending" : "ascending"));
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.chosen = -1;
    this.box.scrollTop = 0;
    this.show(true);
  }

  show(anew = false) {
    const seen = Math.ceil(this.box.clientHeight / ROW);
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - SPARE);
    const last = Math.min(this.rows.length, first + seen + 2 * SPARE);
    if (anew || first !== this.first || last !== this.last) this.draw(first, last);
  }

  draw(first, last) {
    [this.first, this.last] = [first, last];
    const gap = (rows) => {
      const row = make("tr", { className: "gap", ariaHidden: "true" });
      row.style.height = `${rows * ROW}px`;
      return row;
    };
    const drawn = this.rows.slice(first, last).map((row, index) => this.row(row, first + index));
    this.body.replaceChildren(...(first ? [gap(first)] : []), ...drawn, ...(last < this.rows.length ? [gap(this.rows.length - last)] : []));
  }

  row(row, index) {
    const cells = this.columns.map((column) => {
      const cell = make("td", { className: this.classOf(column) }, column.cell ? column.cell(row) : column.text(row));
      cell.title = column.tip ? column.tip(row) : cell.textContent;
      return cell;
    });
    return make("tr", { "aria-rowindex": index + 2, ariaSelected: String(index === this.chosen), onclick: () => this.choose(index),
      onmouseenter: () => this.onRow(row), onmouseleave: () => this.onRow(this.rows[this.chosen] || null) }, ...cells);
  }

  press(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 2);
    const moves = { ArrowDown: this.chosen + 1, ArrowUp: this.chosen - 1, PageDown: this.chosen + page, PageUp: this.chosen - page,
      Home: 0, End: this.rows.length - 1 };
    if (event.target !== this.box || !(event.key in moves) || !this.rows.length) return;
    event.preventDefault();
    this.choose(Math.min(this.rows.length - 1, Math.max(0, moves[event.key])));
  }

  choose(index) {
    this.chosen = index;
    const head = this.heads[0].offsetHeight;
    const [top, high] = [index * ROW, this.box.clientHeight - head];
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + ROW > this.box.scrollTop + high) this.box.scrollTop = top + ROW - high;
    this.show(true);
    this.onRow(this.rows[index]);
  }
}

/** A small coloured word for a decision or a change. */
function pill(word) {
  const names = { keep: "kept", offload: "offloaded", recompute: "recomputed", "": "short-lived" };
  return make("span", { className: `pill ${word || "passing"}` }, names[word] || word);
}

/** Columns that several tables have. */
const COLUMNS = {
  value: { title: "value", text: (row) => row.name, key: (row) => row.name },
  bytes: { title: "bytes", text: (row) => bytes(row.nbytes), key: (row) => row.nbytes, right: true, first: true, width: "6.2rem" },
  decision: { title: "decision", cell: (row) => pill(row.decision), key: (row) => row.decision, width: "7.9rem" },
  shape: { title: "shape", text: (row) => row.shape, key: (row) => row.shape, wide: true, width: "11.8rem" },
  layer: { title: "layer", text: (row) => row.layer, key: (row) => row.layer, wide: true },
  source: { title: "source", text: (row) => shortSource(row.source), tip: (row) => row.source, key: (row) => row.source, width: "12.4rem" },
};

/** The columns that are not empty in all rows. */
const filled = (columns, rows) => columns.filter((column) => !column.text || rows.some(column.text));

/** Buttons of which one is pressed; `choices`: [key, label]. */
function choiceOf(label, choices, onChoice) {
  const group = make("div", { className: "choice", role: "group", ariaLabel: label });
  for (const [key, text] of choices) {
    const button = make("button", { type: "button", ariaPressed: String(key === choices[0][0]), textContent: text });
    button.onclick = () => {
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      onChoice(key);
    };
    button.dataset.key = key;
    group.append(button);
  }
  return group;
}

/** A table, without columns that are empty, whose rows can be searched, and chosen by their kind; `sum(rows)` is told. */
function searched(section, caption, columns, rows, { kinds, kindOf, textOf, sum, onRow }) {
  const search = make("input", { type: "search", placeholder: "search values, layers, lines", ariaLabel: `Search ${caption.toLowerCase()}` });
  const told = make("span", { className: "told", role: "status" });
  let chosen = "all";
  const counts = new Map();
  for (const row of rows) counts.set(kindOf(row), (counts.get(kindOf(row)) || 0) + 1);
  const there = kinds.filter((key) => counts.has(key)).map((key) => [key, `${key} ${counts.get(key)}`]);
  const choice = choiceOf(caption, [["all", `all ${rows.length}`], ...there], (key) => {
    chosen = key;
    refill();
  });
  section.append(make("div", { className: "controls" }, choice, search, told));
  const table = new Table(section, caption, filled(columns, rows), onRow);
  let texts = null; // of all rows, made at the first search
  const refill = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) texts ??= new Map(rows.map((row) => [row, textOf(row).toLowerCase()]));
    const found = rows.filter((row) => (chosen === "all" || kindOf(row) === chosen) && words.every((word) => texts.get(row).includes(word)));
    told.textContent = `${found.length} of ${rows.length}, ${sum(found)}`;
    table.fill(found);
  };
  search.oninput = refill;
  refill();
  return table;
}
