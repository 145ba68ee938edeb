import { make, number, options } from "./dom.js";
import { gridView, initials } from "./grid.js";
import { itemOf } from "./maps.js";
import { headRows, longTable, typeRows, weightRows } from "./tables.js";

// The cards around the head: the grid of all heads, and the tables.

const card = (name, ...children) => make("section", { class: `card x-${name}` }, ...children);

export const gridCard = (app) => {
  const grid = gridView(app);
  const select = make("select", { "aria-label": "What the grid shows", onchange: () => app.set({ grid: select.value }) });
  const note = make("p", { class: "note" });
  const node = card("left", make("div", { class: "x-card-bar" }, make("h2", {}, "All heads"), select), make("div", { class: "x-canvas" }, grid.node), note);
  const columnOf = Object.fromEntries(app.meta.columns.map((column) => [column.key, column]));
  const draw = async () => {
    const stack = app.data.stack(itemOf(app, app.state.panes[app.state.active]), app.state.kind);
    const names = Object.keys(stack?.statistics ?? {});
    const chosen = names.includes(app.state.grid) ? app.state.grid : "maps";
    options(select, [["maps", "maps"], ...names.map((name) => [name, columnOf[name]?.title ?? name])], chosen);
    select.hidden = !names.length;
    // What the letters in the grid stand for.
    const words = [...new Set((stack?.statistics[chosen] ?? []).flat().filter((value) => typeof value === "string"))].sort();
    const letters = words.length ? `: ${words.map((word) => `${initials(word)} ${word}`).join(", ")}` : "";
    note.textContent = chosen === "maps" ? "A row per layer, a column per head. Click one, or walk with the arrow keys." : `${columnOf[chosen]?.help ?? ""}${letters}`;
    await grid.render();
  };
  return { node, draw };
};

export const headsCard = (app) => {
  const table = longTable({ label: "Heads", tall: 11, onrow: (row) => app.set({ layer: row.layer, head: row.head }) });
  const draw = () => {
    const { columns, rows } = headRows(app);
    table.show(columns, rows, (row) => row.layer === app.state.layer && row.head === app.state.head);
    table.reveal();
  };
  return { node: card("table", make("h2", {}, "Heads"), table.node), draw };
};

export const weightsCard = (app) => {
  const table = longTable({ label: "Weights", tall: 9, onrow: (row) => app.set({ q: row.i, k: row.j }) });
  const title = make("h2", {});
  const draw = () => {
    const { columns, rows, caption } = weightRows(app, app.paneViews.map((pane) => pane.view()));
    title.textContent = caption;
    table.show(columns, rows, (row) => row.i === app.state.q && row.j === app.state.k);
  };
  return { node: card("weights", title, table.node), draw };
};

export const typesCard = (app) => {
  const table = longTable({ label: "Token types", tall: 9 });
  const note = make("p", { class: "note" }, "The weight that a token's type receives: summed over its tokens, averaged over the tokens that look.");
  const node = card("types", make("h2", {}, "By type of token"), table.node, note);
  const draw = () => {
    const { columns, rows } = typeRows(app);
    node.hidden = !rows.length;
    if (rows.length) table.show(columns, rows);
  };
  return { node, draw };
};

export const aboutCard = ({ precise, error, about }) => {
  const stored = precise ? "Weights are stored in half precision (three to four digits)."
    : `Weights are stored in 8 bits with a scale for each head; a number is off by at most ${number(error, 2)} here, and the readout says by how much in the head on show.`;
  const facts = Object.entries(about).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value))));
  return make("details", { class: "card x-about" }, make("summary", {}, "About this page"),
    make("p", {}, stored, " Thumbnails of long texts show what a block of tokens gives to another block: weights summed over keys, ",
      "averaged over queries. Nothing on this page is loaded from elsewhere, and nothing leaves it."),
    make("dl", { class: "facts" }, facts));
};
