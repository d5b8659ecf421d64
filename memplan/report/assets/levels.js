// Step functions of time, drawn a pixel at a time where they have more steps than pixels.

/** The row with the highest figure among any neighbours, from a pyramid: level k has the highest of each 2^k rows. */
class Highest {
  constructor(figures) {
    this.figures = figures;
    this.levels = [new Uint32Array(figures.length)];
    for (let row = 0; row < figures.length; row += 1) this.levels[0][row] = row;
    for (let below = this.levels[0]; below.length > 1; below = this.levels.at(-1)) {
      const above = new Uint32Array(Math.ceil(below.length / 2));
      for (let i = 0; i < above.length; i += 1) {
        above[i] = 2 * i + 1 < below.length ? this.higher(below[2 * i], below[2 * i + 1]) : below[2 * i];
      }
      this.levels.push(above);
    }
  }

  /** Of two rows; of equal ones, the first. */
  higher(one, other) {
    const more = this.figures[one] - this.figures[other];
    return more > 0 || (more === 0 && one < other) ? one : other;
  }

  /** Among the rows from `first` to `last`, both included. */
  among(first, last) {
    let found = first;
    for (let [level, from, end] = [0, first, last + 1]; from < end; level += 1) {
      if (from % 2) found = this.higher(found, this.levels[level][from++]);
      if (end % 2) found = this.higher(found, this.levels[level][--end]);
      from /= 2;
      end /= 2;
    }
    return found;
  }
}

/** A figure over time: `figures[i]` from `starts[i]` until the next start, the last one until `end`. */
class Steps {
  constructor(starts, end, figures) {
    this.starts = new Float64Array(starts);
    this.end = end;
    this.highest = new Highest(new Float64Array(figures));
    this.top = figures[this.highest.among(0, figures.length - 1)];
  }

  /** The row at a time; of several that take none, the last. */
  at(time) {
    let low = 0;
    let high = this.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= time) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  until(row) {
    return row + 1 < this.starts.length ? this.starts[row + 1] : this.end;
  }

  /** What to draw of a span of time in so many pixels: {from, until, row, first, last}; `row` is the highest of them. */
  columns(from, until, pixels) {
    const [first, last] = [this.at(from), this.at(until)];
    const found = [];
    if (last - first < pixels) {
      for (let row = first; row <= last; row += 1) {
        found.push({ from: this.starts[row], until: this.until(row), row, first: row, last: row });
      }
      return found;
    }
    const wide = (until - from) / pixels;
    let begin = first;
    for (let pixel = 0; pixel < pixels; pixel += 1) {
      const end = this.at(from + (pixel + 1) * wide);
      found.push({ from: from + pixel * wide, until: from + (pixel + 1) * wide, row: this.highest.among(begin, end), first: begin, last: end });
      begin = end;
    }
    return found;
  }
}

/** Spans {start_s, end_s} in the order of their starts, one at a time: those of a view, joined where a pixel has several. */
class Spans {
  constructor(spans) {
    this.spans = spans;
    this.starts = new Steps(spans.length ? spans.map((one) => one.start_s) : [0], 0, [0]);
  }

  at(time) {
    const one = this.spans[this.starts.at(time)];
    return one && one.start_s <= time && time <= one.end_s ? one : null;
  }

  /** {from, until, one}; `one` is null where several are joined. */
  columns(from, until, pixels) {
    const least = (until - from) / pixels;
    const found = [];
    for (let row = this.starts.at(from); row < this.spans.length && this.spans[row].start_s <= until; row += 1) {
      const one = this.spans[row];
      if (one.end_s < from) continue;
      const before = found.at(-1);
      if (before && one.end_s - before.from < least) Object.assign(before, { until: one.end_s, one: null });
      else found.push({ from: one.start_s, until: one.end_s, one });
    }
    return found;
  }
}
