import { difference, merged } from "./data.js";

// The content of a pane: an item's reading, minus another one if chosen, with the names of its rows and columns.

// As many heads can be drawn in one view of lines as there are colours to tell them apart.
export const MOST_HEADS = 7;

export const itemOf = (app, pane) => pane.item ?? app.state.step;

const wordText = (parts) => parts.map((part, i) => i ? part.replace(/^##/, "") : part.replace(/^[▁Ġ]/, "")).join("");

// Tokens of one word as a group; a text without word numbers has a group per token.
const groupsOf = (text) => {
  const groups = [];
  const of = [];
  text.tokens.forEach((_, i) => {
    const same = i > 0 && text.words && text.words[i] >= 0 && text.words[i] === text.words[i - 1];
    if (same) groups.at(-1).push(i);
    else groups.push([i]);
    of.push(groups.length - 1);
  });
  return { groups, of, names: groups.map((group) => wordText(group.map((i) => text.tokens[i]))) };
};

const groupCache = new WeakMap();
const grouped = (text) => {
  if (!groupCache.has(text)) groupCache.set(text, groupsOf(text));
  return groupCache.get(text);
};
export const mergesWords = (text) => grouped(text).groups.length < text.tokens.length;

// Names of a thumbnail's cells: the tokens that a block begins and ends with.
const blockNames = (tokens, count) => {
  const starts = Array.from({ length: count + 1 }, (_, i) => Math.ceil(i * tokens.length / count));
  return starts.slice(0, -1).map((start, i) => starts[i + 1] - start > 1 ? `${tokens[start]} … ${tokens[starts[i + 1] - 1]}` : tokens[start]);
};

const sideNames = (app, text, count, blocks) => {
  if (blocks) return count < text.tokens.length ? blockNames(text.tokens, count) : text.tokens;
  return app.state.words ? grouped(text).names : text.tokens;
};

export const describe = (app, spec) => {
  const { meta } = app;
  const several = meta.items.length > 1;
  const item = meta.items[spec.item ?? app.state.step];
  return several ? `${item.name} · ${spec.reading}` : spec.reading;
};
export const paneTitle = (app, pane) => describe(app, pane) + (pane.minus ? ` − ${describe(app, pane.minus)}` : "");

// The stack of a pane's head, with layer and head clamped to it.
export const placeOf = (app, pane) => {
  const { kind, layer, head } = app.state;
  const stack = app.data.stack(itemOf(app, pane), kind);
  const reading = stack?.readingOf[pane.reading];
  if (!reading) return null;
  const at = Math.min(layer, stack.layers.length - 1);
  const heads = reading.layers[at].small.scales.length;
  return { stack, reading, layer: at, head: Math.min(head, heads - 1), heads, number: stack.layers[at] };
};

export const comparable = (app, a, b) => {
  const [one, two] = [a, b].map((spec) => app.data.reading(spec.item ?? app.state.step, app.state.kind, spec.reading));
  return Boolean(one && two && one.columns === two.columns && one.size[0] === two.size[0] && one.size[1] === two.size[1]);
};

const single = async (app, spec, layer, head, small) => app.data.head(itemOf(app, spec), app.state.kind, spec.reading, layer, head, small);

export const paneMap = async (app, pane, layer, head, small = false) => {
  const map = await single(app, pane, layer, head, small);
  if (!pane.minus || !comparable(app, pane, pane.minus)) return map;
  const other = placeOf(app, pane.minus);
  const subtracted = await single(app, pane.minus, Math.min(layer, other.stack.layers.length - 1), head, small || Boolean(map.blocks));
  if (subtracted.values.length === map.values.length) return difference(map, subtracted);
  // One of the two is stored as a thumbnail only, so thumbnails are subtracted.
  return difference(await single(app, pane, layer, head, true), subtracted);
};

// The heads whose lines are drawn: those kept, and the chosen one.
export const linedHeads = (app, place) => {
  const { layers } = place.reading;
  const now = [place.layer, place.head];
  const kept = app.state.kept.filter(([layer, head]) => layer < layers.length && head < layers[layer].small.scales.length);
  const isNow = (one) => String(one) === String(now);
  const all = kept.some(isNow) ? kept : [...kept, now];
  return all.map(([layer, head], colour) => (
    { layer, head, number: place.stack.layers[layer], colour, now: isNow([layer, head]), kept: colour < kept.length, name: `layer ${place.stack.layers[layer]}, head ${head}` }));
};

// The head that a pane shows, with words merged where the user asks for it: { map, rows, cols, title, place }, and in
// the view of lines the maps of all heads whose lines are drawn.
export const shown = async (app, pane) => {
  const place = placeOf(app, pane);
  if (!place) return null;
  const item = itemOf(app, pane);
  const queries = app.data.text(item, place.stack.queries);
  const keys = place.reading.columns === "keys" ? app.data.text(item, place.stack.keys) : null;
  const load = async ({ layer, head }) => {
    const raw = await paneMap(app, pane, layer, head);
    return app.state.words && !raw.blocks ? merged(raw, grouped(queries), keys && grouped(keys)) : raw;
  };
  const heads = app.state.view === "lines" ? linedHeads(app, place) : [];
  const [map, ...maps] = await Promise.all([place, ...heads].map(load));
  // A layer of which only thumbnails are stored has other rows, so its lines cannot be drawn with these.
  const lined = heads.map((one, i) => ({ ...one, map: maps[i] })).filter((one) => one.map.rows === map.rows && one.map.cols === map.cols);
  return {
    map,
    lined,
    place,
    rows: sideNames(app, queries, map.rows, map.blocks),
    cols: keys ? sideNames(app, keys, map.cols, map.blocks) : Array.from({ length: map.cols }, (_, i) => String(i)),
    dimensions: !keys,
    title: paneTitle(app, pane),
    headTitle: place.heads === 1 && place.stack.headCount > 1 ? `layer ${place.number} · all heads` : `layer ${place.number} · head ${place.head}`,
  };
};
