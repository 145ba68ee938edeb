import { MOST_HEADS } from "./maps.js";

// The state of the view, and its form as the fragment of an address: a link restores the view.

export const firstState = (meta) => {
  const first = meta.items[0].stacks[0];
  const panes = meta.panes.length ? meta.panes.map(([item, reading]) => ({ item, reading, minus: null })) : [{ item: 0, reading: first.readings[0].name, minus: null }];
  return {
    kind: meta.opens.kind, layer: meta.opens.layer, head: meta.opens.head, kept: [], panes, active: 0, view: "map", grid: "maps", words: false, shared: false, linear: false, q: null, k: null,
    mass: 0.8, search: "", step: 0, zoom: { s: 1, x: 0, y: 0 }, scalar: "",
  };
};

const specText = ({ item, reading }) => `${item ?? "*"}:${encodeURIComponent(reading)}`;
const specFrom = (text) => {
  const [item, reading] = text.split(":");
  return { item: item === "*" ? null : Number(item), reading: decodeURIComponent(reading ?? "") };
};

export const toFragment = (state) => {
  const panes = state.panes.map((pane) => specText(pane) + (pane.minus ? `~${specText(pane.minus)}` : "")).join("|");
  const { s, x, y } = state.zoom;
  const always = { kind: state.kind, layer: state.layer, head: state.head, view: state.view, panes };
  // Values that equal those of the first view are left out.
  const changed = {
    grid: state.grid === "maps" ? null : state.grid,
    active: state.active || null,
    words: state.words ? 1 : null,
    shared: state.shared ? 1 : null,
    linear: state.linear ? 1 : null,
    q: state.q,
    k: state.k,
    mass: state.mass === 0.8 ? null : state.mass,
    search: state.search || null,
    step: state.step || null,
    scalar: state.scalar || null,
    kept: state.kept.map((one) => one.join(".")).join(",") || null,
    zoom: s > 1 ? [s, x, y].map((n) => Number(n.toFixed(2))).join(",") : null,
  };
  const entries = Object.entries({ ...always, ...changed }).filter(([, value]) => value !== null);
  return entries.map(([name, value]) => `${name}=${name === "panes" ? value : encodeURIComponent(value)}`).join("&");
};

// The state that a fragment describes; values that this payload lacks stay as they are.
export const fromFragment = (text, state, data) => {
  const fields = Object.fromEntries(text.replace(/^#/, "").split("&").filter((part) => part.includes("=")).map((part) => [part.slice(0, part.indexOf("=")), part.slice(part.indexOf("=") + 1)]));
  const next = { ...state };
  const plain = (name) => { try { return decodeURIComponent(fields[name]); } catch { return ""; } };
  const whole = (name) => Number.isInteger(Number(fields[name])) && Number(fields[name]) >= 0 ? Number(fields[name]) : null;
  const { items } = data.meta;
  if (items.some((item) => item.stackOf[plain("kind")])) next.kind = plain("kind");
  for (const name of ["layer", "head", "step", "active"]) if (name in fields && whole(name) !== null) next[name] = whole(name);
  for (const name of ["q", "k"]) next[name] = name in fields ? whole(name) : null;
  for (const name of ["words", "shared", "linear"]) next[name] = fields[name] === "1";
  if (["map", "lines", "text"].includes(fields.view)) next.view = fields.view;
  for (const name of ["search", "scalar"]) if (name in fields) next[name] = plain(name);
  next.grid = "grid" in fields ? plain("grid") : "maps";
  const pairs = ("kept" in fields ? plain("kept") : "").split(",").map((one) => one.split(".").map(Number));
  next.kept = pairs.filter((one) => one.length === 2 && one.every((n) => Number.isInteger(n) && n >= 0)).slice(0, MOST_HEADS - 1);
  if (Number(fields.mass) > 0 && Number(fields.mass) <= 1) next.mass = Number(fields.mass);
  const [s, x, y] = ("zoom" in fields ? plain("zoom") : "1,0,0").split(",").map(Number);
  if ([s, x, y].every(Number.isFinite)) next.zoom = { s: Math.max(1, s), x, y };
  const known = (spec) => spec && (spec.item === null ? 0 : spec.item) < items.length && items[spec.item ?? 0].stacks.some((stack) => stack.readingOf[spec.reading]) ? spec : null;
  try {
    const panes = (fields.panes ?? "").split("|").filter(Boolean).slice(0, 3).map((one) => {
      const [shown, minus] = one.split("~").map(specFrom);
      return known(shown) && { ...shown, minus: known(minus) };
    }).filter(Boolean);
    if (panes.length) next.panes = panes;
  } catch { /* A broken address shows the first view. */ }
  return next;
};

// Some frames (a notebook's, for one) have no address that a page may set; the page works without.
export const setAddress = (fragment) => {
  try {
    history.replaceState(null, "", `#${fragment}`);
    return true;
  } catch { return false; }
};
