import { mount } from "./app.js";

// In a notebook, by anywidget: the same view in a shadow root, so that the notebook's style and ours stay apart.
const render = ({ model, el }) => {
  const meta = JSON.parse(model.get("meta"));
  const places = JSON.parse(model.get("places"));
  const bytes = model.get("blobs");
  const decoder = new TextDecoder();
  const read = (name) => decoder.decode(new Uint8Array(bytes.buffer, bytes.byteOffset + places[name][0], places[name][1]));
  const style = document.createElement("style");
  style.textContent = model.get("style");
  const host = document.createElement("div");
  // Otherwise JupyterLab would handle the arrow keys.
  host.dataset.lmSuppressShortcuts = "true";
  const dark = document.body.dataset.jpThemeLight === "false" || document.body.classList.contains("vscode-dark") || document.documentElement.getAttribute("theme") === "dark";
  if (dark) host.dataset.theme = "dark";
  else if (document.body.dataset.jpThemeLight === "true") host.dataset.theme = "light";
  const place = document.createElement("div");
  host.attachShadow({ mode: "open" }).append(style, place);
  el.append(host);
  mount(host, place, meta, read);
};
export default { render };
