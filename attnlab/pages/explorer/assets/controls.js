import { MOST_PANES } from "./actions.js";
import { choice, make } from "./dom.js";
import { itemOf, linedHeads, mergesWords, MOST_HEADS, placeOf } from "./maps.js";
import { setAddress } from "./state.js";

// The header of the page, and the buttons above a head; sync() updates them from the state.

export const masthead = (app, { linked, restyle, isDark, help }) => {
  const theme = make("button", { type: "button", class: "theme", "aria-label": "Switch between light and dark", onclick: () => {
    app.host.dataset.theme = isDark() ? "light" : "dark";
    restyle();
  } });
  const hitCount = make("span", { class: "x-found", "aria-live": "polite" });
  const showHitCount = () => {
    const view = app.paneViews[app.state.active]?.view();
    hitCount.textContent = app.state.search.trim() && view ? `${app.hits(view.rows).length} found` : "";
  };
  const onInput = () => {
    app.set({ search: search.value }, "draw");
    showHitCount();
  };
  const onKeydown = (event) => {
    if (event.key === "Enter") app.nextHit();
    if (event.key === "Escape") {
      app.set({ search: "" });
      search.blur();
    }
  };
  const search = make("input", { type: "search", placeholder: "Search a token", "aria-label": "Search a token", oninput: onInput, onkeydown: onKeydown });
  app.focusSearch = () => { search.focus(); search.select(); };
  const copyLink = async () => {
    const set = setAddress(app.fragment());
    try {
      await navigator.clipboard.writeText(location.href);
      copy.textContent = "Copied";
    } catch { copy.textContent = set ? "In the address bar" : "No address here"; }
    setTimeout(() => { copy.textContent = "Link"; }, 1500);
  };
  const copy = make("button", { type: "button", title: "Copy the address of this view", onclick: copyLink }, "Link");
  const helpButton = make("button", { type: "button", "aria-label": "Keys", title: "Keys (?)", onclick: help }, "?");
  const { title, subtitle } = app.meta;
  const node = make("header", { class: "masthead" },
    make("span", { class: "brand" }, make("span", { class: "logo", "aria-hidden": "true" }), "attnlab"),
    make("div", { class: "subtitle" }, make("h1", {}, title), subtitle ? ` ${subtitle}` : ""),
    search, hitCount, linked ? copy : null, helpButton, theme);
  const sync = () => {
    if (search.value !== app.state.search) search.value = app.state.search;
    theme.textContent = isDark() ? "Light" : "Dark";
    showHitCount();
  };
  return { node, sync };
};

// The heads whose lines are drawn, each with its colour; the chosen one can be kept, a kept one be removed.
export const linesLegend = (app) => {
  const node = make("ul", { class: "x-legend", "aria-label": "Heads whose lines are drawn" });
  const note = make("li", { class: "x-legend-note" });
  const entry = (one) => {
    const swatch = make("span", { class: "x-swatch", "aria-hidden": "true" });
    swatch.style.setProperty("--ink", `var(--cat-${one.colour})`);
    const [sign, what] = one.kept ? ["×", "Remove"] : ["+", "Keep"];
    const press = () => app.toggleKept([one.layer, one.head]);
    const label = `${what} the lines of ${one.name}`;
    const full = !one.kept && app.state.kept.length >= MOST_HEADS - 1;
    const button = full ? null : make("button", { type: "button", "aria-label": label, title: one.now ? `${label} (h)` : label, onclick: press }, sign);
    return make("li", { "aria-current": one.now ? "true" : null }, swatch, one.name, button);
  };
  const sync = () => {
    const place = placeOf(app, app.state.panes[app.state.active]);
    node.hidden = app.state.view !== "lines" || !place;
    if (node.hidden) return;
    const heads = linedHeads(app, place);
    note.textContent = heads.length > 1 ? "" : "Keep this head (+ or h), then go to another: the lines of both are drawn. Shift and click in the grid does it too.";
    const refocus = node.contains(node.getRootNode().activeElement);
    node.replaceChildren(...heads.map(entry), note);
    if (refocus) node.querySelector("button")?.focus();
  };
  return { node, sync };
};

export const toolbar = (app) => {
  const kinds = choice("Kind of attention", app.kinds().map((kind) => [kind, kind]), app.showKind);
  const viewNames = [["map", "Map", "One cell per pair of tokens (m)"], ["lines", "Lines", "Lines between tokens (l)"], ["text", "Text", "The text, coloured (t)"]];
  const views = choice("View", viewNames, (view) => app.set({ view }));
  const tick = (label, title, change) => {
    const box = make("input", { type: "checkbox", onchange: () => change(box.checked) });
    return { node: make("label", { class: "x-tick", title }, box, label), box };
  };
  const words = tick("Words", "Merge tokens into words: summed over keys, averaged over queries (w)", () => app.toggleWords());
  const shared = tick("One scale", "One colour scale for all heads of this reading, instead of one for each (c)", (on) => app.set({ shared: on }));
  const linear = tick("Linear", "Colours in proportion to weights, instead of to their square root", (on) => app.set({ linear: on }));
  const share = make("span", { class: "x-mass-value" });
  const showShare = () => { share.textContent = `${Math.round(100 * app.state.mass)} %`; };
  const onSlide = () => {
    app.set({ mass: Number(mass.value) }, "draw");
    showShare();
  };
  const mass = make("input", { type: "range", min: "0.1", max: "1", step: "0.05", "aria-label": "Share of a token's attention that is drawn", oninput: onSlide });
  const massLabel = make("label", { class: "x-tick x-mass" }, "Top ", mass, share);
  const beside = make("button", { type: "button", title: "Show another reading or text beside this one (b)", onclick: () => app.togglePanes() });
  const zoom = make("span", { class: "tabs x-zoom", role: "group", "aria-label": "Zoom" },
    make("button", { type: "button", "aria-label": "Farther", title: "Farther (−)", onclick: () => app.zoomBy(1 / 1.6) }, "−"),
    make("button", { type: "button", "aria-label": "Closer", title: "Closer (+)", onclick: () => app.zoomBy(1.6) }, "+"),
    make("button", { type: "button", title: "The whole map (0)", onclick: () => app.zoomOut() }, "All"));
  const node = make("div", { class: "x-tools" }, app.kinds().length > 1 ? kinds.node : null, views.node, beside, words.node, shared.node, linear.node, massLabel, zoom);

  const sync = () => {
    const { state } = app;
    kinds.show(state.kind);
    views.show(state.view);
    words.box.checked = state.words;
    shared.box.checked = state.shared;
    linear.box.checked = state.linear;
    mass.value = String(state.mass);
    showShare();
    massLabel.hidden = state.view !== "lines";
    zoom.hidden = state.view !== "map";
    beside.textContent = state.panes.length >= MOST_PANES ? "One pane" : "Beside";
    beside.hidden = app.specs().length < 2;
    const item = itemOf(app, state.panes[state.active]);
    const stack = app.data.stack(item, state.kind);
    words.node.hidden = !stack || ![stack.queries, stack.keys].some((side) => mergesWords(app.data.text(item, side)));
  };
  return { node, sync };
};
