import { mount } from "./app.js";

// As a page: the payload is in script elements of data, and the address holds the view; a frame without a file has no address.
const blobs = new Map([...document.querySelectorAll("script[data-blob]")].map((node) => [node.dataset.blob, node]));
const meta = JSON.parse(document.getElementById("attnlab-meta").textContent);
const place = document.getElementById("attnlab");
place.replaceChildren();
mount(document.documentElement, place, meta, (name) => blobs.get(name).textContent, { linked: location.protocol !== "about:" });
