import { colourOf } from "./colour.js";
import { FONT } from "./surface.js";

// The text itself: each key coloured by what the chosen token gives it, or by what all tokens give it on average.

const LINE = 27;
const GAP = 3;

export const passageLayout = (ruler, names, width) => {
  ruler.font = `15px ${FONT}`;
  let [x, y] = [0, 0];
  const boxes = names.map((name) => {
    const wide = Math.min(width, Math.max(12, ruler.measureText(name).width + 10));
    if (x + wide > width && x > 0) [x, y] = [0, y + LINE];
    const box = [x, y, wide];
    x += wide + GAP;
    return box;
  });
  return { boxes, height: y + LINE + 4 };
};

export const received = (map, query) => {
  if (query !== null) return map.values.subarray(query * map.cols, (query + 1) * map.cols);
  const sums = new Float32Array(map.cols);
  for (let i = 0; i < map.rows; i++) for (let j = 0; j < map.cols; j++) sums[j] += map.values[i * map.cols + j] / map.rows;
  return sums;
};

const lightness = (colour) => {
  const [r, g, b] = colour.match(/\d+/g).map(Number);
  return (0.299 * r + 0.587 * g + 0.114 * b) / 255;
};

export const drawPassage = (context, view) => {
  const { names, layout, weights, top, map, linear, palette, query, hits } = view;
  context.textBaseline = "middle";
  context.textAlign = "left";
  names.forEach((name, i) => {
    const [x, y, wide] = layout.boxes[i];
    const colour = weights && colourOf(palette, weights[i], top, map.signed, linear);
    context.fillStyle = colour ?? palette.sunken;
    context.fillRect(x, y + 2, wide, LINE - 5);
    if (i === query || hits.includes(i)) {
      context.strokeStyle = i === query ? palette["cat-1"] : palette.accent;
      context.lineWidth = 2;
      context.strokeRect(x + 1, y + 3, wide - 2, LINE - 7);
    }
    context.fillStyle = !colour ? palette.text : lightness(colour) > 0.55 ? "#10141a" : "#ffffff";
    context.font = `${i === query ? "650 " : ""}15px ${FONT}`;
    context.save();
    context.beginPath();
    context.rect(x, y, wide, LINE);
    context.clip();
    context.fillText(name, x + 5, y + LINE / 2);
    context.restore();
  });
};

// A token's box: [x, y, width, height].
export const passageBox = (layout, i) => [...layout.boxes[i], LINE];

export const passageAt = (layout, x, y) => layout.boxes.findIndex(([left, over, wide]) => x >= left && x < left + wide && y >= over && y < over + LINE);
