import { make, measured, number } from "./dom.js";
import { largestPairs } from "./lines.js";
import { itemOf } from "./maps.js";

// The numbers of the pictures as tables; only the visible rows are in the document.

const ROW = 30;

// columns: { title, help, value(row), text(row), bar(row) }; sorting is by value, missing values last in both directions.
export const longTable = ({ label, onrow, tall = 12 }) => {
  const body = make("tbody");
  const head = make("thead");
  const table = make("table", { "aria-label": label }, head, body);
  const box = make("div", { class: "x-rows", tabindex: "0", role: "region", "aria-label": label }, table);
  box.style.maxHeight = `${ROW * (tall + 1) + 6}px`;
  let [columns, rows, order, sort, chosen] = [[], [], [], null, null];

  const compare = (a, b) => {
    const [x, y] = [a, b].map((row) => columns[sort.column].value(row));
    const missing = (value) => value === null || value === undefined || Number.isNaN(value);
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    return sort.sign * (typeof x === "string" || typeof y === "string" ? String(x).localeCompare(String(y), undefined, { numeric: true }) : x - y);
  };
  const arrange = () => {
    order = sort && columns[sort.column] ? rows.slice().sort(compare) : rows.slice();
    table.setAttribute("aria-rowcount", String(order.length + 1));
  };
  const mark = (row) => chosen?.(row) ? { "aria-selected": "true", class: "x-chosen" } : {};
  const rowNode = (row, at) => make("tr", { "aria-rowindex": at + 2, ...mark(row), onclick: onrow ? () => onrow(row) : null },
    columns.map((column) => {
      const text = column.text(row);
      const bar = column.bar?.(row);
      const cell = make("td", { class: typeof column.value(row) === "string" ? "" : "number" }, bar === undefined ? text : make("span", { class: "barred" }, text));
      if (bar !== undefined) cell.firstChild.style.setProperty("--bar", String(Math.max(0, Math.min(1, bar || 0))));
      return cell;
    }));
  const fill = () => {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 3);
    const last = Math.min(order.length, first + tall + 7);
    const space = (count) => {
      const row = make("tr", { "aria-hidden": "true", class: "x-space" }, make("td", { colspan: columns.length }));
      row.firstChild.style.height = `${count * ROW}px`;
      return count > 0 ? row : null;
    };
    body.replaceChildren(...[space(first), ...order.slice(first, last).map((row, i) => rowNode(row, first + i)), space(order.length - last)].filter(Boolean));
  };
  const heading = () => head.replaceChildren(make("tr", {}, columns.map((column, i) => {
    const state = sort?.column === i ? (sort.sign > 0 ? "ascending" : "descending") : "none";
    const press = () => {
      const sign = sort?.column === i ? -sort.sign : 1;
      sort = { column: i, sign };
      arrange();
      heading();
      box.scrollTop = 0;
      fill();
      head.querySelectorAll("button")[i].focus();
    };
    const numeric = rows.length > 0 && rows.every((row) => typeof column.value(row) !== "string");
    return make("th", { scope: "col", class: numeric ? "number" : null, "aria-sort": state, title: column.help }, make("button", { type: "button", onclick: press }, column.title));
  })));
  box.addEventListener("scroll", fill);

  // show(columns, rows, isChosen): the order stays while the columns stay the same.
  const show = (nextColumns, nextRows, isChosen) => {
    if (nextColumns.map((c) => c.title).join("|") !== columns.map((c) => c.title).join("|")) sort = null;
    [columns, rows, chosen] = [nextColumns, nextRows, isChosen];
    arrange();
    heading();
    fill();
  };
  const reveal = () => {
    const at = order.findIndex((row) => chosen?.(row));
    if (at < 0) return;
    const top = at * ROW;
    if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 2 * ROW) box.scrollTop = Math.max(0, top - ROW * 4);
    fill();
  };
  return { node: box, show, reveal };
};

export const headRows = (app) => {
  const item = itemOf(app, app.state.panes[app.state.active]);
  const stack = app.data.stack(item, app.state.kind);
  if (!stack) return { columns: [], rows: [] };
  const columnOf = Object.fromEntries(app.meta.columns.map((column) => [column.key, column]));
  const place = (name) => app.meta.columns.findIndex((column) => column.key === name);
  const names = Object.keys(stack.statistics).sort((a, b) => place(a) - place(b));
  const rows = stack.layers.flatMap((number_, layer) => Array.from({ length: stack.headCount }, (_, head) => (
    { layer, head, number: number_, ...Object.fromEntries(names.map((name) => [name, stack.statistics[name][layer]?.[head] ?? null])) })));
  const plain = (key, title, help) => ({ title, help, value: (row) => row[key], text: (row) => String(row[key]) });
  const columns = [plain("number", "layer", "From 0, as the model counts"), plain("head", "head", "From 0"), ...names.map((name) => ({
    title: columnOf[name]?.title ?? name, help: columnOf[name]?.help ?? "", value: (row) => row[name],
    text: (row) => typeof row[name] === "string" ? row[name] : number(row[name], 3),
  }))];
  return { columns, rows };
};

// Where the chosen token looks, in every pane; without one, the largest weights of the head.
export const weightRows = (app, views) => {
  const seen = views.filter((view) => view && !view.dimensions);
  const first = seen[0];
  if (!first) return { columns: [], rows: [], caption: "" };
  const { q } = app.state;
  const chosen = q !== null && q < first.rows.length;
  const same = seen.filter((view) => view.map.rows === first.map.rows && view.map.cols === first.map.cols);
  const pairs = chosen ? Array.from({ length: first.map.cols }, (_, j) => [q, j]) : largestPairs(first.map, 200).map(([i, j]) => [i, j]);
  const rows = pairs.map(([i, j]) => ({ i, j, weights: same.map((view) => view.map.values[i * view.map.cols + j]) }));
  const columns = [
    ...(chosen ? [] : [{ title: "from", value: (row) => first.rows[row.i], text: (row) => `${first.rows[row.i]} (${row.i})` }]),
    { title: chosen ? "looks at" : "to", value: (row) => first.cols[row.j], text: (row) => `${first.cols[row.j]} (${row.j})` },
    ...same.map((view, at) => ({
      title: same.length > 1 ? view.title : "weight", help: view.title, value: (row) => row.weights[at], text: (row) => measured(row.weights[at], view.map.error).split(" ± ")[0],
      bar: (row) => Math.abs(row.weights[at]) / (view.map.top || 1),
    })),
  ];
  const caption = chosen ? `Where “${first.rows[q]}” (${q}) looks` : "The largest weights of this head";
  if (chosen) rows.sort((a, b) => Math.abs(b.weights[0]) - Math.abs(a.weights[0]));
  return { columns, rows, caption };
};

// The weight that queries give to each type of token: this head, the mean of its layer, the mean of all heads.
export const typeRows = (app) => {
  const pane = app.state.panes[app.state.active];
  const item = itemOf(app, pane);
  const stack = app.data.stack(item, app.state.kind);
  const reading = stack?.readingOf[pane.reading];
  const keys = stack && app.data.text(item, stack.keys);
  const layer = Math.min(app.state.layer, (stack?.layers.length ?? 1) - 1);
  const shares = reading?.layers.map((entry) => entry.types ?? null);
  if (!shares?.[layer] || !keys.types) return { columns: [], rows: [] };
  const head = Math.min(app.state.head, shares[layer].length - 1);
  const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;
  const rows = app.meta.typeNames.map((name, t) => ({
    name, tokens: keys.types.filter((type) => type === t).length, head: shares[layer][head][t],
    layer: mean(shares[layer].map((row) => row[t])), all: mean(shares.flat().map((row) => row[t])),
  })).filter((row) => row.tokens);
  const top = Math.max(...rows.flatMap((row) => [row.head, row.layer, row.all].map(Math.abs)));
  const share = (key, title, help) => ({ title, help, value: (row) => row[key], text: (row) => number(row[key], 3), bar: (row) => Math.abs(row[key]) / (top || 1) });
  const columns = [
    { title: "type", value: (row) => row.name, text: (row) => row.name },
    { title: "tokens", help: "How many tokens of the type there are", value: (row) => row.tokens, text: (row) => String(row.tokens) },
    share("head", "this head", "Weight that a query gives to the type's tokens together, averaged over queries"),
    share("layer", "its layer", "The same, averaged over the layer's heads"),
    share("all", "all heads", "The same, averaged over all heads"),
  ];
  return { columns, rows };
};
