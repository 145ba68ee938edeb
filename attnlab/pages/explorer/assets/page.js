import { mount } from "./app.js";

// A page of its own: the payload lies in script elements that are data, and the address holds the view.
const blobs = new Map([...document.querySelectorAll("script[data-blob]")].map((node) => [node.dataset.blob, node]));
const meta = JSON.parse(document.getElementById("attnlab-meta").textContent);
const place = document.getElementById("attnlab");
place.replaceChildren();
mount(document.documentElement, place, meta, (name) => blobs.get(name).textContent, { linked: true });
