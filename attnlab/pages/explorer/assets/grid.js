import { paint } from "./colour.js";
import { largest } from "./data.js";
import { itemOf, linedHeads, paneMap, paneTitle, placeOf } from "./maps.js";
import { FONT, sized } from "./surface.js";
import { make, number } from "./dom.js";

// All heads of one reading as thumbnails: a row per layer, wrapped where a layer has more heads than fit.

const MARGIN = 26;
const SMALLEST = 13;
const LARGEST = 96;

// A word shortened for a small cell.
export const initials = (text) => text.split("+").map((word) => word[0]).join("+");

const layoutOf = (stack, width) => {
  const heads = stack.headCount;
  const perRow = Math.max(1, Math.min(heads, Math.floor((width - MARGIN) / SMALLEST)));
  const size = Math.min(LARGEST, (width - MARGIN) / perRow);
  const rows = Math.ceil(heads / perRow);
  return { perRow, size, rows, height: MARGIN + stack.layers.length * rows * size };
};

export const gridView = (app) => {
  const canvas = make("canvas", { class: "x-grid", tabindex: "0", role: "img" });
  let picture = null;
  let key = "";
  let frame = null;

  const cell = (layer, head) => {
    const { size, perRow, rows } = frame;
    return [MARGIN + (head % perRow) * size, MARGIN + (layer * rows + Math.floor(head / perRow)) * size];
  };

  const ink = (context, palette) => {
    context.font = `11px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = palette.muted;
  };

  const labels = (context, palette, stack) => {
    ink(context, palette);
    const { size, perRow, rows } = frame;
    const step = Math.max(1, Math.ceil(20 / size));
    for (let head = 0; head < perRow; head += step) context.fillText(String(head), MARGIN + (head + 0.5) * size, MARGIN / 2);
    const every = Math.max(1, Math.ceil(13 / (size * rows)));
    stack.layers.forEach((number, layer) => {
      if (layer % every === 0) context.fillText(String(number), MARGIN / 2, MARGIN + (layer * rows + Math.min(rows, 1) * 0.5) * size);
    });
  };

  const drawMaps = async (context, palette, pane) => {
    const { size } = frame;
    const gap = size > 24 ? 1.5 : 0.5;
    const { linear, shared } = app.state;
    const reading = placeOf(app, pane).reading;
    const all = await Promise.all(reading.layers.map((entry, layer) => Promise.all(entry.small.scales.map((_, head) => paneMap(app, pane, layer, head, true)))));
    const top = shared ? Math.max(...all.map((row) => Math.max(...row.map((map) => map.top)))) : null;
    all.forEach((row, layer) => row.forEach((map, head) => {
      const [x, y] = cell(layer, head);
      context.imageSmoothingEnabled = map.cols > size;
      context.imageSmoothingQuality = "high";
      context.drawImage(paint(map, palette, { top: top ?? map.top, linear }), x + gap, y + gap, size - 2 * gap, size - 2 * gap);
    }));
  };

  // One number per head instead of its map.
  const drawNumbers = (context, palette, stack, name) => {
    const { size } = frame;
    const gap = size > 24 ? 1.5 : 0.5;
    const values = stack.statistics[name] ?? [];
    const words = [...new Set(values.flat().filter((value) => typeof value === "string"))].sort();
    const top = largest(values.flat().map((value) => typeof value === "number" ? value : 0));
    const colourFor = (value) => {
      if (value === null || value === undefined) return palette.sunken;
      if (typeof value === "string") return palette[`cat-${words.indexOf(value) % 7}`];
      const at = 3 * Math.round(Math.max(0, value / (top || 1)) * 255);
      return `rgb(${palette.seq[at]}, ${palette.seq[at + 1]}, ${palette.seq[at + 2]})`;
    };
    values.forEach((row, layer) => row?.forEach((value, head) => {
      const [x, y] = cell(layer, head);
      context.fillStyle = colourFor(value);
      context.fillRect(x + gap, y + gap, size - 2 * gap, size - 2 * gap);
      if (size < 30 || value === null) return;
      const dark = typeof value === "string" || value / (top || 1) > 0.5;
      context.fillStyle = dark ? palette.card : palette.text;
      context.font = `${Math.min(11, size / 3.6)}px ${FONT}`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      const text = typeof value === "string" ? initials(value) : number(value, 2);
      context.fillText(text, x + size / 2, y + size / 2);
    }));
  };

  const statistic = (stack) => app.state.grid !== "maps" && stack.statistics[app.state.grid] ? app.state.grid : null;

  const draw = async (context, width, pane) => {
    const stack = app.data.stack(itemOf(app, pane), app.state.kind);
    const palette = app.palette();
    frame = layoutOf(stack, width);
    labels(context, palette, stack);
    const name = statistic(stack);
    if (name) drawNumbers(context, palette, stack, name);
    else await drawMaps(context, palette, pane);
  };

  const mark = (context) => {
    const pane = app.state.panes[app.state.active];
    const place = placeOf(app, pane);
    if (!place) return;
    context.lineWidth = 2.5;
    const frameHead = (layer, head, ink) => {
      context.strokeStyle = app.palette()[ink];
      context.strokeRect(...cell(layer, head), frame.size, frame.size);
    };
    const lined = app.state.view === "lines" ? linedHeads(app, place) : [];
    for (const one of lined) if (one.kept) frameHead(one.layer, one.head, `cat-${one.colour}`);
    const ink = lined.length > 1 ? `cat-${lined.find((one) => one.now).colour}` : "cat-1";
    frameHead(place.layer, place.head, statistic(place.stack) ? "text" : ink);
    canvas.setAttribute("aria-label", `All heads, ${paneTitle(app, pane)}; chosen: layer ${place.number}, head ${place.head}. The table of heads has their numbers.`);
  };

  const render = async () => {
    const pane = app.state.panes[app.state.active];
    const stack = app.data.stack(itemOf(app, pane), app.state.kind);
    const width = canvas.parentElement.clientWidth;
    if (!stack || !stack.readingOf[pane.reading] || !width) return;
    const { kind, linear, shared, grid } = app.state;
    const { version } = app;
    const wanted = JSON.stringify([kind, itemOf(app, pane), pane, pane.minus && itemOf(app, pane.minus), linear, shared, grid, width, app.theme, devicePixelRatio]);
    if (wanted !== key) {
      const fresh = document.createElement("canvas");
      const height = layoutOf(stack, width).height;
      await draw(sized(fresh, width, height), width, pane);
      if (version !== app.version) return;
      [picture, key] = [fresh, wanted];
    }
    const context = sized(canvas, width, layoutOf(stack, width).height);
    frame = layoutOf(stack, width);
    context.drawImage(picture, 0, 0, width, frame.height);
    mark(context);
    canvas.dataset.frame = [MARGIN, frame.size, frame.perRow].join(" ");
  };

  const headAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const pane = app.state.panes[app.state.active];
    const stack = app.data.stack(itemOf(app, pane), app.state.kind);
    const column = Math.floor((event.clientX - box.left - MARGIN) / frame.size);
    const row = Math.floor((event.clientY - box.top - MARGIN) / frame.size);
    const layer = Math.floor(row / frame.rows);
    const head = (row % frame.rows) * frame.perRow + column;
    const inside = column >= 0 && column < frame.perRow && row >= 0 && layer < stack.layers.length && head < stack.headCount;
    return inside ? { layer, head, number: stack.layers[layer] } : null;
  };
  canvas.addEventListener("click", (event) => {
    const at = headAt(event);
    if (!at) return;
    if (event.shiftKey) app.toggleKept([at.layer, at.head]);
    else app.set({ layer: at.layer, head: at.head });
  });
  canvas.addEventListener("pointermove", (event) => {
    const at = headAt(event);
    canvas.title = at ? `layer ${at.number}, head ${at.head}` : "";
  });

  return { node: canvas, render };
};
