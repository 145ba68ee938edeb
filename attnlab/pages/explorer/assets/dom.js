// Elements are made, never parsed: a token is text, whatever it looks like.

export const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
};

// What a page holds in script elements of data: its description, and a function that reads an array by its name.
export const embedded = () => {
  const blobs = new Map([...document.querySelectorAll("script[data-blob]")].map((node) => [node.dataset.blob, node]));
  const meta = JSON.parse(document.getElementById("attnlab-meta").textContent);
  return { meta, read: (name) => blobs.get(name).textContent };
};

// Calls back when an element has become wider or narrower, not when only its height has changed.
export const onNewWidth = (node, act) => {
  let wide = 0;
  new ResizeObserver(([entry]) => {
    if (entry.contentRect.width === wide) return;
    wide = entry.contentRect.width;
    act();
  }).observe(node);
};

export const options = (select, entries, chosen) => {
  select.replaceChildren(...entries.map(([value, label, disabled]) => make("option", { value, disabled }, label)));
  select.value = chosen;
};

// A group of buttons of which one is pressed.
export const choice = (label, entries, onchoose) => {
  const buttons = entries.map(([value, text, title]) => make("button", { type: "button", title, onclick: () => onchoose(value) }, text));
  const node = make("span", { class: "tabs", role: "group", "aria-label": label }, buttons);
  const show = (chosen) => buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(entries[i][0] === chosen)));
  return { node, show };
};

export const number = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "not a number";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-4 ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
};

// As many digits as are stored: a number is written to one place beyond its error's.
export const measured = (value, error) => {
  if (!(error > 0) || !Number.isFinite(value)) return number(value, 4);
  const places = Math.max(0, Math.min(9, 1 - Math.floor(Math.log10(error))));
  return `${value.toFixed(places)} ± ${error.toPrecision(2)}`.replaceAll("-", "−");
};
