import { cut, FONT } from "./surface.js";

// Two columns of tokens and a line for each large weight: for every query its largest weights, up to a share of its mass.

const ROW = 21;
const MOST = 4000;
const TOP = 26;

export const linesLayout = (view, width, tallest) => {
  const rows = Math.max(view.rows.length, view.cols.length);
  const row = Math.max(13, Math.min(ROW, (tallest - TOP) / rows));
  const content = TOP + rows * row + 8;
  const column = Math.min(150, width * 0.3);
  return { row, content, column, height: Math.min(content, Math.max(tallest, 240)), left: column, right: width - column, width };
};

const size = (weight) => {
  const magnitude = Math.abs(weight);
  return magnitude < Infinity ? magnitude : 0;
};
const bySize = (a, b) => size(b[2]) - size(a[2]) || a[0] - b[0] || a[1] - b[1];

// [query, key, weight], strongest first: of every query, or of one, its largest weights until they make up ``mass``.
export const strongest = (map, mass, query = null) => {
  const key = `${mass} ${query}`;
  if (lastLines.get(map)?.key !== key) lastLines.set(map, { key, pairs: findStrongest(map, mass, query) });
  return lastLines.get(map).pairs;
};

// The last result of each map: while the pointer moves, the same lines are drawn again.
const lastLines = new WeakMap();
const findStrongest = (map, mass, query) => {
  const pairs = [];
  const sorted = new Float32Array(map.cols);
  for (let i = query ?? 0; i <= (query ?? map.rows - 1); i++) {
    const row = map.values.subarray(i * map.cols, (i + 1) * map.cols);
    let total = 0;
    for (let j = 0; j < row.length; j++) total += sorted[j] = size(row[j]);
    sorted.sort();
    let [at, sum] = [row.length, 0];
    while (at > 0 && sorted[at - 1] > 0 && sum < mass * total - 1e-9) sum += sorted[--at];
    if (at === row.length) continue;
    // Of the weights that equal the smallest one needed, the first ones are taken.
    let ties = 0;
    for (let k = at; k < row.length && sorted[k] === sorted[at]; k++) ties++;
    for (let j = 0; j < row.length; j++) {
      const w = size(row[j]);
      if (w > sorted[at] || (w === sorted[at] && ties-- > 0)) pairs.push([i, j, row[j]]);
    }
  }
  return pairs.sort(bySize).slice(0, MOST);
};

// The largest weights of a whole map; sizes are counted first, so that only these are sorted.
export const largestPairs = (map, count) => {
  const buckets = new Uint32Array(1025);
  const bucket = (w) => Math.floor(size(w) / (map.top || 1) * 1024);
  for (const w of map.values) buckets[bucket(w)]++;
  let [least, sum] = [1025, 0];
  while (least > 1 && sum < count) sum += buckets[--least];
  const pairs = [];
  for (let i = 0; i < map.values.length && pairs.length < 20 * count; i++) {
    if (bucket(map.values[i]) >= least) pairs.push([Math.floor(i / map.cols), i % map.cols, map.values[i]]);
  }
  return pairs.sort(bySize).slice(0, count);
};

export const drawLines = (context, view) => {
  const { rows, cols, layout, palette, query, hits, scroll } = view;
  const y = (i) => TOP + (i + 0.5) * layout.row - scroll;
  const middle = (layout.left + layout.right) / 2;
  context.font = `600 12px ${FONT}`;
  context.fillStyle = palette.muted;
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.fillText("looks", layout.left - 8, 12);
  context.textAlign = "left";
  context.fillText(view.dimensions ? "dimension" : "is looked at", layout.right + 8, 12);
  context.save();
  context.beginPath();
  context.rect(0, TOP - 4, layout.width, layout.height - TOP + 4);
  context.clip();
  // What the chosen query gives to a key, and in which colour: of several heads that of the one that gives most.
  const into = new Map();
  const several = view.bundles.length > 1;
  view.bundles.forEach(({ lines, colour, top }, at) => {
    // Heads that draw the same line are drawn beside each other.
    const aside = 2 * (at - (view.bundles.length - 1) / 2);
    for (const [i, j, weight] of lines.slice().reverse()) {
      const share = Math.abs(weight) / (top || 1);
      const ink = palette[several ? `cat-${colour}` : weight < 0 ? "cat-1" : "cat-0"];
      if (query !== null && share >= (into.get(j)?.share ?? 0)) into.set(j, { share, ink });
      else if (query === null && share < 0.02) continue;
      if (Math.min(y(i), y(j)) > layout.height || Math.max(y(i), y(j)) < 0) continue;
      context.strokeStyle = ink;
      context.globalAlpha = Math.max(0.04, Math.min(1, query === null ? share : 0.25 + 0.75 * share));
      context.lineWidth = 0.8 + 2.6 * share;
      // Where the colour names the head, dashes are weights below zero.
      if (several && weight < 0) context.setLineDash([5, 4]);
      context.beginPath();
      context.moveTo(layout.left, y(i) + aside);
      context.bezierCurveTo(middle, y(i) + aside, middle, y(j) + aside, layout.right, y(j) + aside);
      context.stroke();
      context.setLineDash([]);
    }
  });
  context.globalAlpha = 1;
  const font = Math.max(9, Math.min(13, layout.row * 0.7));
  const column = (names, x, align, strong, hit) => names.forEach((name, i) => {
    if (y(i) < TOP - layout.row || y(i) > layout.height + layout.row) return;
    const special = strong(i);
    context.font = `${special || hit.has(i) ? "650 " : ""}${font}px ${FONT}`;
    context.fillStyle = special ? palette["cat-1"] : hit.has(i) ? palette.accent : query !== null && !special ? palette.muted : palette.text;
    context.textAlign = align;
    context.fillText(cut(context, name, layout.column - 16), x, y(i));
  });
  column(rows, layout.left - 8, "right", (i) => i === query, new Set(hits.rows));
  for (const [j, { share, ink }] of into) {
    context.fillStyle = ink;
    context.globalAlpha = 0.12 + 0.5 * share;
    context.fillRect(layout.right + 2, y(j) - layout.row / 2 + 1, layout.column - 6, layout.row - 2);
  }
  context.globalAlpha = 1;
  const keyHits = new Set([...hits.cols]);
  context.save();
  column(cols, layout.right + 8, "left", () => false, keyHits);
  if (query !== null) {
    context.font = `${font}px ${FONT}`;
    context.fillStyle = palette.text;
    context.textAlign = "left";
    for (const j of into.keys()) context.fillText(cut(context, cols[j], layout.column - 16), layout.right + 8, y(j));
  }
  context.restore();
  context.restore();
};

// The name of a query: [x, y, width, height].
export const lineBox = (layout, scroll, query) => [0, TOP + query * layout.row - scroll, layout.left, layout.row];

export const lineRowAt = (layout, scroll, rows, x, y) => {
  const i = Math.floor((y - TOP + scroll) / layout.row);
  if (i < 0 || y < TOP) return null;
  if (x <= layout.left + 4 && i < rows.rows.length) return { side: "rows", i };
  if (x >= layout.right - 4 && i < rows.cols.length) return { side: "cols", i };
  return null;
};
