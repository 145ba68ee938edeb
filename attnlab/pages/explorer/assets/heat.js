import { unspread } from "./colour.js";
import { number } from "./dom.js";
import { cut, FONT } from "./surface.js";

// One head large: tokens on both axes, a crosshair, a legend with numbers; zoomed to a part where the user asks for it.

const LEGEND = 46;
const PADDING = 8;
const CLOSEST = 64;
// Up to so many tokens every one keeps its name, also on a phone, where the map is then wider than the screen.
const NAMED = 64;
const SMALLEST_NAMED = 8;

const widths = new WeakMap();
const widestOf = (ruler, names) => {
  if (!widths.has(names)) {
    ruler.font = `12px ${FONT}`;
    let most = 0;
    for (const name of names) most = Math.max(most, ruler.measureText(name).width);
    widths.set(names, most);
  }
  return widths.get(names);
};

export const heatLayout = (ruler, { rows, cols }, width, tallest) => {
  const widest = Math.min(108, width * 0.24);
  const wide = (names) => Math.max(18, Math.min(widest, widestOf(ruler, names) + 10));
  const [left, over] = [wide(rows), wide(cols)];
  const fitting = Math.min(52, (width - left - PADDING) / cols.length, Math.max(120, tallest - over - LEGEND) / rows.length);
  const cell = Math.max(rows.length, cols.length) > NAMED ? fitting : Math.max(SMALLEST_NAMED, fitting);
  return { left, needs: left + cell * cols.length + PADDING, over, cell, width: cell * cols.length, height: cell * rows.length, total: over + cell * rows.length + LEGEND };
};

export const fit = (zoom, rows, cols) => {
  const s = Math.max(1, Math.min(Math.max(rows, cols) / 4, CLOSEST, zoom.s));
  return {
    s: Math.max(1, s),
    x: Math.max(0, Math.min(cols - cols / Math.max(1, s), zoom.x)),
    y: Math.max(0, Math.min(rows - rows / Math.max(1, s), zoom.y)),
  };
};

// The visible part of a cell: [x, y, width, height].
export const cellBox = (layout, zoom, i, j) => {
  const size = layout.cell * zoom.s;
  const within = (at, start, length) => Math.max(start, Math.min(start + length, at));
  const [x, right] = [j, j + 1].map((at) => within(layout.left + (at - zoom.x) * size, layout.left, layout.width));
  const [y, low] = [i, i + 1].map((at) => within(layout.over + (at - zoom.y) * size, layout.over, layout.height));
  return [x, y, right - x, low - y];
};

export const cellAt = (layout, zoom, rows, cols, x, y) => {
  if (x < layout.left || y < layout.over || x >= layout.left + layout.width || y >= layout.over + layout.height) return null;
  const j = Math.floor(zoom.x + (x - layout.left) / (layout.cell * zoom.s));
  const i = Math.floor(zoom.y + (y - layout.over) / (layout.cell * zoom.s));
  return i >= 0 && j >= 0 && i < rows && j < cols ? [i, j] : null;
};

const axis = (context, names, { palette, start, size, length, marked, hits, draw }) => {
  const font = Math.max(7, Math.min(12.5, size * 0.86));
  const every = Math.max(1, Math.ceil(font * 1.12 / size));
  const strong = new Set([...marked, ...hits]);
  // A name that would overlap a marked one is left out.
  const near = (i) => [...strong].some((other) => other !== i && Math.abs(other - i) * size < font * 1.05);
  names.forEach((name, i) => {
    const at = start + (i + 0.5) * size;
    if (at < 0 || at > length) return;
    const special = strong.has(i);
    if (!special && (i % every || near(i))) return;
    context.font = `${special ? "650 " : ""}${special ? Math.max(11, font) : font}px ${FONT}`;
    context.fillStyle = marked.includes(i) ? palette["cat-1"] : special ? palette.accent : palette.text;
    draw(name, at);
  });
};

const legend = (context, { map, top, linear, palette, layout, caption }) => {
  const y = layout.over + layout.height + 14;
  const width = Math.max(60, Math.min(240, layout.width));
  const table = map.signed ? palette.div : palette.seq;
  for (let i = 0; i < 64; i++) {
    const at = 3 * Math.round(i / 63 * 255);
    context.fillStyle = `rgb(${table[at]}, ${table[at + 1]}, ${table[at + 2]})`;
    context.fillRect(layout.left + i * width / 64, y, width / 64 + 0.5, 9);
  }
  context.font = `11px ${FONT}`;
  context.fillStyle = palette.muted;
  context.textBaseline = "top";
  const ticks = map.signed ? (width > 180 ? [-1, -0.5, 0, 0.5, 1] : [-1, 0, 1]) : width > 150 ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.5, 1];
  ticks.forEach((place, i) => {
    const x = layout.left + (map.signed ? (place + 1) / 2 : place) * width;
    context.textAlign = i === 0 ? "left" : i === ticks.length - 1 ? "right" : "center";
    context.fillText(number(unspread(place, linear) * top, 2), x, y + 13);
  });
  if (layout.width - width > 170) {
    context.textAlign = "left";
    context.fillText(caption, layout.left + width + 14, y - 1);
  }
};

export const drawHeat = (context, view) => {
  const { map, rows, cols, layout, zoom, palette, marked, hits } = view;
  const size = layout.cell * zoom.s;
  context.save();
  context.beginPath();
  context.rect(layout.left, layout.over, layout.width, layout.height);
  context.clip();
  const picture = size * (globalThis.devicePixelRatio || 1) < 0.9 ? view.coarse() : view.fine();
  context.imageSmoothingEnabled = false;
  const [dx, dy] = [picture.width / map.cols, picture.height / map.rows];
  context.drawImage(picture, zoom.x * dx, zoom.y * dy, picture.width / zoom.s, picture.height / zoom.s, layout.left, layout.over, layout.width, layout.height);
  for (const [i, j, pinned] of marked) {
    context.strokeStyle = palette["cat-1"];
    context.globalAlpha = pinned ? 0.9 : 0.6;
    context.lineWidth = 1;
    if (i !== null) context.strokeRect(layout.left - 2, layout.over + (i - zoom.y) * size, layout.width + 4, size);
    if (j !== null) context.strokeRect(layout.left + (j - zoom.x) * size, layout.over - 2, size, layout.height + 4);
  }
  context.restore();
  context.strokeStyle = palette.line;
  context.lineWidth = 1;
  context.strokeRect(layout.left - 0.5, layout.over - 0.5, layout.width + 1, layout.height + 1);
  context.textBaseline = "middle";
  context.textAlign = "right";
  axis(context, rows, {
    palette, size, hits: hits.rows, start: -zoom.y * size, length: layout.height, marked: marked.map(([i]) => i).filter((i) => i !== null),
    draw: (name, at) => context.fillText(cut(context, name, layout.left - 8), layout.left - 6, layout.over + at),
  });
  axis(context, cols, {
    palette, size, hits: hits.cols, start: -zoom.x * size, length: layout.width, marked: marked.map(([, j]) => j).filter((j) => j !== null),
    draw: (name, at) => {
      context.save();
      context.translate(layout.left + at, layout.over - 6);
      context.rotate(-Math.PI / 2);
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillText(cut(context, name, layout.over - 8), 0, 0);
      context.restore();
    },
  });
  legend(context, view);
};
