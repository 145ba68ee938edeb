import { make, number } from "./dom.js";

// The text around the chosen token, what that token looks at, and search.

const AROUND = 160;

// What stands before a token.
const between = (meta, i) => meta.before[i] === "2" ? [document.createElement("br")] : meta.before[i] === "1" ? [" "] : [];

export const textView = (app) => {
  const { data, meta } = app;
  const passage = make("div", { class: "l-passage", tabindex: 0, role: "group", "aria-label": "The text around the chosen token; arrow keys choose another" });
  const where = make("h2", { "aria-live": "polite" });
  const go = make("input", { type: "number", min: 0, max: data.length - 1, "aria-label": "Go to token number", onchange: () => {
    const token = Math.round(Number(go.value));
    if (token >= 0 && token < data.length) app.goTo(token);
  } });
  const back = make("button", { type: "button", onclick: () => app.goBack() }, "Back");
  const title = make("h3", {});
  const list = make("ol", { class: "l-looks" });
  const none = make("p", { class: "x-facts" });
  const node = make("section", { class: "card" },
    make("div", { class: "x-card-bar" }, where, make("span", { class: "x-tools" }, make("label", {}, "Token ", go), back)),
    make("div", { class: "l-columns" }, passage, make("div", { class: "l-side" }, title, none, list)));

  let shownAt = null;
  const fill = (token) => {
    const [from, to] = [Math.max(0, token - AROUND), Math.min(data.length, token + AROUND + 1)];
    const nodes = from > 0 ? ["… "] : [];
    for (let i = from; i < to; i++) {
      nodes.push(...between(meta, i));
      nodes.push(make("span", { "data-token": i }, meta.tokens[i]));
    }
    if (to < data.length) nodes.push(" …");
    passage.replaceChildren(...nodes);
    shownAt = token;
  };
  const draw = () => {
    const { token, looks, head } = app.state;
    if (shownAt === null || Math.abs(token - shownAt) > AROUND / 2) fill(token);
    const weights = new Map(looks.map(({ place, weight }) => [place, weight]));
    for (const span of passage.querySelectorAll("span")) {
      const i = Number(span.dataset.token);
      span.classList.toggle("l-looked", weights.has(i));
      span.style.setProperty("--share", weights.has(i) ? `${Math.round(20 + 60 * Math.sqrt(weights.get(i)))}%` : "0%");
      if (i === token) span.setAttribute("aria-current", "true");
      else span.removeAttribute("aria-current");
    }
    // The passage scrolls, the page does not.
    const current = passage.querySelector("[aria-current]");
    passage.scrollTop = current.offsetTop - passage.offsetTop - passage.clientHeight / 2;
    where.textContent = `“${meta.tokens[token]}”, token ${token.toLocaleString("en")}`;
    go.value = token;
    back.disabled = !app.canGoBack();
    const chosen = data.chosenAt(head);
    title.textContent = chosen < 0 ? "Places are not stored" : `The ${meta.chosen[chosen].k} largest of head ${data.heads[head].name}`;
    none.textContent = chosen < 0 ? "Only heads with a dot have the places that each token looks at." : "Weights to 4%; the others of its row are not stored. Click one to go there.";
    list.replaceChildren(...looks.map(({ place, weight, least }) => make("li", {},
      make("button", { type: "button", "data-place": place, onclick: () => app.goTo(place) },
        make("b", {}, meta.tokens[place]), ` ${place.toLocaleString("en")} · ${least ? `at most ${number(weight, 2)}` : number(weight, 2)} · ${distance(token - place)}`))));
  };
  const distance = (by) => by === 0 ? "itself" : `${Math.abs(by).toLocaleString("en")} ${by > 0 ? "back" : "ahead"}`;
  passage.addEventListener("click", (event) => {
    const token = event.target.dataset?.token;
    if (token !== undefined) app.goTo(Number(token));
  });
  passage.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, PageUp: -100, PageDown: 100 }[event.key];
    if (!by) return;
    event.preventDefault();
    app.goTo(Math.max(0, Math.min(data.length - 1, app.state.token + by)), null, { remember: false });
  });
  return { node, draw };
};

// Where a phrase begins in the text: the tokens, in order.
const hitsOf = (meta) => {
  let text = "";
  const starts = new Uint32Array(meta.tokens.length);
  meta.tokens.forEach((token, i) => {
    if (meta.before[i] !== "0") text += " ";
    starts[i] = text.length;
    text += token.toLowerCase();
  });
  const tokenAt = (place) => {
    let [low, high] = [0, starts.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  };
  return (phrase) => {
    const hits = [];
    if (!phrase) return hits;
    for (let at = text.indexOf(phrase); at >= 0; at = text.indexOf(phrase, at + 1)) {
      const token = tokenAt(at);
      if (hits.at(-1) !== token) hits.push(token);
    }
    return hits;
  };
};

export const searchView = (app) => {
  let search = null;
  let hits = [];
  let at = -1;
  const input = make("input", { type: "search", placeholder: "Search the text", "aria-label": "Search the text" });
  const count = make("span", { class: "x-found", "aria-live": "polite" });
  const show = () => { count.textContent = input.value.trim() ? (hits.length ? `${at + 1} of ${hits.length.toLocaleString("en")}` : "not in the text") : ""; };
  const step = (by) => {
    if (!hits.length) return;
    at = (at + by + hits.length) % hits.length;
    show();
    app.goTo(hits[at]);
  };
  input.addEventListener("input", () => {
    search ??= hitsOf(app.meta);
    hits = search(input.value.trim().toLowerCase().replace(/\s+/g, " "));
    at = hits.findIndex((token) => token >= app.state.token) - 1;
    if (at < -1) at = -1;
    if (hits.length) step(1);
    else show();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") step(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") input.blur();
  });
  const button = (text, label, by) => make("button", { type: "button", "aria-label": label, title: label, onclick: () => step(by) }, text);
  return { nodes: [input, count, button("‹", "Previous place", -1), button("›", "Next place", 1)], focus: () => { input.focus(); input.select(); } };
};
