import { make, number, options } from "./dom.js";
import { niceStep } from "./long_data.js";
import { FONT, sized } from "./surface.js";

// Lanes: a line for each statistic of a head, or of one statistic in all chosen heads, over the tokens on show.

const LANE = 54;
const LABEL = 92;
const AXIS = 22;
const LEAST_VIEW = 16;

export const lanesView = (app) => {
  const { data, meta } = app;
  const names = Object.keys(meta.statistics).filter((name) => meta.chosen.some(({ lanes }) => name in lanes));
  const shown = make("select", { "aria-label": "What the lanes show", onchange: () => app.set({ lanes: shown.value }) });
  const head = make("select", { "aria-label": "Head of the lanes", onchange: () => app.set({ head: data.heads.findIndex(({ name }) => name === head.value) }) });
  const button = (text, label, act) => make("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  const canvas = make("canvas", { class: "l-lanes", tabindex: 0, role: "img" });
  const readout = make("p", { class: "l-readout", "aria-live": "polite" });
  const hint = "Click a token to choose it. Zoom with + and −, move with the arrow keys, 0 shows all; a wheel with Ctrl zooms, dragging moves. Pale bars reach from the least to the largest of the tokens in a column of dots.";
  const node = make("section", { class: "card" }, make("h2", {}, "Lanes"),
    make("p", { class: "x-facts" }, `Statistics of every token in ${meta.chosen.length} heads, stored in 8 bits. ${meta.choice}`),
    make("div", { class: "x-tools" }, head, shown, make("span", { class: "x-zoom tabs", role: "group", "aria-label": "Zoom" },
      button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)), button("All", "Show all tokens", () => app.set({ view: [0, data.length] })))),
    canvas, readout);

  // Around a token, which stays where it is.
  const zoom = (factor, around = app.state.token) => {
    const [from, to] = app.state.view;
    const middle = around >= from && around < to ? around : (from + to) / 2;
    const wide = Math.max(Math.min(LEAST_VIEW, data.length), Math.min(data.length, (to - from) * factor));
    const start = Math.max(0, Math.min(data.length - wide, middle - (middle - from) * wide / (to - from)));
    app.set({ view: [Math.floor(start), Math.min(data.length, Math.floor(start) + Math.ceil(wide))] });
  };
  const move = (by) => {
    const [from, to] = app.state.view;
    const start = Math.max(0, Math.min(data.length - (to - from), from + Math.round(by)));
    app.set({ view: [start, start + to - from] });
  };

  // [{ label, values, scale }]
  let lines = [];
  const linesOf = async () => {
    if (app.state.lanes === "") {
      const at = data.chosenAt(app.state.head);
      if (at < 0) return [];
      const { lanes } = await data.chosen(at);
      return names.filter((name) => name in lanes).map((name) => ({ label: meta.statistics[name].title, values: lanes[name], ...meta.chosen[at].lanes[name] }));
    }
    const name = app.state.lanes;
    const having = meta.chosen.map((entry, i) => [entry, i]).filter(([entry]) => name in entry.lanes);
    return Promise.all(having.map(async ([entry, i]) => ({ label: `head ${entry.layer}.${entry.head}`, values: (await data.chosen(i)).lanes[name], ...entry.lanes[name] })));
  };
  const plain = ({ scale }, x) => scale === "logarithm" ? 10 ** x : x;

  // A line through the tokens; where a column of dots holds many, their mean, and a pale bar from the least to the largest.
  const drawLine = (context, { values }, top, left, wide, [from, to]) => {
    let [low, high] = [Infinity, -Infinity];
    for (let i = from; i < to; i++) {
      if (values[i] < low) low = values[i];
      if (values[i] > high) high = values[i];
    }
    const y = (x) => top + (LANE - 14) * (1 - (x - low) / (high - low || 1));
    const perDot = Math.max(1, (to - from) / wide);
    const dots = Math.ceil((to - from) / perDot);
    const line = new Path2D();
    let pen = false;
    context.globalAlpha = 0.3;
    for (let dot = 0; dot < dots; dot++) {
      const [a, b] = [from + Math.floor(dot * perDot), Math.min(to, from + Math.floor((dot + 1) * perDot))];
      let [least, most, sum, count] = [Infinity, -Infinity, 0, 0];
      for (let i = a; i < b; i++) {
        if (!Number.isFinite(values[i])) continue;
        [least, most, sum, count] = [Math.min(least, values[i]), Math.max(most, values[i]), sum + values[i], count + 1];
      }
      if (!count) { pen = false; continue; }
      const x = left + (dot + 0.5) * wide / dots;
      if (most > least) context.fillRect(x - 0.5, y(most), 1, y(least) - y(most));
      if (pen) line.lineTo(x, y(sum / count)); else line.moveTo(x, y(sum / count));
      pen = true;
    }
    context.globalAlpha = 1;
    context.stroke(line);
    return [low, high];
  };

  let frame = { left: LABEL, wide: 1 };
  const draw = async () => {
    const current = data.heads[app.state.head].name;
    const has = data.chosenAt(app.state.head) >= 0;
    options(head, [...(has ? [] : [[current, `head ${current}: no lanes`, true]]), ...data.chosenNames.map((name) => [name, `head ${name}`])], current);
    options(shown, [["", "all statistics of this head"], ...names.map((name) => [name, `${meta.statistics[name].title} in all chosen heads`])], app.state.lanes);
    lines = await linesOf();
    const { palette } = app;
    const width = Math.max(240, node.clientWidth - 34);
    const left = width < 520 ? 66 : LABEL;
    frame = { left, wide: Math.floor(width - left - 6) };
    const context = sized(canvas, width, Math.max(1, lines.length) * LANE + AXIS);
    context.font = `11px ${FONT}`;
    context.textBaseline = "middle";
    if (!lines.length) {
      context.fillStyle = palette.muted;
      context.fillText("This head has no lanes: choose one above.", 8, LANE / 2);
    }
    const { view, token, looks } = app.state;
    const at = (place) => left + (place + 0.5 - view[0]) / (view[1] - view[0]) * frame.wide;
    const mark = (place, colour, wide) => {
      if (place < view[0] || place >= view[1]) return;
      context.fillStyle = colour;
      context.fillRect(at(place) - wide / 2, 0, wide, lines.length * LANE);
    };
    context.globalAlpha = 0.45;
    looks.forEach(({ place }) => mark(place, palette["cat-0"], 1.5));
    context.globalAlpha = 1;
    mark(token, palette["cat-1"], 2);
    lines.forEach((line, k) => {
      context.strokeStyle = palette.line;
      context.strokeRect(left - 0.5, k * LANE + 3.5, frame.wide + 1, LANE - 8);
      context.strokeStyle = context.fillStyle = palette["cat-0"];
      context.lineWidth = 1.2;
      context.lineJoin = "round";
      const [low, high] = drawLine(context, line, k * LANE + 7, left, frame.wide, view);
      context.lineWidth = 1;
      context.textAlign = "left";
      context.fillStyle = palette.text;
      context.fillText(line.label, 0, k * LANE + LANE / 2);
      context.fillStyle = palette.muted;
      const end = (x) => Number.isFinite(x) ? number(plain(line, x), 2) : "none";
      context.fillText(end(high), 0, k * LANE + 10);
      context.fillText(end(low), 0, (k + 1) * LANE - 10);
    });
    drawAxis(context, view, left, lines.length * LANE);
    canvas.setAttribute("aria-label", `${lines.length} lanes over tokens ${view[0]} to ${view[1] - 1}; token ${token} is chosen. Arrow keys move, plus and minus zoom.`);
    canvas.dataset.view = view.join(" ");
    readout.textContent = hint;
  };
  const drawAxis = (context, [from, to], left, top) => {
    const step = niceStep(70 * (to - from) / frame.wide);
    context.fillStyle = app.palette.muted;
    context.textAlign = "center";
    for (let i = Math.ceil(from / step) * step; i < to; i += step) {
      const x = left + (i + 0.5 - from) / (to - from) * frame.wide;
      if (x < left + frame.wide - 14) context.fillText(i.toLocaleString("en"), Math.max(x, left + 4), top + AXIS / 2);
    }
  };
  const tokenAt = (event) => {
    const [from, to] = app.state.view;
    const token = Math.floor(from + (event.offsetX - frame.left) / frame.wide * (to - from));
    return token >= from && token < to ? token : null;
  };
  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => { dragged = { x: event.offsetX, moved: false }; });
  canvas.addEventListener("pointerup", (event) => {
    const token = dragged && !dragged.moved ? tokenAt(event) : null;
    dragged = null;
    if (token !== null) app.goTo(token);
  });
  canvas.addEventListener("pointerleave", () => { dragged = null; readout.textContent = hint; });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged && event.buttons && Math.abs(event.offsetX - dragged.x) > 4) {
      const [from, to] = app.state.view;
      const by = (dragged.x - event.offsetX) / frame.wide * (to - from);
      if (Math.abs(by) >= 1) {
        dragged = { x: event.offsetX, moved: true };
        move(by);
      }
      return;
    }
    const token = tokenAt(event);
    const line = lines[Math.floor(event.offsetY / LANE)];
    readout.textContent = token !== null && line ? `“${meta.tokens[token]}” (${token.toLocaleString("en")}): ${line.label} ${number(plain(line, line.values[token]), 3)}` : hint;
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, tokenAt(event) ?? app.state.token);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const wide = app.state.view[1] - app.state.view[0];
    const act = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => app.set({ view: [0, data.length] }),
      ArrowLeft: () => move(-Math.max(1, wide / 8)), ArrowRight: () => move(Math.max(1, wide / 8)),
      Home: () => move(-data.length), End: () => move(data.length),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  return { node, draw };
};
