// Reads the JSON that stands in the page: rows by column, repeated text once (`memplan/report/views/packed.py`).

function unpacked(entry) {
  if (entry === null || typeof entry !== "object") return entry;
  if (Array.isArray(entry)) return entry.length && typeof entry[0] === "object" ? entry.map(unpacked) : entry;
  if (!("columns" in entry && "rows" in entry)) return Object.fromEntries(Object.entries(entry).map(([name, one]) => [name, unpacked(one)]));
  const names = Object.keys(entry.columns);
  const empty = Object.fromEntries(names.map((name) => [name, null]));
  const rows = Array.from({ length: entry.rows }, () => ({ ...empty }));
  for (const name of names) {
    const column = columnOf(entry.columns[name]);
    for (let row = 0; row < rows.length; row += 1) rows[row][name] = column[row];
  }
  return rows;
}

function columnOf(column) {
  if (Array.isArray(column)) return column;
  const of = unpacked(column.of);
  return column.at.map((number) => (number < 0 ? null : of[number]));
}
