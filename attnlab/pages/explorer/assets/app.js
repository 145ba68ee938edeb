import { addActions } from "./actions.js";
import { aboutCard, gridCard, headsCard, typesCard, weightsCard } from "./cards.js";
import { paletteOf } from "./colour.js";
import { linesLegend, masthead, toolbar } from "./controls.js";
import { Payload } from "./data.js";
import { make, number, onNewWidth } from "./dom.js";
import { exportMenu } from "./exports.js";
import { helpDialog, onKey } from "./keys.js";
import { itemOf, paneMap, placeOf } from "./maps.js";
import { paneView } from "./pane.js";
import { firstState, fromFragment, setAddress, toFragment } from "./state.js";
import { timelineView } from "./timeline.js";

// The explorer: one state, and views that draw it. A change of state draws all of them again, once per frame.

export const mount = (host, root, meta, read, { linked = false } = {}) => {
  const data = new Payload(meta, read);
  let state = firstState(meta);
  let colours = null;
  const app = {
    host, data, meta, hover: null, hoverQuery: null, follow: false, scroll: 0, theme: "", version: 0, paneViews: [], sharedTop: 0,
    timeline: meta.items.length > 1 && meta.items.every((item) => item.step !== null),
    get state() { return state; },
    palette: () => colours,
    windowHeight: () => globalThis.innerHeight || 900,
    fragment: () => toFragment(state),
  };

  // Layer, head, step and pane are clamped to those that exist.
  const normalise = () => {
    if (!app.kinds().includes(state.kind)) state.kind = app.kinds()[0];
    state.active = Math.min(state.active, state.panes.length - 1);
    state.step = Math.min(state.step, meta.items.length - 1);
    const stack = data.stack(itemOf(app, state.panes[state.active]), state.kind);
    if (!stack) return;
    state.layer = Math.min(state.layer, stack.layers.length - 1);
    state.head = Math.min(state.head, stack.headCount - 1);
  };
  let frame = null;
  let rendering = false;
  let drawOnly = true;
  app.set = (patch, how = "render") => {
    state = { ...state, ...patch };
    normalise();
    drawOnly &&= how === "draw";
    // Tests wait until this attribute is gone.
    host.dataset.drawing = "";
    frame ??= requestAnimationFrame(() => {
      const only = drawOnly;
      [frame, drawOnly] = [null, true];
      if (only && !rendering) {
        app.paneViews.forEach((pane) => pane.draw());
        delete host.dataset.drawing;
      } else render();
      updateAddress();
    });
  };
  let [written, timer] = [null, null];
  const updateAddress = () => {
    const next = `#${toFragment(state)}`;
    if (!linked || next === written) return;
    written = next;
    clearTimeout(timer);
    timer = setTimeout(() => setAddress(toFragment(state)), 120);
  };
  addActions(app);

  const isDark = () => getComputedStyle(host).colorScheme === "dark";
  const restyle = () => {
    colours = paletteOf(host);
    app.theme = isDark() ? "dark" : "light";
    app.set({});
  };
  const help = helpDialog();
  app.help = () => help.showModal();
  const timeCard = app.timeline ? timelineView(app) : null;
  app.goStep = (by) => timeCard?.goStep(by);
  app.play = () => timeCard?.play();

  const header = masthead(app, { linked, restyle, isDark, help: app.help });
  const [tools, legend] = [toolbar(app), linesLegend(app)];
  const [grid, heads, types, weights] = [gridCard(app), headsCard(app), typesCard(app), weightsCard(app)];
  const title = make("h2", { "aria-live": "polite" });
  const facts = make("p", { class: "x-facts" });
  const why = make("p", { class: "x-facts x-why" });
  const panes = make("div", { class: "x-panes" });
  const head = make("section", { class: "card x-head" }, make("div", { class: "x-card-bar" }, title, exportMenu(app)), why, tools.node, legend.node, facts, panes);
  const main = make("div", { class: "x-main" },
    make("div", { class: "x-column x-side" }, grid.node, types.node),
    make("div", { class: "x-column x-front" }, head, weights.node, heads.node));
  const notes = meta.notes.map((note) => make("p", { class: "note x-note" }, note));
  root.classList.add("x-root");
  root.append(header.node, make("main", { class: "x-page" }, notes, timeCard?.node, main, aboutCard(meta)), help);

  const factsOf = (place) => meta.columns.flatMap(({ key, title: name }) => {
    const value = place?.stack.statistics[key]?.[place.layer]?.[place.head];
    return value === null || value === undefined ? [] : [`${name} ${typeof value === "string" ? value : number(value, 3)}`];
  }).join(" · ");

  // Why the page opens on this head; nothing for the others.
  const reason = () => {
    const { kind, layer, head: at, share } = meta.opens;
    if (!share || state.kind !== kind || state.layer !== layer || state.head !== at) return "";
    return `Shown first because it depends most on what the tokens are: a token gives ${number(share, 2)} to one other, `
      + "beyond what that one, or any at that distance, receives anyway.";
  };

  const matchPanes = () => {
    while (app.paneViews.length > state.panes.length) app.paneViews.pop().node.remove();
    while (app.paneViews.length < state.panes.length) {
      app.paneViews.push(paneView(app, app.paneViews.length));
      panes.append(app.paneViews.at(-1).node);
    }
    panes.dataset.count = main.dataset.panes = String(state.panes.length);
  };

  // The largest weight of all heads of the reading on show, for one scale.
  const findSharedTop = async () => {
    const pane = state.panes[state.active];
    const { layers } = placeOf(app, pane)?.reading ?? { layers: [] };
    if (!pane.minus && !meta.precise) {
      app.sharedTop = Math.max(0, ...layers.map((entry) => Math.max(...(entry.full ?? entry.small).scales) * (entry.signed ? 127 : 254)));
      return;
    }
    const maps = await Promise.all(layers.flatMap((entry, layer) => entry.small.scales.map((_, at) => paneMap(app, pane, layer, at, true))));
    app.sharedTop = Math.max(0, ...maps.map((map) => map.top));
  };

  // Unpacking maps takes time: if the state has changed meanwhile, the newer call draws it.
  const render = async () => {
    const version = ++app.version;
    rendering = true;
    matchPanes();
    if (state.shared) await findSharedTop();
    await Promise.all(app.paneViews.map((pane) => pane.render()));
    if (version !== app.version) return;
    app.paneViews.forEach((pane) => pane.draw());
    header.sync();
    tools.sync();
    legend.sync();
    const place = placeOf(app, state.panes[state.active]);
    title.textContent = app.paneViews[state.active].view()?.headTitle.replace(/^l/, "L") ?? "";
    facts.textContent = factsOf(place);
    why.textContent = reason();
    timeCard?.draw();
    await grid.draw();
    if (version !== app.version) return;
    [heads, weights, types].forEach((table) => table.draw());
    rendering = false;
    host.dataset.drawn = String(version);
    delete host.dataset.drawing;
  };

  (linked ? document : host).addEventListener("keydown", (event) => {
    onKey(app, event);
    // A key that the explorer has handled must not reach the notebook.
    if (event.defaultPrevented && !linked) event.stopPropagation();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
  onNewWidth(panes, () => app.set({}));
  const restore = () => {
    if (location.hash === written) return;
    state = fromFragment(location.hash, firstState(meta), data);
    app.set({});
  };
  if (linked) {
    addEventListener("hashchange", restore);
    restore();
  }
  restyle();
  return app;
};
