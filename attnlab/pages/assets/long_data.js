import { inflate, largest, numbersOf, summedUp } from "./data.js";

// The payload of a long text. A layer's squares, a head's lanes and a region are unpacked when they are first shown.

const NOT_A_NUMBER = 255;
const NO_PLACE = 65535;
// "<" would end the data, so that "~" stands for it.
const [FIRST_DIGIT, LESS_THAN, TILDE] = [40, 60, 126];

// 5 characters for 4 bytes; the last character says how many bytes were added.
const fromBase85 = (text) => {
  const words = (text.length - 1) / 5;
  const bytes = new Uint8Array(4 * words);
  for (let word = 0, at = 0; word < words; word++) {
    let number = 0;
    for (let end = at + 5; at < end; at++) {
      const code = text.charCodeAt(at);
      number = number * 85 + (code === TILDE ? LESS_THAN : code) - FIRST_DIGIT;
    }
    bytes[4 * word] = number >>> 24;
    bytes[4 * word + 1] = number >>> 16;
    bytes[4 * word + 2] = number >>> 8;
    bytes[4 * word + 3] = number;
  }
  return bytes.subarray(0, bytes.length - Number(text.at(-1)));
};

// The least of 1, 2, 5, 10, 20, 50 and so on that is at least so much: tokens between two labels of an axis.
export const niceStep = (least) => {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least);
};

export class LongData {
  #read; #streams = new Map(); #squares = new Map(); #chosen = new Map(); #regions = new Map();

  // read(name) gives the text of a stream.
  constructor(meta, read) {
    this.meta = meta;
    this.#read = read;
    this.length = meta.tokens.length;
    this.heads = meta.layers.flatMap((entry, row) => entry.scales.map((_, head) => ({ row, head, layer: entry.layer, name: `${entry.layer}.${head}` })));
    this.columns = Math.max(...meta.layers.map((entry) => entry.scales.length));
    this.chosenNames = meta.chosen.map(({ layer, head }) => `${layer}.${head}`);
  }

  #bytes({ blob, differences }) {
    if (!this.#streams.has(blob)) {
      this.#streams.set(blob, inflate(fromBase85(this.#read(blob))).then((bytes) => differences ? summedUp(bytes) : bytes));
    }
    return this.#streams.get(blob);
  }

  at(row, head) { return this.heads.findIndex((entry) => entry.row === row && entry.head === head); }

  // The place of a head among the chosen ones, or -1.
  chosenAt(index) { return this.chosenNames.indexOf(this.heads[index].name); }

  // The mean weights in squares of a head: { rows, cols, values, top, signed }.
  async squares(index) {
    if (this.#squares.has(index)) return this.#squares.get(index);
    const { row, head } = this.heads[index];
    const entry = this.meta.layers[row];
    const { rows, cols, causal, signed } = entry;
    const size = causal ? rows * (rows + 1) / 2 : rows * cols;
    const bytes = (await this.#bytes(entry)).subarray(head * size, (head + 1) * size);
    const values = numbersOf(bytes, { rows, cols, causal, precise: false, scale: entry.scales[head], signed });
    // Their roots are stored.
    for (let i = 0; i < values.length; i++) values[i] *= Math.abs(values[i]);
    const map = { rows, cols, values, top: largest(values), signed };
    this.#squares.set(index, map);
    return map;
  }

  // A chosen head: { lanes: { name: numbers }, looks(token): [{ place, weight, least }] }; least where it is smaller still.
  async chosen(i) {
    if (!this.#chosen.has(i)) this.#chosen.set(i, this.#unpackChosen(this.meta.chosen[i]));
    return this.#chosen.get(i);
  }

  async #unpackChosen(entry) {
    const [values, low, high, weights] = await Promise.all([entry.values, ...entry.places, entry.weights].map((part) => this.#bytes(part)));
    const n = this.length;
    const lanes = {};
    Object.entries(entry.lanes).forEach(([name, lane], k) => {
      // Logarithms stay what they are, and are drawn as such.
      const stored = (b) => b === NOT_A_NUMBER ? NaN : lane.low + b * lane.step;
      const numbers = Float32Array.from({ length: 256 }, (_, b) => lane.scale === "root" ? stored(b) * Math.abs(stored(b)) : stored(b));
      lanes[name] = Float32Array.from(values.subarray(k * n, (k + 1) * n), (b) => numbers[b]);
    });
    const looks = (token) => {
      const list = [];
      // A weight is stored as its difference to that of the rank before.
      for (let rank = 0, steps = 0; rank < entry.k; rank++) {
        const at = token * entry.k + rank;
        const place = low[at] | (high[at] << 8);
        steps = (steps + weights[rank * n + token]) & 255;
        if (place !== NO_PLACE) list.push({ place, weight: 2 ** (-steps / this.meta.stepsPerHalving), least: steps === NOT_A_NUMBER - 1 });
      }
      return list;
    };
    return { lanes, looks };
  }

  async region(i) {
    if (!this.#regions.has(i)) {
      const entry = this.meta.regions[i];
      const { rows, cols } = entry;
      const bytes = await this.#bytes(entry);
      const n = rows * cols;
      const values = Float32Array.from({ length: n }, (_, at) => entry.low + entry.step * (bytes[at] | (bytes[n + at] << 8)));
      this.#regions.set(i, { rows, cols, values, top: largest(values), signed: entry.low < 0 });
    }
    return this.#regions.get(i);
  }
}
