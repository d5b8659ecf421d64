// Axes: round steps, in binary units for bytes.

function roundStep(span, count) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((factor) => factor * power >= rough) || 10);
}

function binaryStep(span, count) {
  return 2 ** Math.ceil(Math.log2(Math.max(span / count, 1)));
}

function ticks(low, high, step) {
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high * (1 + 1e-9); tick += step) found.push(tick);
  return found;
}

/** In the unit of the last tick. */
function timeTick(time, last) {
  const unit = last >= 1 ? ["s", 1] : last >= 1e-3 ? ["ms", 1e-3] : last >= 1e-6 ? ["µs", 1e-6] : ["ns", 1e-9];
  return `${Number((time / unit[1]).toPrecision(6))} ${unit[0]}`;
}

function byteTick(count) {
  for (const [unit, scale] of UNITS) {
    if (count >= scale) return `${Number((count / scale).toPrecision(4))} ${unit}`;
  }
  return count ? `${count} B` : "0";
}
