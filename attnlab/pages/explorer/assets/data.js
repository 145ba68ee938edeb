// The payload: texts and maps. A head is unpacked when it is shown, and a few are cached.

const MIDDLE = 127;
const NOT_A_NUMBER = 255;
const CACHED_NUMBERS = 24e6;

const fromBase64 = (text) => {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
};

export const inflate = async (bytes) => {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};

// Undo what the packing did where neighbours are alike: each byte was stored as its difference to the one before it.
export const summedUp = (bytes) => {
  for (let i = 1; i < bytes.length; i++) bytes[i] += bytes[i - 1];
  return bytes;
};

const halfToNumber = (half) => {
  const sign = half & 0x8000 ? -1 : 1;
  const exponent = (half >> 10) & 31;
  const fraction = half & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
};

// How many numbers of a map are stored: of a causal one those on the diagonal and below it.
const storedCount = (rows, cols, causal) => causal ? rows * (rows + 1) / 2 : rows * cols;

let halves = null;
// Numbers are stored key by key.
export const numbersOf = (bytes, { rows, cols, causal, precise, scale, signed }) => {
  if (precise) halves ??= Float32Array.from({ length: 65536 }, (_, i) => halfToNumber(i));
  const n = storedCount(rows, cols, causal);
  const zero = signed ? MIDDLE : 0;
  const steps = Float32Array.from({ length: 256 }, (_, i) => i === NOT_A_NUMBER ? NaN : (i - zero) * scale);
  const values = new Float32Array(rows * cols);
  for (let j = 0, at = 0; j < cols; j++) {
    for (let i = causal ? j : 0; i < rows; i++, at++) {
      values[i * cols + j] = precise ? halves[bytes[at] | (bytes[n + at] << 8)] : steps[bytes[at]];
    }
  }
  return values;
};

// The largest magnitude; NaN and infinity are left out.
export const largest = (values) => {
  let top = 0;
  for (let i = 0; i < values.length; i++) {
    const size = Math.abs(values[i]);
    if (size > top && size < Infinity) top = size;
  }
  return top;
};

const mapOf = (rows, cols, values, more) => ({ rows, cols, values, top: largest(values), ...more });

export const difference = (a, b) => {
  const values = new Float32Array(a.values.length);
  for (let i = 0; i < values.length; i++) values[i] = a.values[i] - b.values[i];
  return mapOf(a.rows, a.cols, values, { signed: true, blocks: a.blocks, error: a.error + b.error });
};

// A smaller map for a screen with fewer dots than cells: the largest weight of every block, so that no line is lost.
export const shrunk = (map, most) => {
  const [rows, cols] = [Math.min(map.rows, most), Math.min(map.cols, most)];
  const values = new Float32Array(rows * cols);
  const into = Uint32Array.from({ length: map.cols }, (_, j) => Math.floor(j * cols / map.cols));
  for (let i = 0; i < map.rows; i++) {
    const start = Math.floor(i * rows / map.rows) * cols;
    for (let j = 0, at = i * map.cols; j < map.cols; j++, at++) {
      const place = start + into[j];
      const w = map.values[at];
      if (Math.abs(w) > Math.abs(values[place]) || w !== w) values[place] = w;
    }
  }
  return { ...map, rows, cols, values };
};

// Tokens become words: weights are summed over a word's keys and averaged over its queries.
export const merged = (map, rows, cols) => {
  const [height, width] = [rows.groups.length, cols ? cols.groups.length : map.cols];
  const values = new Float32Array(height * width);
  for (let i = 0; i < map.rows; i++) {
    const row = rows.of[i];
    const share = 1 / rows.groups[row].length;
    for (let j = 0; j < map.cols; j++) values[row * width + (cols ? cols.of[j] : j)] += share * map.values[i * map.cols + j];
  }
  const keys = cols ? Math.max(...cols.groups.map((group) => group.length)) : 1;
  return mapOf(height, width, values, { signed: map.signed, blocks: null, error: map.error * keys });
};

export class Payload {
  #read; #cache = new Map(); #layers = new Map(); #numbers = 0;

  // read(name) gives the base64 of a layer's heads, one after the other.
  constructor(meta, read) {
    this.meta = meta;
    this.#read = read;
    for (const item of meta.items) {
      item.stackOf = Object.fromEntries(item.stacks.map((stack) => [stack.kind, stack]));
      for (const stack of item.stacks) {
        stack.readingOf = Object.fromEntries(stack.readings.map((reading) => [reading.name, reading]));
        stack.headCount = Math.max(...stack.readings.map((reading) => Math.max(...reading.layers.map((l) => l.small.scales.length))));
      }
    }
  }

  stack(item, kind) { return this.meta.items[item].stackOf[kind] ?? null; }

  reading(item, kind, name) { return this.stack(item, kind)?.readingOf[name] ?? null; }

  text(item, side) { return this.meta.texts[this.meta.items[item].text][side] ?? null; }

  // One head as { rows, cols, values, top, signed, error, blocks }; blocks where only a thumbnail is stored.
  async head(item, kind, name, layer, head, small = false) {
    const reading = this.reading(item, kind, name);
    const entry = reading.layers[layer];
    const part = (!small && entry.full) || entry.small;
    const at = Math.min(head, part.scales.length - 1);
    const key = `${part.blob}/${at}`;
    const cached = this.#cache.get(key);
    if (cached) {
      this.#cache.delete(key);
      this.#cache.set(key, cached);
      return cached;
    }
    const [rows, cols] = part === entry.full ? reading.size : reading.thumbnail;
    // A thumbnail beside a whole map is stored in 8 bits either way.
    const precise = this.meta.precise && !(part === entry.small && entry.full);
    const bytes = await this.#bytes(part, at, storedCount(rows, cols, part.causal) * (precise ? 2 : 1));
    const scale = part.scales[at];
    const values = numbersOf(bytes, { rows, cols, causal: part.causal, precise, scale, signed: entry.signed });
    const blocks = rows < reading.size[0] || cols < reading.size[1] ? reading.size : null;
    const map = mapOf(rows, cols, values, { signed: entry.signed, error: precise ? 0 : scale / 2, blocks });
    this.#store(key, map);
    return map;
  }

  // Each whole map is a stream; the thumbnails of a layer are one stream, cached once it is unpacked.
  async #bytes(part, at, size) {
    const unpack = async (stream) => {
      const start = part.lengths.slice(0, stream).reduce((a, b) => a + b, 0);
      const bytes = await inflate(fromBase64(this.#read(part.blob).slice(start, start + part.lengths[stream])));
      return part.differences[stream] ? summedUp(bytes) : bytes;
    };
    if (part.lengths.length === part.scales.length && part.scales.length > 1) return unpack(at);
    if (!this.#layers.has(part.blob)) this.#layers.set(part.blob, unpack(0));
    return (await this.#layers.get(part.blob)).subarray(at * size, (at + 1) * size);
  }

  #store(key, map) {
    this.#cache.set(key, map);
    this.#numbers += map.values.length;
    for (const [old, dropped] of this.#cache) {
      if (this.#numbers <= CACHED_NUMBERS || old === key) break;
      this.#numbers -= dropped.values.length;
      this.#cache.delete(old);
    }
  }
}
