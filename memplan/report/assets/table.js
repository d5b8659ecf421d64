// Tables that sort, search and show a piece at a time.

const PIECE = 40;

class Table {
  /**
   * `columns`: {title, text(row), key(row) to sort by, right, wide: not on a phone, cell(row) instead of text}.
   * `onRow(row or null)` hears which row the pointer or the focus is on.
   */
  constructor(parent, caption, columns, onRow = () => {}) {
    this.columns = columns;
    this.onRow = onRow;
    this.rows = [];
    this.order = { column: null, down: true };
    this.limit = PIECE;
    this.body = make("tbody");
    this.heads = columns.map((column, index) => this.head(column, index));
    this.more = make("button", { className: "more", type: "button", onclick: () => this.show(this.limit + 10 * PIECE) });
    const table = make("table", {}, make("caption", { className: "unseen", textContent: caption }),
      make("thead", {}, make("tr", {}, ...this.heads)), this.body);
    parent.append(make("div", { className: "wide" }, table), this.more);
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
    this.heads.forEach((head, at) => head.setAttribute("aria-sort", at !== index ? "none" : down ? "descending" : "ascending"));
    this.fill(this.rows);
  }

  fill(rows) {
    this.rows = rows;
    this.sorted = [...rows];
    if (this.order.column !== null) {
      const { key } = this.columns[this.order.column];
      const sign = this.order.down ? -1 : 1;
      this.sorted.sort((a, b) => {
        const [left, right] = [key(a), key(b)];
        return sign * (typeof left === "string" ? left.localeCompare(right) : left - right);
      });
    }
    this.show(PIECE);
  }

  show(limit) {
    this.limit = limit;
    this.body.replaceChildren(...this.sorted.slice(0, limit).map((row) => this.row(row)));
    const left = this.sorted.length - limit;
    this.more.hidden = left <= 0;
    this.more.textContent = `Show more (${left} left)`;
  }

  row(row) {
    const cells = this.columns.map((column) => {
      const cell = make("td", { className: this.classOf(column) });
      cell.append(column.cell ? column.cell(row) : column.text(row));
      return cell;
    });
    return make("tr", { onmouseenter: () => this.onRow(row), onmouseleave: () => this.onRow(null) }, ...cells);
  }
}

/** A small coloured word for a decision. */
function pill(decision) {
  const names = { keep: "kept", offload: "offloaded", recompute: "recomputed", "": "short-lived" };
  return make("span", { className: `pill ${decision || "passing"}`, textContent: names[decision] || decision });
}

/** Columns that live values and decisions share. */
const COLUMNS = {
  value: { title: "value", text: (row) => row.name, key: (row) => row.name },
  bytes: { title: "bytes", text: (row) => bytes(row.nbytes), key: (row) => row.nbytes, right: true },
  decision: { title: "decision", cell: (row) => pill(row.decision), key: (row) => row.decision },
  shape: { title: "shape", text: (row) => row.shape, key: (row) => row.shape, wide: true },
  layer: { title: "layer", text: (row) => row.layer, key: (row) => row.layer, wide: true },
  source: {
    title: "source",
    cell: (row) => make("span", { title: row.source, textContent: shortSource(row.source) }),
    key: (row) => row.source,
  },
};
