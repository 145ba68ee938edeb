import { paletteOf } from "./colour.js";
import { embedded, make, onNewWidth } from "./dom.js";
import { LongData } from "./long_data.js";
import { lanesView } from "./long_lanes.js";
import { gridView, largeView, regionsView } from "./long_maps.js";
import { searchView, textView } from "./long_text.js";

// The page of a long text: one state, and views that draw it. A change of state draws them again, once per frame.

const { meta, read } = embedded();
const host = document.documentElement;
const root = document.getElementById("attnlab");
const data = new LongData(meta, read);

const first = data.heads.findIndex(({ name }) => name === data.chosenNames[0]);
const app = {
  data, meta, theme: "", palette: null,
  // looks: the stored largest of the token in the head on show.
  state: { head: first, token: data.length - 1, view: [0, data.length], lanes: "", looks: [] },
};
const visited = [];
let frame = null;
let version = 0;

app.set = (patch) => {
  app.state = { ...app.state, ...patch };
  // Tests wait until this attribute is gone.
  host.dataset.drawing = "";
  frame ??= requestAnimationFrame(() => {
    frame = null;
    render();
  });
};
// To a token, perhaps in another head; the lanes move along if it is out of their view.
app.goTo = (token, head = null, { remember = true } = {}) => {
  if (remember && token !== app.state.token) visited.push(app.state.token);
  let { view } = app.state;
  const wide = view[1] - view[0];
  if (token < view[0] || token >= view[1]) {
    const start = Math.max(0, Math.min(data.length - wide, token - Math.floor(wide / 2)));
    view = [start, start + wide];
  }
  app.set({ token, view, head: head ?? app.state.head });
};
app.canGoBack = () => visited.length > 0;
app.goBack = () => { if (visited.length) app.goTo(visited.pop(), null, { remember: false }); };

const isDark = () => getComputedStyle(host).colorScheme === "dark";
const restyle = () => {
  app.palette = paletteOf(host);
  app.theme = isDark() ? "dark" : "light";
  theme.textContent = isDark() ? "Light" : "Dark";
  app.set({});
};
const theme = make("button", { type: "button", class: "theme", "aria-label": "Switch between light and dark", onclick: () => {
  host.dataset.theme = isDark() ? "light" : "dark";
  restyle();
} });

const search = searchView(app);
const [grid, large, lanes, text, regions] = [gridView(app), largeView(app), lanesView(app), textView(app), regionsView(app)];
const header = make("header", { class: "masthead" },
  make("span", { class: "brand" }, make("span", { class: "logo", "aria-hidden": "true" }), "attnlab"),
  make("div", { class: "subtitle" }, make("h1", {}, meta.title), ` ${meta.subtitle}`), search.nodes, theme);
const explained = Object.values(meta.statistics).flatMap(({ title, help }) => [make("dt", {}, title), make("dd", {}, help)]);
const about = make("details", { class: "card x-about" }, make("summary", {}, "What the statistics are, and keys"),
  make("dl", { class: "l-about" }, explained),
  make("p", { class: "x-facts" }, "/ searches; Enter and Shift+Enter go on; in the text the arrow keys choose a token, in the grid a head; b goes back."),
  make("p", { class: "x-facts" }, Object.entries(meta.about).map(([key, value]) => `${key}: ${value}`).join(" · ")));
root.replaceChildren();
root.classList.add("x-root");
root.append(header, make("main", { class: "x-page" }, meta.notes.map((note) => make("p", { class: "note x-note" }, note)),
  make("div", { class: "l-main" }, make("div", { class: "x-column" }, grid.node), make("div", { class: "x-column" }, large.node, lanes.node, text.node)), regions?.node ?? null, about));

// Unpacking takes time: if the state has changed meanwhile, the newer call draws it.
const render = async () => {
  const mine = ++version;
  const chosen = data.chosenAt(app.state.head);
  const looks = chosen < 0 ? [] : (await data.chosen(chosen)).looks(app.state.token);
  if (mine !== version) return;
  app.state.looks = looks;
  await Promise.all([large.draw(), lanes.draw(), text.draw()]);
  if (mine !== version) return;
  host.dataset.head = data.heads[app.state.head].name;
  await Promise.all([grid.draw(), regions?.draw()]);
  if (mine !== version) return;
  host.dataset.drawn = String(version);
  delete host.dataset.drawing;
};

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = { "/": search.focus, b: app.goBack }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
onNewWidth(root, () => app.set({}));
restyle();
