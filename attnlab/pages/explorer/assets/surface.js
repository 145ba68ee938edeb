// Pictures are drawn on a canvas, or on this class, which has the methods of a canvas and writes SVG.

export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

export const sized = (canvas, width, height) => {
  const dots = globalThis.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * dots));
  canvas.height = Math.max(1, Math.round(height * dots));
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(dots, 0, 0, dots, 0, 0);
  return context;
};

export const cut = (context, text, width) => {
  if (context.measureText(text).width <= width) return text;
  let characters = [...text];
  while (characters.length > 1 && context.measureText(characters.join("") + "…").width > width) characters = characters.slice(0, -1);
  return characters.join("") + "…";
};

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c])
  // Characters that XML does not allow at all.
  .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");
const short = (number) => Number(number.toFixed(2));

export class SvgSurface {
  fillStyle = "#000"; strokeStyle = "#000"; lineWidth = 1; globalAlpha = 1; font = `12px ${FONT}`; textAlign = "left";
  textBaseline = "alphabetic"; #dash = ""; imageSmoothingEnabled = true; imageSmoothingQuality = "high";
  #parts = []; #path = ""; #box = null; #saved = []; #open = 0; #clips = 0; #ruler = document.createElement("canvas").getContext("2d");

  constructor(width, height) { this.width = width; this.height = height; }

  save() {
    const { fillStyle, strokeStyle, lineWidth, globalAlpha, font, textAlign, textBaseline } = this;
    this.#saved.push([{ fillStyle, strokeStyle, lineWidth, globalAlpha, font, textAlign, textBaseline }, this.#open]);
    this.#open = 0;
  }

  restore() {
    this.#parts.push("</g>".repeat(this.#open));
    const [look, open] = this.#saved.pop();
    Object.assign(this, look);
    this.#open = open;
  }

  #group(attributes) { this.#parts.push(`<g ${attributes}>`); this.#open++; }
  translate(x, y) { this.#group(`transform="translate(${short(x)} ${short(y)})"`); }
  rotate(angle) { this.#group(`transform="rotate(${short(angle * 180 / Math.PI)})"`); }

  measureText(text) { this.#ruler.font = this.font; return this.#ruler.measureText(text); }

  #alpha() { return this.globalAlpha < 1 ? ` opacity="${short(this.globalAlpha)}"` : ""; }
  fillRect(x, y, w, h) { this.#parts.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(w)}" height="${short(h)}" fill="${this.fillStyle}"${this.#alpha()}/>`); }
  strokeRect(x, y, w, h) {
    this.#parts.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(w)}" height="${short(h)}" fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}"${this.#alpha()}/>`);
  }

  beginPath() { this.#path = ""; this.#box = null; }
  moveTo(x, y) { this.#path += `M${short(x)} ${short(y)}`; }
  lineTo(x, y) { this.#path += `L${short(x)} ${short(y)}`; }
  setLineDash(lengths) { this.#dash = lengths.length ? ` stroke-dasharray="${lengths.join(" ")}"` : ""; }
  bezierCurveTo(...points) { this.#path += `C${points.map(short).join(" ")}`; }
  rect(x, y, w, h) { this.#box = [x, y, w, h].map(short); }
  clip() {
    const [x, y, w, h] = this.#box;
    const id = `clip${this.#clips++}`;
    this.#parts.push(`<clipPath id="${id}"><rect x="${x}" y="${y}" width="${w}" height="${h}"/></clipPath>`);
    this.#group(`clip-path="url(#${id})"`);
  }
  stroke() { this.#parts.push(`<path d="${this.#path}" fill="none" stroke="${this.strokeStyle}" stroke-width="${short(this.lineWidth)}"${this.#dash}${this.#alpha()}/>`); }

  fillText(text, x, y) {
    const [, weight, size] = this.font.match(/^(\d+ )?([\d.]+)px/);
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    const shift = { alphabetic: 0, middle: 0.35, top: 0.8 }[this.textBaseline] * size;
    const bold = weight ? ` font-weight="${weight.trim()}"` : "";
    const look = `font-size="${size}"${bold} text-anchor="${anchor}" fill="${this.fillStyle}"${this.#alpha()}`;
    this.#parts.push(`<text x="${short(x)}" y="${short(y + shift)}" ${look} xml:space="preserve">${escaped(text)}</text>`);
  }

  drawImage(image, ...box) {
    const [sx, sy, sw, sh, x, y, w, h] = box.length === 8 ? box : [0, 0, image.width, image.height, ...box];
    const sharp = this.imageSmoothingEnabled ? "" : ' style="image-rendering:pixelated"';
    const picture = `<image width="${image.width}" height="${image.height}" href="${image.toDataURL()}" preserveAspectRatio="none"${sharp}/>`;
    const frame = `x="${short(x)}" y="${short(y)}" width="${short(w)}" height="${short(h)}"`;
    this.#parts.push(`<svg ${frame} viewBox="${[sx, sy, sw, sh].map(short).join(" ")}" preserveAspectRatio="none">${picture}</svg>`);
  }

  toString() {
    const family = escaped(FONT);
    const [width, height] = [short(this.width), short(this.height)];
    const frame = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${frame} font-family="${family}">${this.#parts.join("")}</svg>`;
  }
}
