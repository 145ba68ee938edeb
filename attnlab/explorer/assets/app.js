import { paletteOf } from "./colour.js";
import { Payload } from "./data.js";
import { choice, make, number, options } from "./dom.js";
import { exportMenu } from "./exports.js";
import { gridView, initials } from "./grid.js";
import { helpDialog, onKey } from "./keys.js";
import { itemOf, mergesWords, paneMap, placeOf } from "./maps.js";
import { paneView } from "./pane.js";
import { firstState, fromFragment, toFragment } from "./state.js";
import { timelineView } from "./timeline.js";
import { headRows, longTable, typeRows, weightRows } from "./tables.js";

// The explorer: one state, and views that draw it. A change of state draws all of them again, once per frame.

const MOST_PANES = 3;

export const mount = (host, root, meta, read, { linked = false } = {}) => {
  const data = new Payload(meta, read);
  const timeline = meta.items.length > 1 && meta.items.every((item) => item.step !== null);
  let state = firstState(meta);
  const app = {
    data, meta, hover: null, hoverQuery: null, scroll: 0, theme: "", version: 0, paneViews: [], sharedTop: 0,
    get state() { return state; },
    palette: () => colours,
    windowHeight: () => globalThis.innerHeight || 900,
    fragment: () => toFragment(state),
  };
  let colours = null;

  // What can be shown: every reading of every item, or in a run the readings at the step of the slider and at the first.
  app.specs = () => {
    const readings = (item) => (item.stackOf[state.kind] ?? item.stacks[0]).readings.map((reading) => reading.name);
    if (!timeline) return meta.items.flatMap((item, at) => readings(item).map((reading) => ({ item: at, reading })));
    const names = readings(meta.items[0]);
    return [null, 0, meta.items.length - 1].flatMap((item) => names.map((reading) => ({ item, reading })));
  };

  const normalise = () => {
    const kinds = kindsOf();
    if (!kinds.includes(state.kind)) state.kind = kinds[0];
    state.active = Math.min(state.active, state.panes.length - 1);
    state.step = Math.min(state.step, meta.items.length - 1);
    const stack = data.stack(itemOf(app, state.panes[state.active]), state.kind);
    if (!stack) return;
    state.layer = Math.min(state.layer, stack.layers.length - 1);
    state.head = Math.min(state.head, stack.headCount - 1);
  };
  const kindsOf = () => [...new Set(meta.items.flatMap((item) => item.stacks.map((stack) => stack.kind)))];

  let waiting = null;
  let rendering = false;
  let drawOnly = true;
  app.set = (patch, how = "render") => {
    state = { ...state, ...patch };
    normalise();
    drawOnly &&= how === "draw";
    // For whoever waits for the picture, such as a test.
    host.dataset.drawing = "";
    waiting ??= requestAnimationFrame(() => {
      const only = drawOnly;
      [waiting, drawOnly] = [null, true];
      if (only && !rendering) {
        app.paneViews.forEach((pane) => pane.draw());
        delete host.dataset.drawing;
      } else render();
      remember();
    });
  };
  app.setHover = (at) => {
    if (String(at) === String(app.hover)) return;
    app.hover = at;
    app.set({}, "draw");
  };
  app.setHoverQuery = (at) => {
    if (at === app.hoverQuery) return;
    app.hoverQuery = at;
    app.set({}, "draw");
  };
  let written = null;
  const remember = () => {
    if (!linked) return;
    const next = `#${toFragment(state)}`;
    if (next === written) return;
    written = next;
    clearTimeout(remember.timer);
    remember.timer = setTimeout(() => history.replaceState(null, "", next), 120);
  };

  app.showNumber = (i) => {
    const spec = app.specs()[i];
    if (spec) app.set({ panes: state.panes.map((pane, at) => at === state.active ? { ...pane, ...spec } : pane) });
  };
  app.toggleDifference = () => {
    const pane = state.panes[state.active];
    const first = app.specs()[0];
    const same = (a, b) => a.item === b.item && a.reading === b.reading;
    const other = same(pane, first) ? app.specs()[1] : first;
    if (!other) return;
    const next = pane.minus ? { ...pane, minus: null } : same(pane, first) ? { ...other, minus: first } : { ...pane, minus: first };
    app.set({ panes: state.panes.map((one, at) => at === state.active ? next : one) });
  };
  app.togglePanes = () => {
    if (state.panes.length >= MOST_PANES) return app.set({ panes: state.panes.slice(0, 1), active: 0 });
    const used = state.panes.map((pane) => JSON.stringify([pane.item, pane.reading]));
    const free = app.specs().find((spec) => !used.includes(JSON.stringify([spec.item, spec.reading]))) ?? app.specs()[0];
    return app.set({ panes: [...state.panes, { ...free, minus: null }], active: state.panes.length });
  };
  app.closePane = (index) => app.set({ panes: state.panes.filter((_, i) => i !== index), active: 0 });
  app.nextKind = () => {
    const kinds = kindsOf();
    app.set({ kind: kinds[(kinds.indexOf(state.kind) + 1) % kinds.length], q: null, k: null, zoom: { s: 1, x: 0, y: 0 } });
  };
  app.toggleWords = () => app.set({ words: !state.words, q: null, k: null, zoom: { s: 1, x: 0, y: 0 } });
  app.zoomBy = (factor) => app.paneViews[state.active]?.zoomBy(factor);
  app.focusSearch = () => { search.focus(); search.select(); };
  app.help = () => help.showModal();
  app.goStep = (by) => timeCard?.goStep(by);
  app.play = () => timeCard?.play();

  // The parts of the page.
  const theme = make("button", { type: "button", class: "theme", "aria-label": "Switch between light and dark", onclick: () => {
    host.dataset.theme = isDark() ? "light" : "dark";
    restyle();
  } }, "Dark");
  const isDark = () => getComputedStyle(host).colorScheme === "dark";
  const restyle = () => {
    colours = paletteOf(host);
    app.theme = isDark() ? "dark" : "light";
    theme.textContent = isDark() ? "Light" : "Dark";
    app.set({});
  };
  const search = make("input", { type: "search", placeholder: "Search a token", "aria-label": "Search a token", oninput: () => app.set({ search: search.value }, "draw"), onkeydown: (event) => {
    if (event.key === "Enter") nextHit();
    if (event.key === "Escape") { app.set({ search: "" }); search.blur(); }
  } });
  const found = make("span", { class: "x-found", "aria-live": "polite" });
  const nextHit = () => {
    const view = app.paneViews[state.active]?.view();
    const wanted = state.search.trim().toLowerCase();
    if (!view || !wanted) return;
    const hits = view.rows.flatMap((name, i) => name.toLowerCase().includes(wanted) ? [i] : []);
    if (!hits.length) return;
    const next = hits.find((i) => i > (state.q ?? -1)) ?? hits[0];
    app.set({ q: next, k: null });
    app.paneViews.forEach((pane) => pane.reveal(next, null));
  };
  const copy = make("button", { type: "button", title: "Copy the address of this view", onclick: async () => {
    history.replaceState(null, "", `#${toFragment(state)}`);
    try { await navigator.clipboard.writeText(location.href); copy.textContent = "Copied"; } catch { copy.textContent = "In the address bar"; }
    setTimeout(() => { copy.textContent = "Link"; }, 1500);
  } }, "Link");
  const help = helpDialog();
  const helpButton = make("button", { type: "button", "aria-label": "Keys", title: "Keys (?)", onclick: () => app.help() }, "?");

  const kinds = choice("Kind of attention", kindsOf().map((kind) => [kind, kind]), (kind) => app.set({ kind, q: null, k: null, zoom: { s: 1, x: 0, y: 0 } }));
  const views = choice("View", [["map", "Map", "One cell per pair of tokens (m)"], ["lines", "Lines", "Lines between tokens (l)"], ["text", "Text", "The text, coloured (t)"]], (view) => app.set({ view }));
  const tick = (label, name, title, change) => {
    const box = make("input", { type: "checkbox", onchange: () => change ? change() : app.set({ [name]: box.checked }) });
    return { node: make("label", { class: "x-tick", title }, box, label), box };
  };
  const words = tick("Words", "words", "Merge tokens into words: summed over keys, averaged over queries (w)", () => app.toggleWords());
  const shared = tick("One scale", "shared", "One colour scale for all heads of this reading, instead of one for each (c)");
  const linear = tick("Linear", "linear", "Colours in proportion to weights, instead of to their square root");
  const mass = make("input", { type: "range", min: "0.1", max: "1", step: "0.05", "aria-label": "Share of a token's attention that is drawn", oninput: () => app.set({ mass: Number(mass.value) }, "draw") });
  const massLabel = make("label", { class: "x-tick x-mass" }, "Top ", mass, make("span", { class: "x-mass-value" }));
  const beside = make("button", { type: "button", title: "Show another reading or text beside this one (b)", onclick: () => app.togglePanes() }, "Beside");
  const zoomButtons = make("span", { class: "tabs x-zoom", role: "group", "aria-label": "Zoom" },
    make("button", { type: "button", "aria-label": "Farther", title: "Farther (−)", onclick: () => app.zoomBy(1 / 1.6) }, "−"),
    make("button", { type: "button", "aria-label": "Closer", title: "Closer (+)", onclick: () => app.zoomBy(1.6) }, "+"),
    make("button", { type: "button", title: "The whole map (0)", onclick: () => app.set({ zoom: { s: 1, x: 0, y: 0 } }, "draw") }, "All"));

  const grid = gridView(app);
  const gridChoice = make("select", { "aria-label": "What the grid shows", onchange: () => app.set({ grid: gridChoice.value }) });
  const gridNote = make("p", { class: "note" });
  const headTitle = make("h2", { "aria-live": "polite" });
  const panes = make("div", { class: "x-panes" });
  const headFacts = make("p", { class: "x-facts" });
  const headTable = longTable({ label: "Heads", tall: 11, onrow: (row) => app.set({ layer: row.layer, head: row.head }) });
  const weightTable = longTable({ label: "Weights", tall: 9, onrow: (row) => app.set({ q: row.i, k: row.j }) });
  const weightTitle = make("h2", {});
  const typeTable = longTable({ label: "Token types", tall: 9 });
  const typeCard = make("section", { class: "card x-types" }, make("h2", {}, "By type of token"), typeTable.node,
    make("p", { class: "note" }, "The weight that a token's type receives: summed over its tokens, averaged over the tokens that look."));

  const timeCard = timeline ? timelineView(app) : null;

  const error = meta.precise ? "Weights are stored in half precision (three to four digits)."
    : `Weights are stored in 8 bits with a scale for each head; a number is off by at most ${number(meta.error, 2)} here, and the readout says by how much in the head on show.`;
  const about = make("details", { class: "card x-about" }, make("summary", {}, "About this page"),
    make("p", {}, error, " Thumbnails of long texts show what a block of tokens gives to another block: weights summed over keys, averaged over queries. Nothing on this page is loaded from elsewhere, and nothing leaves it."),
    make("dl", { class: "facts" }, Object.entries(meta.about).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value))))));
  const notes = meta.notes.map((note) => make("p", { class: "note x-note" }, note));

  const main = make("div", { class: "x-main" },
    make("div", { class: "x-column x-side" },
      make("section", { class: "card x-left" }, make("div", { class: "x-card-bar" }, make("h2", {}, "All heads"), gridChoice), make("div", { class: "x-canvas" }, grid.node), gridNote),
      make("section", { class: "card x-table" }, make("h2", {}, "Heads"), headTable.node),
      typeCard),
    make("div", { class: "x-column x-front" },
      make("section", { class: "card x-head" },
        make("div", { class: "x-card-bar" }, headTitle, exportMenu(app)),
        make("div", { class: "x-tools" }, kindsOf().length > 1 ? kinds.node : null, views.node, beside, words.node, shared.node, linear.node, massLabel, zoomButtons),
        headFacts, panes),
      make("section", { class: "card x-weights" }, weightTitle, weightTable.node)));
  root.classList.add("x-root");
  root.append(
    make("header", { class: "masthead" }, make("span", { class: "brand" }, make("span", { class: "logo", "aria-hidden": "true" }), "attnlab"),
      make("span", { class: "subtitle" }, make("strong", {}, meta.title), meta.subtitle ? ` ${meta.subtitle}` : ""), search, found, linked ? copy : null, helpButton, theme),
    make("main", { class: "x-page" },
      notes,
      timeCard?.node,
      main,
      about),
    help);

  const gridOptions = (stack) => {
    const told = Object.fromEntries(meta.columns.map((column) => [column.key, column.title]));
    options(gridChoice, [["maps", "maps"], ...Object.keys(stack.statistics).map((name) => [name, told[name] ?? name])], stack.statistics[state.grid] ? state.grid : "maps");
    gridChoice.hidden = !Object.keys(stack.statistics).length;
  };

  const controls = () => {
    kinds.show(state.kind);
    views.show(state.view);
    words.box.checked = state.words;
    shared.box.checked = state.shared;
    linear.box.checked = state.linear;
    mass.value = String(state.mass);
    massLabel.hidden = state.view !== "lines";
    massLabel.lastChild.textContent = `${Math.round(100 * state.mass)} %`;
    zoomButtons.hidden = state.view !== "map";
    beside.textContent = state.panes.length >= MOST_PANES ? "One pane" : "Beside";
    beside.hidden = app.specs().length < 2;
    if (search.value !== state.search) search.value = state.search;
    const stack = data.stack(itemOf(app, state.panes[state.active]), state.kind);
    if (stack) gridOptions(stack);
    const text = stack && data.text(itemOf(app, state.panes[state.active]), stack.queries);
    words.node.hidden = !text || ![text, data.text(itemOf(app, state.panes[state.active]), stack.keys)].some(mergesWords);
    const wanted = state.search.trim().toLowerCase();
    const view = app.paneViews[state.active]?.view();
    const hits = wanted && view ? [...view.rows].filter((name) => name.toLowerCase().includes(wanted)).length : 0;
    found.textContent = wanted ? `${hits} found` : "";
    gridNote.textContent = state.grid === "maps" ? "A row per layer, a column per head. Click one, or walk with the arrow keys." : `${meta.columns.find((column) => column.key === state.grid)?.help ?? ""}${wordsOf(stack)}`;
  };
  // What the letters in the grid stand for.
  const wordsOf = (stack) => {
    const words = [...new Set((stack?.statistics[state.grid] ?? []).flat().filter((value) => typeof value === "string"))].sort();
    return words.length ? `: ${words.map((word) => `${initials(word)} ${word}`).join(", ")}` : "";
  };

  const facts = () => {
    const place = placeOf(app, state.panes[state.active]);
    if (!place) return "";
    const told = meta.columns.flatMap(({ key, title }) => {
      const value = place.stack.statistics[key]?.[place.layer]?.[place.head];
      return value === null || value === undefined ? [] : [`${title} ${typeof value === "string" ? value : number(value, 3)}`];
    });
    return told.join(" · ");
  };

  const render = async () => {
    const asked = ++app.version;
    rendering = true;
    while (app.paneViews.length > state.panes.length) app.paneViews.pop().node.remove();
    while (app.paneViews.length < state.panes.length) {
      const view = paneView(app, app.paneViews.length);
      app.paneViews.push(view);
      panes.append(view.node);
    }
    panes.dataset.count = main.dataset.panes = String(state.panes.length);
    if (state.shared) await findSharedTop();
    await Promise.all(app.paneViews.map((pane) => pane.render()));
    if (asked !== app.version) return;
    app.paneViews.forEach((pane) => pane.draw());
    controls();
    const place = placeOf(app, state.panes[state.active]);
    headTitle.textContent = app.paneViews[state.active].view()?.headTitle.replace(/^l/, "L") ?? `Layer ${place?.number ?? 0}`;
    headFacts.textContent = facts();
    timeCard?.draw();
    await grid.render();
    if (asked !== app.version) return;
    drawTables();
    rendering = false;
    host.dataset.drawn = String(asked);
    delete host.dataset.drawing;
  };

  const drawTables = () => {
    const heads = headRows(app);
    headTable.show(heads.columns, heads.rows, (row) => row.layer === state.layer && row.head === state.head);
    headTable.reveal();
    const weights = weightRows(app, app.paneViews.map((pane) => pane.view()));
    weightTitle.textContent = weights.caption;
    weightTable.show(weights.columns, weights.rows, (row) => row.i === state.q && row.j === state.k);
    const types = typeRows(app);
    typeCard.hidden = !types.rows.length;
    if (types.rows.length) typeTable.show(types.columns, types.rows);
  };

  const findSharedTop = async () => {
    const pane = state.panes[state.active];
    const reading = placeOf(app, pane)?.reading;
    if (!reading) return;
    const scales = pane.minus || meta.precise ? null : reading.layers.map((entry) => Math.max(...(entry.full ?? entry.small).scales) * (entry.signed ? 127 : 254));
    if (scales) {
      app.sharedTop = Math.max(...scales);
      return;
    }
    const tops = await Promise.all(reading.layers.flatMap((entry, layer) => entry.small.scales.map((_, head) => paneMap(app, pane, layer, head, true))));
    app.sharedTop = Math.max(...tops.map((map) => map.top));
  };

  const keyTarget = linked ? document : host;
  keyTarget.addEventListener("keydown", (event) => {
    onKey(app, event);
    // What was a key of ours is none of the notebook's.
    if (event.defaultPrevented && !linked) event.stopPropagation();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
  new ResizeObserver(() => app.set({})).observe(panes);
  const restore = () => {
    if (location.hash === written) return;
    state = fromFragment(location.hash, firstState(meta), data);
    normalise();
    app.set({});
  };
  if (linked) {
    addEventListener("hashchange", restore);
    restore();
  }
  restyle();
  return app;
};
