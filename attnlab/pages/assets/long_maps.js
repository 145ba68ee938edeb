import { paint } from "./colour.js";
import { make, number } from "./dom.js";
import { niceStep } from "./long_data.js";
import { FONT, sized } from "./surface.js";

// All heads as small maps of squares, one of them large, and regions of exact weights.

const MARGIN = 26;
const GUTTER = 58;
const LEAST_CELL = 22;
// Layers unpacked before the page may answer again.
const LAYERS_AT_ONCE = 3;
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

// A map is painted once for a theme.
const pictures = new WeakMap();
const painted = (map, app) => {
  const known = pictures.get(map);
  if (known?.theme === app.theme) return known.picture;
  const picture = paint(map, app.palette, { top: map.top, linear: false });
  pictures.set(map, { theme: app.theme, picture });
  return picture;
};
const pause = () => new Promise((done) => setTimeout(done));

export const gridView = (app) => {
  const { data } = app;
  const canvas = make("canvas", { class: "l-grid", tabindex: 0, role: "img" });
  const node = make("section", { class: "card" },
    make("h2", {}, `All ${data.heads.length} heads`),
    make("p", { class: "x-facts" }, "Rows are layers, columns are heads. Click one, or walk with the arrow keys. Heads with a dot have lanes and places."),
    make("div", { class: "x-scroll" }, canvas));
  let picture = null;
  let drawnFor = "";
  const cellOf = () => Math.max(LEAST_CELL, Math.min(110, ((node.clientWidth || 400) - 34 - MARGIN) / data.columns));
  const corner = (row, head, cell) => [MARGIN + head * cell + 1.5, MARGIN + row * cell + 1.5];

  // The small maps are drawn once for a width and a theme, some layers at a time.
  const drawMaps = async (cell, width, height) => {
    picture = document.createElement("canvas");
    const context = sized(picture, width, height);
    context.imageSmoothingQuality = "high";
    const mine = picture;
    for (let row = 0; row < app.meta.layers.length; row++) {
      for (let head = 0; head < app.meta.layers[row].scales.length; head++) {
        const map = await data.squares(data.at(row, head));
        if (mine !== picture) return;
        const [x, y] = corner(row, head, cell);
        context.drawImage(paint(map, app.palette, { top: map.top, linear: false }), x, y, cell - 3, cell - 3);
      }
      if (row % LAYERS_AT_ONCE === LAYERS_AT_ONCE - 1) {
        show(cell, width, height);
        await pause();
      }
    }
    show(cell, width, height);
  };

  const show = (cell, width, height) => {
    canvas.style.width = `${width}px`;
    const context = sized(canvas, width, height);
    const { palette } = app;
    context.drawImage(picture, 0, 0, width, height);
    context.font = `11px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = palette.muted;
    const every = Math.ceil(18 / cell);
    for (let head = 0; head < data.columns; head += every) context.fillText(String(head), MARGIN + (head + 0.5) * cell, MARGIN / 2);
    app.meta.layers.forEach(({ layer }, row) => context.fillText(String(layer), MARGIN / 2, MARGIN + (row + 0.5) * cell));
    data.heads.forEach(({ row, head }, index) => {
      const [x, y] = corner(row, head, cell);
      if (data.chosenAt(index) >= 0) {
        context.fillStyle = palette["cat-1"];
        context.beginPath();
        context.arc(x + cell - 7, y + 4, 2.5, 0, 7);
        context.fill();
      }
      if (index !== app.state.head) return;
      context.strokeStyle = palette["cat-1"];
      context.lineWidth = 2.5;
      context.strokeRect(x - 1, y - 1, cell - 1, cell - 1);
    });
  };

  const draw = async () => {
    const cell = cellOf();
    const [width, height] = [MARGIN + cell * data.columns, MARGIN + cell * app.meta.layers.length];
    canvas.setAttribute("aria-label", `Small maps of all heads, ${app.meta.layers.length} layers; head ${data.heads[app.state.head].name} is shown. Arrow keys choose.`);
    const wanted = `${cell} ${app.theme} ${devicePixelRatio}`;
    if (wanted !== drawnFor) {
      drawnFor = wanted;
      await drawMaps(cell, width, height);
    } else show(cell, width, height);
  };
  canvas.addEventListener("click", (event) => {
    const cell = cellOf();
    const index = data.at(Math.floor((event.offsetY - MARGIN) / cell), Math.floor((event.offsetX - MARGIN) / cell));
    if (index >= 0) app.set({ head: index });
  });
  canvas.addEventListener("keydown", (event) => {
    const move = MOVES[event.key];
    if (!move) return;
    event.preventDefault();
    const { row, head } = data.heads[app.state.head];
    const index = data.at(row + move[0], head + move[1]);
    if (index >= 0) app.set({ head: index });
  });
  return { node, draw };
};

// A map with axes in tokens: from a first query and a first key on, and so many tokens a cell.
const drawMap = (canvas, map, app, { firstQuery = 0, firstKey = 0, block = 1, marked = [], chosen = null }) => {
  const width = Math.max(160, Math.min(canvas.parentElement.clientWidth || 400, 720));
  const size = (width - GUTTER - 8) / Math.max(map.cols, map.rows);
  const [wide, high] = [size * map.cols, size * map.rows];
  canvas.style.width = `${width}px`;
  const context = sized(canvas, width, MARGIN + high + 8);
  context.imageSmoothingEnabled = false;
  context.drawImage(painted(map, app), GUTTER, MARGIN, wide, high);
  context.font = `11px ${FONT}`;
  context.fillStyle = app.palette.muted;
  context.strokeStyle = app.palette.line;
  context.strokeRect(GUTTER - 0.5, MARGIN - 0.5, wide + 1, high + 1);
  context.textBaseline = "middle";
  // Of a square the first token is labelled, of a weight its own.
  const middle = block > 1 ? 0 : 0.5;
  const [down, across] = [niceStep(22 * block / size), niceStep(64 * block / size)];
  const label = (first, count, step, write) => {
    for (let token = Math.ceil(first / step) * step; token < Math.min(app.data.length, first + count * block); token += step) {
      write(token.toLocaleString("en"), ((token - first) / block + middle) * size);
    }
  };
  context.textAlign = "right";
  label(firstQuery, map.rows, down, (text, y) => context.fillText(text, GUTTER - 6, MARGIN + y));
  context.textAlign = "center";
  label(firstKey, map.cols, across, (text, x) => context.fillText(text, Math.min(GUTTER + x, width - 18), MARGIN / 2));
  context.strokeStyle = app.palette["cat-1"];
  context.lineWidth = 1.5;
  const outline = ([i, j]) => context.strokeRect(GUTTER + j * size - 1, MARGIN + i * size - 1, Math.max(4, size) + 1, Math.max(4, size) + 1);
  marked.forEach(outline);
  if (chosen) {
    context.strokeStyle = app.palette.text;
    context.lineWidth = 2.5;
    outline(chosen);
  }
  canvas.dataset.frame = [GUTTER, MARGIN, size].join(" ");
  return (event) => {
    const [j, i] = [Math.floor((event.offsetX - GUTTER) / size), Math.floor((event.offsetY - MARGIN) / size)];
    return i >= 0 && j >= 0 && i < map.rows && j < map.cols ? [i, j] : null;
  };
};

// A map is read with the pointer or the arrow keys; a click or Enter goes to the cell. choose(cell) draws and reads it.
const readByPointerAndKeys = (canvas, { cellAt, size, read, go, choose }) => {
  let chosen = null;
  canvas.addEventListener("pointermove", (event) => read(cellAt(event)));
  canvas.addEventListener("click", (event) => { if (cellAt(event)) go(cellAt(event)); });
  canvas.addEventListener("blur", () => choose(chosen = null));
  canvas.addEventListener("keydown", (event) => {
    const move = MOVES[event.key];
    if (!move && event.key !== "Enter") return;
    event.preventDefault();
    if (event.key === "Enter") {
      if (chosen) go(chosen);
      return;
    }
    const last = size().map((count) => count - 1);
    chosen = chosen ? chosen.map((place, axis) => Math.max(0, Math.min(last[axis], place + move[axis]))) : [last[0], 0];
    choose(chosen);
  });
};

export const largeView = (app) => {
  const { data, meta } = app;
  const title = make("h2", { "aria-live": "polite" });
  const canvas = make("canvas", { class: "x-large", role: "img", tabindex: 0 });
  const readout = make("p", { class: "l-readout", "aria-live": "polite" });
  const hint = "Rows look, columns are looked at. Point at a square to read it, or walk with the arrow keys; click or Enter goes to its first token.";
  const node = make("section", { class: "card" }, title,
    make("p", { class: "x-facts" }, `Each square is the mean weight of ${meta.block} × ${meta.block} tokens, stored in 8 bits (of its root).`),
    make("div", {}, canvas), readout);
  let map = null;
  let chosen = null;
  let cellAt = () => null;
  const range = (square) => `${(square * meta.block).toLocaleString("en")}–${(Math.min(data.length, (square + 1) * meta.block) - 1).toLocaleString("en")}`;
  const read = (cell) => {
    readout.textContent = cell ? `Tokens ${range(cell[0])} give tokens ${range(cell[1])} ${number(map.values[cell[0] * map.cols + cell[1]], 2)} each, on average.` : hint;
  };
  const draw = async () => {
    const { name, layer, head } = data.heads[app.state.head];
    map = await data.squares(app.state.head);
    const square = (token) => Math.floor(token / meta.block);
    const { token, looks } = app.state;
    const marked = looks.map(({ place }) => [square(token), square(place)]);
    title.textContent = `Layer ${layer}, head ${head}`;
    canvas.setAttribute("aria-label", `Map of head ${name} over ${data.length} tokens in ${map.rows} × ${map.cols} squares. Arrow keys read them.`);
    cellAt = drawMap(canvas, map, app, { block: meta.block, marked, chosen });
    read(chosen);
  };
  readByPointerAndKeys(canvas, {
    cellAt: (event) => cellAt(event),
    size: () => [map.rows, map.cols],
    read,
    go: (cell) => app.goTo(cell[0] * meta.block),
    choose: (cell) => { chosen = cell; draw(); },
  });
  return { node, draw };
};

export const regionsView = (app) => {
  const { data, meta } = app;
  if (!meta.regions.length) return null;
  const views = meta.regions.map((entry, i) => {
    const canvas = make("canvas", { class: "x-large", role: "img", tabindex: 0 });
    const readout = make("p", { class: "l-readout", "aria-live": "polite" }, "Point at a weight to read it, or walk with the arrow keys; click or Enter goes to the token that looks.");
    const [lastQuery, lastKey] = [entry.firstQuery + entry.rows - 1, entry.firstKey + entry.cols - 1];
    const name = `Head ${entry.layer}.${entry.head}, tokens ${entry.firstQuery}–${lastQuery} looking at ${entry.firstKey}–${lastKey}`;
    const node = make("div", { class: "l-region" }, make("h3", {}, name), make("div", {}, canvas), readout);
    let map = null;
    let chosen = null;
    let cellAt = () => null;
    const read = (cell) => {
      if (!cell) return;
      const [query, key] = [entry.firstQuery + cell[0], entry.firstKey + cell[1]];
      readout.textContent = `“${meta.tokens[query]}” (${query}) gives “${meta.tokens[key]}” (${key}) ${number(map.values[cell[0] * map.cols + cell[1]], 3)}`;
    };
    const draw = async () => {
      map = await data.region(i);
      canvas.setAttribute("aria-label", `Exact weights. ${name}. Arrow keys read them.`);
      cellAt = drawMap(canvas, map, app, { ...entry, chosen });
      read(chosen);
    };
    readByPointerAndKeys(canvas, {
      cellAt: (event) => cellAt(event),
      size: () => [map.rows, map.cols],
      read,
      go: (cell) => app.goTo(entry.firstQuery + cell[0], data.heads.findIndex((head) => head.layer === entry.layer && head.head === entry.head)),
      choose: (cell) => { chosen = cell; draw(); },
    });
    return { node, draw };
  });
  const node = make("section", { class: "card" }, make("h2", {}, "Exact weights"),
    make("p", { class: "x-facts" }, "Regions asked for with --zoom: every weight, stored in 16 bits."),
    make("div", { class: "l-regions" }, views.map((view) => view.node)));
  return { node, draw: () => Promise.all(views.map((view) => view.draw())) };
};
