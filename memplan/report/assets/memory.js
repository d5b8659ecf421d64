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

const LAYERS = new Map(); // by depth: whole layer -> its first parts; the same few occur in many rows

/** The first `depth` parts of a layer; a value without one goes by the line that makes it. */
function layerOf(row, depth) {
  if (!row.layer) return row.source || "no layer";
  if (!depth) return row.layer;
  if (!LAYERS.has(depth)) LAYERS.set(depth, new Map());
  const known = LAYERS.get(depth);
  if (!known.has(row.layer)) known.set(row.layer, row.layer.split("/").slice(0, depth).join("/"));
  return known.get(row.layer);
}

/** All layers of a timeline, each once. */
function layersOf(timeline) {
  return [...new Set(timeline.values.map((value) => value.layer))].filter(Boolean);
}

/** The depth at which layers first differ enough to be worth a colour each. */
function usualDepth(layers) {
  const cut = (layer, depth) => layerOf({ layer }, depth);
  return [1, 2, 3, 4, 5].find((depth) => new Set(layers.map((layer) => cut(layer, depth))).size >= 4) || 1;
}

function deepest(layers) {
  return layers.reduce((most, layer) => Math.max(most, layer.split("/").length), 0);
}

/** The layers of some timelines that take most, bytes times seconds, in the order in which they first take memory. */
function largestLayers(timelines, depth) {
  const weight = new Map();
  const since = new Map();
  for (const timeline of timelines) {
    for (const stay of timeline.stays) {
      const value = timeline.values[stay.value];
      if (isAlways(value)) continue;
      const key = layerOf(value, depth);
      const time = timeline.instants[stay.last - 1].end_s - timeline.instants[stay.first].start_s;
      weight.set(key, (weight.get(key) || 0) + value.nbytes * time);
      since.set(key, Math.min(stay.first, since.get(key) ?? Infinity));
    }
  }
  const shown = [...weight.keys()].sort((a, b) => weight.get(b) - weight.get(a)).slice(0, PALETTE.length);
  return { shown: shown.sort((a, b) => since.get(a) - since.get(b)), others: weight.size - shown.length };
}

/** `UNet/` where all layers are below that, else ''. */
function rootOf(layers) {
  const roots = new Set(layers.map((layer) => layer.split("/")[0]));
  return roots.size === 1 ? `${[...roots][0]}/` : "";
}

const isAlways = (value) => value.decision === "argument" || value.decision === "output";

/**
 * Bands from below: {key, name, color, device, host}, bytes at every instant; they add up to the curves.
 * `layers`: those with a band of their own, as of `largestLayers`.
 */
function bandsOf(timeline, grouping, depth, layers) {
  const groups = [
    { key: "argument", name: "arguments", color: GREYS.argument },
    { key: "output", name: "outputs", color: GREYS.output },
  ];
  let keyOf = (value) => `=${value.decision}`;
  if (grouping === "decision") {
    for (const [key, name, color] of DECISIONS) groups.push({ key: `=${key}`, name, color });
  } else {
    const { shown, others } = layers;
    const root = rootOf(layersOf(timeline));
    const named = (layer) => (layer.startsWith(root) ? layer.slice(root.length) : layer);
    shown.forEach((layer, index) => groups.push({ key: `/${layer}`, name: named(layer), color: PALETTE[index] }));
    if (others) groups.push({ key: "rest", name: others === 1 ? "another layer" : `${others} other layers`, color: GREYS.rest });
    const keys = new Map(shown.map((layer) => [layer, `/${layer}`]));
    keyOf = (value) => keys.get(layerOf(value, depth)) || "rest";
  }
  const count = timeline.instants.length;
  const bands = new Map(groups.map((group) => [group.key, { ...group, device: new Float64Array(count + 1), host: new Float64Array(count + 1) }]));
  const ofValue = timeline.values.map((value) => bands.get(isAlways(value) ? value.decision : keyOf(value)));
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
