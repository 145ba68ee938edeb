import { chartLayout, drawChart } from "./chart.js";
import { make, number, options } from "./dom.js";
import { placeOf } from "./maps.js";
import { sized } from "./surface.js";

// A run over its recorded steps: a slider, play and pause, and a chart of its metrics.

const FRAME = 700;
const HEIGHT = 150;

export const timelineView = (app) => {
  const { items, metrics } = app.meta;
  const last = items.length - 1;
  const button = make("button", { type: "button", class: "x-play", title: "Play or pause (p)", onclick: () => play() }, "Play");
  const slider = make("input", { type: "range", min: "0", max: String(last), step: "1", "aria-label": "Training step", oninput: () => app.set({ step: Number(slider.value) }) });
  const label = make("strong", { class: "x-step", "aria-live": "polite" });
  const scalar = make("select", { "aria-label": "What the chart shows", onchange: () => app.set({ scalar: scalar.value }) });
  const chart = make("canvas", { class: "x-chart", role: "img" });
  const note = make("p", { class: "note", "aria-live": "polite" });
  const node = make("section", { class: "card x-time" }, make("div", { class: "x-time-bar" }, button, slider, label, scalar), chart, note);

  const goStep = (by) => app.set({ step: (app.state.step + by + items.length) % items.length });
  let playing = null;
  const play = () => {
    if (playing) {
      clearInterval(playing);
      playing = null;
    } else {
      if (app.state.step === last) app.set({ step: 0 });
      playing = setInterval(() => app.state.step === last ? play() : goStep(1), FRAME);
    }
    button.textContent = playing ? "Pause" : "Play";
  };

  // Scalars recorded with the steps come first, then the run's own metrics.
  const names = [...new Set([...items.flatMap((item) => Object.keys(item.scalars)), ...Object.keys(metrics)])];
  const place = () => placeOf(app, app.state.panes[app.state.active]);
  const seriesOf = (name) => {
    if (metrics[name]) return [{ name, points: metrics[name], strong: true }];
    const at = items.map((item) => [item.step, item.scalars[name]]);
    const known = at.filter(([, value]) => typeof value === "number");
    if (known.length) return [{ name, points: known, strong: true }];
    const chosen = place();
    if (!chosen) return [];
    const key = `${app.state.kind}.${chosen.number}`;
    const points = (head) => at.flatMap(([step, value]) => typeof value?.[key]?.[head] === "number" ? [[step, value[key][head]]] : []);
    const lines = Array.from({ length: chosen.heads }, (_, head) => ({ name: `head ${head}`, strong: head === chosen.head, points: points(head) }));
    return lines.filter((one) => one.points.length).sort((a, b) => a.strong - b.strong);
  };

  let frame = null;
  const draw = () => {
    const { step } = items[app.state.step];
    slider.value = String(app.state.step);
    label.textContent = `step ${step.toLocaleString("en")}`;
    slider.setAttribute("aria-valuetext", label.textContent);
    const name = names.includes(app.state.scalar) ? app.state.scalar : names[0];
    options(scalar, names.map((one) => [one, one]), name ?? "");
    scalar.hidden = chart.hidden = note.hidden = !name;
    if (!name) return;
    const series = seriesOf(name);
    const steps = [items[0].step, items[last].step, ...series.flatMap((one) => one.points.map(([x]) => x))].sort((a, b) => a - b);
    frame = chartLayout(chart.clientWidth, HEIGHT, steps, series);
    drawChart(sized(chart, chart.clientWidth, HEIGHT), { layout: frame, series, now: step, palette: app.palette() });
    const strong = series.find((one) => one.strong);
    const current = strong?.points.find(([x]) => x === step);
    const which = strong && strong.name !== name ? `${name}, ${strong.name} of layer ${place().number}` : name;
    note.textContent = current ? `${which}: ${number(current[1], 4)} at step ${step.toLocaleString("en")}` : strong ? which : `${name} is not recorded for this head`;
    chart.setAttribute("aria-label", note.textContent);
  };
  chart.addEventListener("pointerdown", (event) => {
    if (!frame) return;
    const x = event.clientX - chart.getBoundingClientRect().left;
    const distances = items.map((item) => Math.abs(frame.x(item.step) - x));
    app.set({ step: distances.indexOf(Math.min(...distances)) });
  });
  return { node, draw, play, goStep };
};
