import { paint } from "./colour.js";
import { shrunk } from "./data.js";
import { make, measured, number, options } from "./dom.js";
import { cellAt, cellBox, drawHeat, fit, heatLayout } from "./heat.js";
import { drawLines, lineBox, lineRowAt, linesLayout, strongest } from "./lines.js";
import { comparable, describe, paneTitle, placeOf, shown } from "./maps.js";
import { drawPassage, passageAt, passageBox, passageLayout, received } from "./passage.js";
import { sized } from "./surface.js";
import { placeBeside } from "./tip.js";

// One pane: its content drawn as a map, as lines or as text, and the readout under the pointer.

const COARSE = 720;
const ruler = document.createElement("canvas").getContext("2d");

export const paneView = (app, index) => {
  const pane = () => app.state.panes[index];
  const change = (patch) => app.set({ panes: app.state.panes.map((one, i) => i === index ? { ...one, ...patch } : one), active: index });
  const parse = (value) => {
    const [item, reading] = JSON.parse(value);
    return { item, reading };
  };
  const show = make("select", { "aria-label": "What is shown", onchange: () => change(parse(show.value)) });
  const less = make("select", { "aria-label": "Minus", onchange: () => change({ minus: less.value ? parse(less.value) : null }) });
  const close = make("button", { type: "button", class: "x-close", "aria-label": "Close this pane", title: "Close", onclick: () => app.closePane(index) }, "×");
  const canvas = make("canvas", { class: "x-large", tabindex: "0", role: "img" });
  const hint = make("p", { class: "x-hint" });
  const scroller = make("div", { class: "x-scroll" }, canvas);
  const readout = make("p", { class: "readout x-readout", "aria-live": "polite" });
  const node = make("div", { class: "x-pane", onfocusin: () => index !== app.state.active && app.set({ active: index }) },
    make("div", { class: "x-pane-bar" }, show, make("span", { class: "x-minus" }, "minus"), less, close), hint, scroller, readout);
  let view = null;

  const named = (spec) => [JSON.stringify([spec.item, spec.reading]), describe(app, spec)];

  const controls = () => {
    const now = pane();
    options(show, app.specs().map(named), JSON.stringify([now.item, now.reading]));
    const others = app.specs().filter((spec) => comparable(app, now, spec)).map(named);
    options(less, [["", "nothing"], ...others], now.minus ? JSON.stringify([now.minus.item, now.minus.reading]) : "");
    less.hidden = less.previousSibling.hidden = others.length < 2;
    close.hidden = app.state.panes.length < 2;
    node.classList.toggle("x-active", app.state.panes.length > 1 && index === app.state.active);
  };

  const viewNow = () => {
    const { map, rows, cols } = view;
    const { linear, shared, q, k } = app.state;
    const top = (shared && app.sharedTop) || map.top;
    const inside = (i, count) => i !== null && i < count ? i : null;
    const marked = [];
    if (q !== null || k !== null) marked.push([inside(q, rows.length), inside(k, cols.length), true]);
    if (app.hover && app.hover[0] < rows.length && app.hover[1] < cols.length) marked.push([...app.hover, false]);
    const hits = { rows: app.hits(rows), cols: view.dimensions ? [] : app.hits(cols) };
    const query = app.hoverQuery ?? inside(q, rows.length);
    return { ...view, top, linear, marked, hits, query, palette: app.palette() };
  };

  const caption = () => app.state.linear ? "" : "colour by square root";

  // The drawing of this pane at a width: its height, and the function that draws it.
  const sheet = (width, tallest) => {
    const seen = viewNow();
    if (app.state.view === "lines") {
      const layout = linesLayout(view, width, tallest);
      const scroll = Math.max(0, Math.min(app.scroll, layout.content - layout.height));
      // The chosen head is drawn last, in front.
      const ordered = view.lined.slice().sort((a, b) => a.now - b.now);
      const top = (map) => (app.state.shared && app.sharedTop) || map.top;
      const bundles = ordered.map(({ map, colour }) => ({ lines: strongest(map, app.state.mass, seen.query), colour, top: top(map) }));
      return { height: layout.height, layout, scroll, draw: (context) => drawLines(context, { ...seen, layout, scroll, bundles }) };
    }
    if (app.state.view === "text" && !view.dimensions) {
      const selfAttention = view.place.stack.queries === view.place.stack.keys;
      const queries = selfAttention ? null : passageLayout(ruler, view.rows, width);
      const keys = passageLayout(ruler, view.cols, width);
      const weights = received(view.map, seen.query);
      const top = weights.reduce((most, w) => Math.max(most, Math.abs(w) || 0), 0);
      const over = queries ? queries.height + 18 : 0;
      const draw = (context) => {
        if (queries) drawPassage(context, { ...seen, names: view.rows, layout: queries, weights: null, hits: seen.hits.rows });
        context.save();
        context.translate(0, over);
        drawPassage(context, { ...seen, names: view.cols, layout: keys, weights, top, hits: seen.hits.cols, query: selfAttention ? seen.query : null });
        context.restore();
      };
      return { height: over + keys.height, layout: { queries, keys, over, selfAttention }, draw };
    }
    const layout = heatLayout(ruler, view, width, tallest);
    const zoom = fit(app.state.zoom, view.map.rows, view.map.cols);
    return { width: Math.max(width, layout.needs), height: layout.total, layout, zoom, draw: (context) => drawHeat(context, { ...seen, layout, zoom, caption: caption() }) };
  };

  const tallest = () => Math.max(340, Math.min(860, app.windowHeight() * 0.86));
  let current = null;
  const draw = () => {
    if (!view) return;
    const width = scroller.clientWidth;
    if (!width) return;
    current = sheet(width, tallest());
    const wide = current.width ?? width;
    canvas.style.width = wide > width ? `${wide}px` : "";
    const context = sized(canvas, wide, current.height);
    current.draw(context);
    // The place of the cells, for tests: left, top, size, first column, first row.
    if (current.zoom) canvas.dataset.frame = [current.layout.left, current.layout.over, current.layout.cell * current.zoom.s, current.zoom.x, current.zoom.y].join(" ");
    canvas.style.touchAction = app.state.view === "map" && app.state.zoom.s > 1 ? "none" : "pan-x pan-y pinch-zoom";
    showReadout();
    placeReadout();
  };

  const quoted = (name, i) => view.dimensions && name === String(i) ? `dimension ${i}` : `“${name}” (${i})`;
  const weightText = (i, j) => measured(view.map.values[i * view.map.cols + j], view.map.error);
  const looksAt = (map, query, count) => strongest(map, 0.999, query).slice(0, count).map(([, j, w]) => `${quoted(view.cols[j], j)} ${number(w, 2)}`).join(", ") || "nothing";
  const HINTS = {
    map: "Point at a cell to read its weight; click to keep it.",
    lines: "Point at a token to see where it looks.",
    text: "Choose a token: the others show what it gives them. Now: what each receives on average.",
  };

  // The cell whose weight is read: that under the pointer, or the chosen one.
  const readCell = () => {
    const at = app.hover ?? (app.state.q !== null && app.state.k !== null ? [app.state.q, app.state.k] : null);
    return at && at[0] < view.rows.length && at[1] < view.cols.length ? at : null;
  };
  const readQuery = () => {
    const query = app.hoverQuery ?? app.state.q;
    return query !== null && query < view.rows.length ? query : null;
  };
  const readoutText = () => {
    if (app.state.view === "map") {
      const at = readCell();
      return at ? `${quoted(view.rows[at[0]], at[0])} → ${quoted(view.cols[at[1]], at[1])}: ${weightText(...at)}` : "";
    }
    const query = readQuery();
    if (query === null) return "";
    const name = quoted(view.rows[query], query);
    if (app.state.view !== "lines" || view.lined.length < 2) return `${name} looks at ${looksAt(view.map, query, 4)}`;
    return `${name} looks at ${view.lined.map((one) => `${looksAt(one.map, query, 2)} in ${one.name}`).join("; ")}`;
  };
  const showReadout = () => {
    const blocks = view.map.blocks ? ` A thumbnail of ${view.map.rows} × ${view.map.cols} blocks: this layer's weights were not stored.` : "";
    hint.textContent = HINTS[app.state.view] + blocks;
    const text = readoutText();
    if (readout.textContent !== text) readout.textContent = text;
  };
  // The box in the canvas that the readout stands beside.
  const readBox = () => {
    if (app.state.view === "map") return readCell() && cellBox(current.layout, current.zoom, ...readCell());
    const query = readQuery();
    if (query === null || view.dimensions && app.state.view === "text") return null;
    if (app.state.view === "lines") return lineBox(current.layout, current.scroll, query);
    return passageBox(current.layout.queries ?? current.layout.keys, query);
  };
  const placeReadout = () => {
    const box = readout.textContent && readBox();
    if (!box) return;
    const follow = app.follow && index === app.state.active;
    placeBeside(readout, box, { scroller, node, follow });
    if (follow) app.follow = false;
  };

  const render = async () => {
    const { version } = app;
    controls();
    const next = await shown(app, pane());
    if (version !== app.version) return false;
    view = next;
    canvas.hidden = !view;
    if (!view) {
      hint.textContent = `${describe(app, pane())} has no ${app.state.kind} attention.`;
      readout.textContent = "";
      return true;
    }
    const { linear, shared } = app.state;
    const [map, colours] = [view.map, app.palette()];
    const scale = { top: (shared && app.sharedTop) || map.top, linear };
    // Painted when needed: of a very long text only the coarse picture, until the user zooms in.
    const once = (build) => { let built = null; return () => built ??= build(); };
    view.fine = once(() => paint(map, colours, scale));
    view.coarse = once(() => Math.max(map.rows, map.cols) > COARSE ? paint(shrunk(map, COARSE), colours, scale) : view.fine());
    const heads = view.lined.length > 1 ? view.lined.map((one) => one.name).join("; ") : view.headTitle;
    canvas.setAttribute("aria-label", `${view.title}, ${heads}, as ${app.state.view}. The table of numbers below has the weights.`);
    return true;
  };

  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const queryAt = (x, y) => {
    if (app.state.view === "lines") {
      const row = lineRowAt(current.layout, current.scroll, view, x, y);
      return row?.side === "rows" ? row.i : null;
    }
    const { queries, keys, over, selfAttention } = current.layout;
    const at = selfAttention ? passageAt(keys, x, y - over) : queries ? passageAt(queries, x, y) : -1;
    return at >= 0 ? at : null;
  };
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (app.state.view !== "map" || app.state.zoom.s <= 1) return;
    drag = { from: point(event), zoom: current.zoom, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!current || !view) return;
    const [x, y] = point(event);
    if (drag) {
      const size = current.layout.cell * drag.zoom.s;
      const [dx, dy] = [x - drag.from[0], y - drag.from[1]];
      drag.moved ||= Math.hypot(dx, dy) > 4;
      if (drag.moved) app.set({ zoom: { ...drag.zoom, x: drag.zoom.x - dx / size, y: drag.zoom.y - dy / size } }, "draw");
      return;
    }
    if (app.state.view === "map") app.setHover(cellAt(current.layout, current.zoom, view.map.rows, view.map.cols, x, y));
    else app.setHoverQuery(queryAt(x, y));
  });
  canvas.addEventListener("pointerup", () => { if (drag && !drag.moved) drag = null; });
  canvas.addEventListener("pointerleave", () => { app.setHover(null); app.setHoverQuery(null); });
  canvas.addEventListener("click", (event) => {
    const moved = drag?.moved;
    drag = null;
    if (moved || !current || !view) return;
    const [x, y] = point(event);
    if (app.state.view === "map") {
      const at = cellAt(current.layout, current.zoom, view.map.rows, view.map.cols, x, y);
      const same = at && at[0] === app.state.q && at[1] === app.state.k;
      app.set({ q: at && !same ? at[0] : null, k: at && !same ? at[1] : null, active: index });
    } else {
      const query = queryAt(x, y);
      app.set({ q: query === app.state.q ? null : query, k: null, active: index });
    }
  });
  canvas.addEventListener("wheel", (event) => {
    if (app.state.view === "lines" && current && current.layout.content > current.layout.height) {
      const most = current.layout.content - current.layout.height;
      const next = Math.max(0, Math.min(most, app.scroll + event.deltaY));
      if (next !== app.scroll) {
        event.preventDefault();
        app.scroll = next;
        draw();
      }
    } else if (app.state.view === "map" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      const [x, y] = point(event);
      zoomAt(Math.exp(-event.deltaY / 240), x, y);
    }
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => { if (app.state.view === "map") zoomAt(event.shiftKey ? 0.5 : 2, ...point(event)); });

  // The cell under (x, y) stays where it is.
  const zoomAt = (factor, x, y) => {
    const { layout, zoom } = current;
    const s = Math.max(1, zoom.s * factor);
    const [u, v] = [(x - layout.left) / layout.cell, (y - layout.over) / layout.cell];
    app.set({ zoom: fit({ s, x: zoom.x + u / zoom.s - u / s, y: zoom.y + v / zoom.s - v / s }, view.map.rows, view.map.cols) }, "draw");
  };
  const zoomBy = (factor) => current?.zoom && zoomAt(factor, current.layout.left + current.layout.width / 2, current.layout.over + current.layout.height / 2);

  // Move the zoomed part such that it contains a cell.
  const reveal = (i, j) => {
    if (app.state.view !== "map" || app.state.zoom.s <= 1 || !view) return;
    const { s, x, y } = fit(app.state.zoom, view.map.rows, view.map.cols);
    const [wide, high] = [view.map.cols / s, view.map.rows / s];
    const into = (at, start, length) => at === null ? start : at < start ? at : at + 1 > start + length ? at + 1 - length : start;
    app.state.zoom = { s, x: into(j, x, wide), y: into(i, y, high) };
  };

  const title = () => paneTitle(app, pane());
  return { node, canvas, render, draw, zoomBy, reveal, sheet, title, view: () => view, place: () => placeOf(app, pane()) };
};
