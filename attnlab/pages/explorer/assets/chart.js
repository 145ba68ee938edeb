import { number } from "./dom.js";
import { FONT } from "./surface.js";

// Scalars over the steps of a run: one line, or one per head of the layer with the chosen head in front.

const roundTicks = (low, high, count) => {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) ticks.push(Number(tick.toPrecision(10)));
  return ticks;
};

export const chartLayout = (width, height, steps, series) => {
  const values = series.flatMap((one) => one.points.map(([, y]) => y));
  const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const box = { left: 54, right: width - 24, top: 10, bottom: height - 26 };
  const [first, last] = [steps[0], steps.at(-1)];
  return {
    box, low: low - pad, high: high + pad, first, last,
    x: (step) => box.left + (last > first ? (step - first) / (last - first) : 0.5) * (box.right - box.left),
    y: (value) => box.bottom - (value - low + pad) / (high - low + 2 * pad) * (box.bottom - box.top),
  };
};

export const drawChart = (context, { layout, series, now, palette }) => {
  const { box, x, y } = layout;
  context.font = `11px ${FONT}`;
  context.lineWidth = 1;
  context.textBaseline = "middle";
  for (const tick of roundTicks(layout.low, layout.high, 4)) {
    context.strokeStyle = palette.line;
    context.beginPath();
    context.moveTo(box.left, y(tick));
    context.lineTo(box.right, y(tick));
    context.stroke();
    context.fillStyle = palette.muted;
    context.textAlign = "right";
    context.fillText(number(tick, 3), box.left - 7, y(tick));
  }
  context.textBaseline = "top";
  for (const tick of roundTicks(layout.first, layout.last, 6)) {
    if (x(tick) > box.right + 1) continue;
    context.fillStyle = palette.muted;
    context.textAlign = "center";
    context.fillText(tick.toLocaleString("en"), x(tick), box.bottom + 8);
  }
  for (const one of series) {
    context.strokeStyle = one.strong ? palette["cat-0"] : palette.muted;
    context.globalAlpha = one.strong ? 1 : 0.28;
    context.lineWidth = one.strong ? 2.2 : 1;
    context.beginPath();
    one.points.forEach(([step, value], i) => i ? context.lineTo(x(step), y(value)) : context.moveTo(x(step), y(value)));
    context.stroke();
    context.globalAlpha = 1;
    const current = one.strong && one.points.find(([step]) => step === now);
    if (current) {
      context.fillStyle = palette["cat-1"];
      context.fillRect(x(current[0]) - 4, y(current[1]) - 4, 8, 8);
    }
  }
  context.strokeStyle = palette["cat-1"];
  context.lineWidth = 1.2;
  context.beginPath();
  context.moveTo(x(now), box.top);
  context.lineTo(x(now), box.bottom);
  context.stroke();
};
