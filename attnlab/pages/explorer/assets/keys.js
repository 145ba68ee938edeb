import { make } from "./dom.js";

// The keyboard does everything that the pointer does. The help lists the keys of this table.

const move = (app, layers, heads) => {
  const { kind, layer, head, panes, active } = app.state;
  const stack = app.data.stack(panes[active].item ?? app.state.step, kind);
  if (!stack) return;
  const [rows, columns] = [stack.layers.length, stack.headCount];
  app.set({ layer: (Math.min(layer, rows - 1) + layers + rows) % rows, head: (Math.min(head, columns - 1) + heads + columns) % columns });
};

const cursor = (app, down, right) => {
  const view = app.paneViews[app.state.active]?.view() ?? app.paneViews[0]?.view();
  if (!view) return;
  const clamp = (i, count) => Math.max(0, Math.min(count - 1, i));
  const { q, k } = app.state;
  const at = q === null ? [0, 0] : [clamp(q + down, view.rows.length), clamp((k ?? 0) + right, view.cols.length)];
  app.set({ q: at[0], k: at[1] });
  app.follow = true;
  app.paneViews.forEach((pane) => pane.reveal(...at));
};

const KEYS = [
  ["← →", "the head before, the next head", { ArrowLeft: (app) => move(app, 0, -1), ArrowRight: (app) => move(app, 0, 1) }],
  ["↑ ↓", "the layer above, below", { ArrowUp: (app) => move(app, -1, 0), ArrowDown: (app) => move(app, 1, 0) }],
  ["Shift + arrows", "walk over the cells of the map", {
    "Shift+ArrowLeft": (app) => cursor(app, 0, -1), "Shift+ArrowRight": (app) => cursor(app, 0, 1), "Shift+ArrowUp": (app) => cursor(app, -1, 0), "Shift+ArrowDown": (app) => cursor(app, 1, 0),
  }],
  ["1 – 9", "the first, second, … thing that can be shown", Object.fromEntries(Array.from({ length: 9 }, (_, i) => [String(i + 1), (app) => app.showNumber(i)]))],
  ["m l t", "as a map, as lines, as text", { m: (app) => app.set({ view: "map" }), l: (app) => app.set({ view: "lines" }), t: (app) => app.set({ view: "text" }) }],
  ["h", "keep this head's lines, or let them go: several heads in one view", { h: (app) => app.toggleKept() }],
  ["d", "minus the first reading: the difference", { d: (app) => app.toggleDifference() }],
  ["b", "one more pane beside, or back to one", { b: (app) => app.togglePanes() }],
  ["a", "encoder, decoder, cross", { a: (app) => app.nextKind() }],
  ["w", "merge tokens into words", { w: (app) => app.toggleWords() }],
  ["c", "one colour scale for all heads, or one each", { c: (app) => app.set({ shared: !app.state.shared }) }],
  ["/", "search for a token; Enter goes to the next", { "/": (app) => app.focusSearch() }],
  ["+ − 0", "closer, farther, the whole map", { "+": (app) => app.zoomBy(1.6), "=": (app) => app.zoomBy(1.6), "-": (app) => app.zoomBy(1 / 1.6), 0: (app) => app.zoomOut() }],
  ["p , .", "play or pause a run, a step back, a step on", { p: (app) => app.play(), ",": (app) => app.goStep(-1), ".": (app) => app.goStep(1) }],
  ["Esc", "let go of the chosen token", { Escape: (app) => app.set({ q: null, k: null, search: "" }) }],
  ["?", "these keys", { "?": (app) => app.help() }],
];

const actions = Object.assign({}, ...KEYS.map(([, , act]) => act));
const typing = (node) => node?.matches?.("input:not([type=checkbox]):not([type=range]), select, textarea");

export const onKey = (app, event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const target = event.composedPath()[0];
  if (typing(target) || target.closest?.("dialog[open]")) return;
  const arrow = event.key.startsWith("Arrow");
  // In a slider or a table that has the focus, arrows keep their usual meaning.
  if (arrow && target.matches?.("input, .x-rows")) return;
  const act = actions[arrow && event.shiftKey ? `Shift+${event.key}` : event.key];
  if (!act) return;
  event.preventDefault();
  act(app);
};

export const helpDialog = () => {
  const close = make("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const rows = KEYS.map(([key, what]) => make("div", {}, make("dt", {}, make("kbd", {}, key)), make("dd", {}, what)));
  const dialog = make("dialog", { class: "x-help", "aria-label": "Keys" }, make("h2", {}, "Keys"), make("dl", {}, rows),
    make("p", { class: "note" }, "The address of the page holds what is shown: copy it to send this very view."), close);
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  return dialog;
};
