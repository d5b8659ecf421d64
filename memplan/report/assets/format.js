// Figures as text, and elements whose text is never markup.

const UNITS = [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]];

function bytes(count) {
  if (count === null || count === undefined) return "not known";
  for (const [unit, scale, digits] of UNITS) {
    if (Math.abs(count) >= scale) return `${(count / scale).toFixed(digits)} ${unit}`;
  }
  return `${count} B`;
}

function seconds(value) {
  if (value === null || value === undefined) return "not known";
  if (value === 0) return "0 s";
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]) {
    if (Math.abs(value) >= scale) return `${Number((value / scale).toPrecision(3))} ${unit}`;
  }
  return `${value.toExponential(2)} s`;
}

function percent(part, whole) {
  return `${((100 * part) / whole).toFixed(1)} %`;
}

/** `+3.1 %`: how much more than `whole`. */
function change(part, whole) {
  const more = 100 * (part / whole - 1);
  return `${more < 0 ? "−" : "+"}${Math.abs(more).toFixed(Math.abs(more) < 10 ? 1 : 0)} %`;
}

/** The last folders of a long `file:line`. */
function shortSource(source) {
  const parts = source.split("/");
  return parts.length <= 3 ? source : `…/${parts.slice(-2).join("/")}`;
}

/** `1 graph`, `3 graphs`. */
function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

const secondsOf = (span) => span.end_s - span.start_s;
const spanOf = (span) => seconds(secondsOf(span));

/** An element with attributes, properties (`on...`, `className`, `textContent`, ...) and children; text stays text. */
function make(tag, settings = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);
