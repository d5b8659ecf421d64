// What is in memory, summed into bands: by layer, or by what was decided.

// Okabe and Ito's colours, told apart by colour-blind people too; lightness differs between neighbours.
const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];
const GREYS = { argument: "#8b95a1", output: "#a9b1bb", other: "#5d6772", rest: "#c3c9d1" };
const DECISIONS = [
  ["keep", "kept", PALETTE[0]],
  ["offload", "offloaded", PALETTE[1]],
  ["recompute", "recomputed", PALETTE[2]],
  ["", "short-lived", PALETTE[4]],
];
const SHOWN_LAYERS = PALETTE.length;

/** The first `depth` parts of a layer; a value without one goes by the line that makes it. */
function layerOf(row, depth) {
  if (!row.layer) return row.source || "no layer";
  return depth ? row.layer.split("/").slice(0, depth).join("/") : row.layer;
}

/** The depth at which layers first differ enough to be worth a colour each. */
function usualDepth(timeline) {
  for (let depth = 1; depth < 6; depth += 1) {
    if (new Set(timeline.values.filter((v) => v.layer).map((v) => layerOf(v, depth))).size >= 4) return depth;
  }
  return 0;
}

function deepest(timeline) {
  return timeline.values.reduce((most, value) => Math.max(most, value.layer ? value.layer.split("/").length : 0), 0);
}

/** The layers by what they take: bytes times seconds, most first. */
function largestLayers(timeline, depth) {
  const weight = new Map();
  for (const stay of timeline.stays) {
    const value = timeline.values[stay.value];
    if (value.decision === "argument" || value.decision === "output") continue;
    const key = layerOf(value, depth);
    const time = timeline.instants[stay.last - 1].end_s - timeline.instants[stay.first].start_s;
    weight.set(key, (weight.get(key) || 0) + value.nbytes * time);
  }
  return [...weight.keys()].sort((a, b) => weight.get(b) - weight.get(a));
}

/** `UNet/` where all layers are below that, else ''. */
function rootOf(timeline) {
  const roots = new Set(timeline.values.filter((value) => value.layer).map((value) => value.layer.split("/")[0]));
  return roots.size === 1 ? `${[...roots][0]}/` : "";
}

/** When each layer first takes memory: in this order they stack, as the step makes them. */
function firstInstants(timeline, depth) {
  const first = new Map();
  for (const stay of timeline.stays) {
    const layer = layerOf(timeline.values[stay.value], depth);
    first.set(layer, Math.min(stay.first, first.get(layer) ?? Infinity));
  }
  return first;
}

/** Bands from below: {key, name, color, device, host}, bytes at every instant; they add up to the curves. */
function bandsOf(timeline, grouping, depth) {
  const groups = [
    { key: "argument", name: "arguments", color: GREYS.argument },
    { key: "output", name: "outputs", color: GREYS.output },
  ];
  let keyOf = (value) => `=${value.decision}`;
  if (grouping === "decision") {
    for (const [key, name, color] of DECISIONS) groups.push({ key: `=${key}`, name, color });
  } else {
    const layers = largestLayers(timeline, depth);
    const first = firstInstants(timeline, depth);
    const shown = layers.slice(0, SHOWN_LAYERS).sort((a, b) => first.get(a) - first.get(b));
    const others = layers.length - shown.length;
    const root = rootOf(timeline);
    const named = (layer) => (layer.startsWith(root) ? layer.slice(root.length) : layer);
    shown.forEach((layer, index) => groups.push({ key: `/${layer}`, name: named(layer), color: PALETTE[index] }));
    if (others) groups.push({ key: "rest", name: others === 1 ? "another layer" : `${others} other layers`, color: GREYS.rest });
    keyOf = (value) => {
      const layer = layerOf(value, depth);
      return shown.includes(layer) ? `/${layer}` : "rest";
    };
  }
  const count = timeline.instants.length;
  const bands = new Map(groups.map((group) => [group.key, { ...group, device: new Float64Array(count + 1), host: new Float64Array(count + 1) }]));
  const always = (value) => value.decision === "argument" || value.decision === "output";
  const ofValue = timeline.values.map((value) => bands.get(always(value) ? value.decision : keyOf(value)));
  for (const stay of timeline.stays) {
    const changes = ofValue[stay.value][stay.place];
    changes[stay.first] += timeline.values[stay.value].nbytes;
    changes[stay.last] -= timeline.values[stay.value].nbytes;
  }
  for (const { device, host } of bands.values()) {
    for (let index = 1; index < count; index += 1) {
      device[index] += device[index - 1];
      host[index] += host[index - 1];
    }
  }
  const device = Float64Array.from(timeline.instants, (instant) => instant.other_bytes);
  bands.set("other", { key: "other", name: "scratch and fragments", color: GREYS.other, device, host: new Float64Array(count) });
  const isSeen = (counts) => counts.subarray(0, count).some((nbytes) => nbytes);
  return [...bands.values()].filter((band) => isSeen(band.device) || isSeen(band.host));
}

/** The values in memory at an instant, largest first: {value, place, first, last}. */
function liveAt(timeline, index) {
  const there = timeline.stays.filter((stay) => stay.first <= index && index < stay.last);
  return there.sort((a, b) => timeline.values[b.value].nbytes - timeline.values[a.value].nbytes);
}

/** The instant at the device peak. */
function peakOf(timeline) {
  let peak = 0;
  timeline.instants.forEach((instant, index) => {
    if (instant.device_bytes > timeline.instants[peak].device_bytes) peak = index;
  });
  return peak;
}

/** The instant at a time; of several that take none, the last. */
function instantAt(timeline, time) {
  let low = 0;
  let high = timeline.instants.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (timeline.instants[middle].start_s <= time) low = middle;
    else high = middle - 1;
  }
  return low;
}
