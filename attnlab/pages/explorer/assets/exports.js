import { make } from "./dom.js";
import { csvOf, save } from "./files.js";
import { headRows, typeRows } from "./tables.js";
import { strongest } from "./lines.js";
import { FONT, SvgSurface } from "./surface.js";

// The view as a file: PNG and SVG for papers, CSV and JSON for computing.

const GAP = 24;
const LEGEND_ROW = 18;

// The colours of several heads' lines, four names a row.
const drawLegend = (context, palette, lined) => {
  lined.forEach((one, i) => {
    const [x, y] = [(i % 4) * 140, 50 + Math.floor(i / 4) * LEGEND_ROW];
    context.fillStyle = palette[`cat-${one.colour}`];
    context.fillRect(x, y + 4, 10, 10);
    context.fillStyle = palette.text;
    context.fillText(one.name, x + 15, y + 9);
  });
};
const legendHeight = (view) => view.lined.length > 1 ? Math.ceil(view.lined.length / 4) * LEGEND_ROW : 0;

// The panes side by side, each with its title, on any surface.
const poster = (app, surfaceOf) => {
  const palette = app.palette();
  const panes = app.paneViews.filter((pane) => pane.view());
  const width = Math.max(...panes.map((pane) => pane.canvas.clientWidth)) || 600;
  const sheets = panes.map((pane) => pane.sheet(width, 860));
  const legend = Math.max(...panes.map((pane) => legendHeight(pane.view())));
  const total = [GAP + sheets.length * (width + GAP), Math.max(...sheets.map((sheet) => sheet.height)) + 62 + legend];
  const context = surfaceOf(...total);
  context.fillStyle = palette.card;
  context.fillRect(0, 0, ...total);
  sheets.forEach((sheet, i) => {
    context.save();
    context.translate(GAP + i * (width + GAP), 0);
    context.fillStyle = palette.text;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.font = `600 14px ${FONT}`;
    context.fillText(panes[i].title(), 0, 20);
    context.fillStyle = palette.muted;
    context.font = `12px ${FONT}`;
    context.fillText(`${app.meta.title} · ${app.state.kind} ${panes[i].view().headTitle}`, 0, 39);
    if (legend) drawLegend(context, palette, panes[i].view().lined);
    context.translate(0, 54 + legend);
    sheet.draw(context);
    context.restore();
  });
  return context;
};

const svgText = (app) => String(poster(app, (width, height) => new SvgSurface(width, height)));
const pngBlob = (app) => {
  const canvas = document.createElement("canvas");
  poster(app, (width, height) => {
    const dots = Math.min(3, 8000 / Math.max(width, height));
    canvas.width = Math.round(width * dots);
    canvas.height = Math.round(height * dots);
    const context = canvas.getContext("2d");
    context.scale(dots, dots);
    return context;
  });
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
};

// The pairs that are shown: all of the head's, or in the view of lines the drawn ones.
const shownTable = (app) => {
  const views = app.paneViews.map((pane) => pane.view()).filter(Boolean);
  const columns = ["pane", "kind", "layer", "head", "query", "query token", views[0].dimensions ? "dimension" : "key", "key token", "weight"];
  const rows = [];
  for (const view of views) {
    const { place } = view;
    const lines = app.state.view === "lines";
    const query = app.state.q !== null && app.state.q < view.map.rows ? app.state.q : null;
    for (const { map, number, head } of lines ? view.lined : [{ map: view.map, number: place.number, head: place.head }]) {
      const where = [view.title, app.state.kind, number, head];
      const weight = (i, j) => Number(map.values[i * map.cols + j].toPrecision(7));
      const addRow = (i, j) => rows.push([...where, i, view.rows[i], j, view.dimensions ? "" : view.cols[j], weight(i, j)]);
      if (lines) for (const [i, j] of strongest(map, app.state.mass, query)) addRow(i, j);
      else for (let i = 0; i < map.rows; i++) for (let j = 0; j < map.cols; j++) addRow(i, j);
    }
  }
  return { columns, rows };
};

const tableOf = ({ columns, rows }) => ({ columns: columns.map((c) => c.title), rows: rows.map((row) => columns.map((c) => c.value(row) ?? null)) });
const rowsOf = ({ rows, cols, values }) => Array.from({ length: rows }, (_, i) => (
  Array.from(values.subarray(i * cols, (i + 1) * cols), (w) => Number.isFinite(w) ? Number(w.toPrecision(7)) : null)));
const shownJson = (app) => ({
  title: app.meta.title, link: app.fragment(), kind: app.state.kind, view: app.state.view, words: app.state.words,
  panes: app.paneViews.map((pane) => pane.view()).filter(Boolean).map((view) => ({
    shown: view.title, layer: view.place.number, head: view.place.head, error: view.map.error, blocks: Boolean(view.map.blocks),
    queries: view.rows, keys: view.dimensions ? null : view.cols, weights: rowsOf(view.map),
  })),
  heads: tableOf(headRows(app)),
  types: tableOf(typeRows(app)),
  about: app.meta.about,
});

export const exportMenu = (app) => {
  const name = (ending) => `attention-${app.state.kind}-${app.paneViews[0].place()?.number ?? 0}-${app.state.head}.${ending}`;
  const text = (kind, content) => new Blob([content], { type: `${kind};charset=utf-8` });
  const kinds = {
    PNG: async () => save(name("png"), await pngBlob(app)),
    SVG: () => save(name("svg"), text("image/svg+xml", svgText(app))),
    CSV: () => save(name("csv"), text("text/csv", csvOf(shownTable(app)))),
    JSON: () => save(name("json"), text("application/json", JSON.stringify(shownJson(app), null, 1))),
    heads: () => save("heads.csv", text("text/csv", csvOf(tableOf(headRows(app))))),
  };
  const titles = { PNG: "A picture of what is shown", SVG: "The same, for papers", CSV: "The weights on show", JSON: "Weights, statistics and how they were made", heads: "The table of heads as CSV" };
  return make("span", { class: "downloads", role: "group", "aria-label": "Download" },
    Object.entries(kinds).map(([kind, run]) => make("button", { type: "button", "data-export": kind.toLowerCase(), title: titles[kind], onclick: run }, kind === "heads" ? "Heads" : kind)));
};
