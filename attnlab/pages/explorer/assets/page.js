import { mount } from "./app.js";
import { embedded } from "./dom.js";

// As a page: the payload is in script elements of data, and the address holds the view; a frame without a file has no address.
const { meta, read } = embedded();
const place = document.getElementById("attnlab");
place.replaceChildren();
mount(document.documentElement, place, meta, read, { linked: location.protocol !== "about:" });
