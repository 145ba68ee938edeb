import { MOST_HEADS } from "./maps.js";

// The actions of keys and buttons.

const WHOLE = { s: 1, x: 0, y: 0 };
export const MOST_PANES = 3;

const same = (a, b) => a.item === b.item && a.reading === b.reading;

export const addActions = (app) => {
  const changeActive = (patch) => app.set({ panes: app.state.panes.map((pane, at) => at === app.state.active ? { ...pane, ...patch } : pane) });
  const cleared = { q: null, k: null, zoom: WHOLE };

  // The panes to choose from: every reading of every item; in a run the readings at the slider's step, the first and the last.
  app.specs = () => {
    const { items } = app.meta;
    const readings = (item) => (item.stackOf[app.state.kind] ?? item.stacks[0]).readings.map((reading) => reading.name);
    if (!app.timeline) return items.flatMap((item, at) => readings(item).map((reading) => ({ item: at, reading })));
    return [null, 0, items.length - 1].flatMap((item) => readings(items[0]).map((reading) => ({ item, reading })));
  };
  app.kinds = () => [...new Set(app.meta.items.flatMap((item) => item.stacks.map((stack) => stack.kind)))];

  app.showKind = (kind) => app.set({ kind, ...cleared });
  app.nextKind = () => app.showKind(app.kinds()[(app.kinds().indexOf(app.state.kind) + 1) % app.kinds().length]);
  app.toggleWords = () => app.set({ words: !app.state.words, ...cleared });
  app.showNumber = (i) => app.specs()[i] && changeActive(app.specs()[i]);
  app.toggleDifference = () => {
    const pane = app.state.panes[app.state.active];
    const [first, second] = app.specs();
    if (pane.minus) changeActive({ minus: null });
    else if (!same(pane, first)) changeActive({ minus: first });
    else if (second) changeActive({ ...second, minus: first });
  };
  app.togglePanes = () => {
    const { panes } = app.state;
    if (panes.length >= MOST_PANES) return app.set({ panes: panes.slice(0, 1), active: 0 });
    const unused = app.specs().find((spec) => !panes.some((pane) => same(pane, spec))) ?? app.specs()[0];
    return app.set({ panes: [...panes, { ...unused, minus: null }], active: panes.length });
  };
  app.closePane = (index) => app.set({ panes: app.state.panes.filter((_, i) => i !== index), active: 0 });
  // A kept head's lines are drawn with those of the chosen one.
  app.toggleKept = (one = [app.state.layer, app.state.head]) => {
    const { kept } = app.state;
    const others = kept.filter((other) => String(other) !== String(one));
    const next = others.length < kept.length ? others : [...kept, one].slice(0, MOST_HEADS - 1);
    app.set({ view: "lines", kept: next });
  };
  app.zoomBy = (factor) => app.paneViews[app.state.active]?.zoomBy(factor);
  app.zoomOut = () => app.set({ zoom: WHOLE }, "draw");

  app.hits = (names) => {
    const wanted = app.state.search.trim().toLowerCase();
    return wanted ? names.flatMap((name, i) => name.toLowerCase().includes(wanted) ? [i] : []) : [];
  };
  app.nextHit = () => {
    const view = app.paneViews[app.state.active]?.view();
    const hits = view ? app.hits(view.rows) : [];
    if (!hits.length) return;
    const next = hits.find((i) => i > (app.state.q ?? -1)) ?? hits[0];
    app.set({ q: next, k: null });
    app.paneViews.forEach((pane) => pane.reveal(next, null));
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
};
