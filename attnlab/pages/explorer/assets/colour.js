// Colours come from the page's style, so pictures follow the theme; reports have the same scales.

const SEQUENTIAL = 16;
const DIVERGING = 17;

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

const ramp = (steps) => {
  const table = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) {
    const place = i / 255 * (steps.length - 1);
    const left = Math.min(Math.floor(place), steps.length - 2);
    for (let c = 0; c < 3; c++) table[3 * i + c] = steps[left][c] + (steps[left + 1][c] - steps[left][c]) * (place - left);
  }
  return table;
};

export const paletteOf = (host) => {
  const style = getComputedStyle(host);
  const ink = (name) => style.getPropertyValue(`--${name}`).trim();
  const steps = (kind, count) => ramp(Array.from({ length: count }, (_, i) => channels(ink(`${kind}-${i}`))));
  const names = ["paper", "card", "sunken", "line", "text", "muted", "accent", ...Array.from({ length: 7 }, (_, i) => `cat-${i}`)];
  return { seq: steps("seq", SEQUENTIAL), div: steps("div", DIVERGING), ...Object.fromEntries(names.map((name) => [name, ink(name)])) };
};

// Most weights are small: the square root spreads them over the scale, and the legend shows the numbers.
const spreadOf = (share, linear) => linear ? share : Math.sign(share) * Math.sqrt(Math.abs(share));
export const unspread = (place, linear) => linear ? place : Math.sign(place) * place * place;

const place = (value, top, signed, linear) => {
  const share = spreadOf(Math.max(-1, Math.min(1, value / (top || 1))), linear);
  return Math.round((signed ? (share + 1) / 2 : Math.max(0, share)) * 255);
};

// null for NaN and infinity.
export const colourOf = (palette, value, top, signed, linear) => {
  if (!Number.isFinite(value)) return null;
  const table = signed ? palette.div : palette.seq;
  const at = 3 * place(value, top, signed, linear);
  return `rgb(${table[at]}, ${table[at + 1]}, ${table[at + 2]})`;
};

// A map as a canvas of one pixel per weight; NaN and infinity are a chequered grey.
export const paint = (map, palette, { top, linear }) => {
  const table = map.signed ? palette.div : palette.seq;
  const image = new ImageData(map.cols, map.rows);
  const greys = [channels(palette.muted), channels(palette.line)];
  const { values } = map;
  for (let i = 0; i < values.length; i++) {
    const bad = !(Math.abs(values[i]) < Infinity);
    const source = bad ? greys[(i + Math.floor(i / map.cols)) % 2] : table;
    const at = bad ? 0 : 3 * place(values[i], top, map.signed, linear);
    image.data[4 * i] = source[at];
    image.data[4 * i + 1] = source[at + 1];
    image.data[4 * i + 2] = source[at + 2];
    image.data[4 * i + 3] = 255;
  }
  const canvas = document.createElement("canvas");
  canvas.width = map.cols;
  canvas.height = map.rows;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
};
