"use strict";
// Attention maps of one text: all heads as a grid, one head large with its tokens; or two maps of one head side by side, which
// have no grid. They are drawn on a canvas, which stays fast.
(() => {
  const colour = (kind, steps) => {
    const style = getComputedStyle(document.documentElement);
    return Array.from({ length: steps }, (_, i) => style.getPropertyValue(`--${kind}-${i}`).trim());
  };
  const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

  const setUp = (viewer) => {
    const { tokens, maps } = JSON.parse(viewer.querySelector("script[type='application/json']").textContent);
    for (const map of maps) {
      const bytes = Uint8Array.from(atob(map.data), (character) => character.charCodeAt(0));
      map.bytes = map.signed ? new Int8Array(bytes.buffer) : bytes;
    }
    const grid = viewer.querySelector(".maps-grid");
    const larges = [...viewer.querySelectorAll(".maps-large")];
    const readout = viewer.querySelector(".readout");
    const title = viewer.querySelector(".maps-title");
    const state = { map: 0, layer: 0, head: 0 };
    // A canvas that names its layer always shows that one.
    const layerOf = (large) => Number(large.dataset.layer ?? state.layer);
    const current = () => maps[state.map];
    const value = (map, layer, head, i, j) => map.bytes[((layer * map.heads + head) * map.queries + i) * map.keys + j];

    // Weights are many and small: the square root spreads them over the scale (the readout gives the number).
    const picture = (map, layer, head) => {
      const steps = colour(map.signed ? "div" : "seq", map.signed ? 17 : 16).map(rgb);
      const image = new ImageData(map.keys, map.queries);
      for (let i = 0; i < map.queries; i++) {
        for (let j = 0; j < map.keys; j++) {
          const share = value(map, layer, head, i, j) / (map.signed ? 127 : 255);
          const spread = Math.sign(share) * Math.sqrt(Math.abs(share));
          const step = Math.round((map.signed ? (spread + 1) / 2 : spread) * (steps.length - 1));
          image.data.set([...steps[step], 255], (i * map.keys + j) * 4);
        }
      }
      const canvas = document.createElement("canvas");
      canvas.width = map.keys;
      canvas.height = map.queries;
      canvas.getContext("2d").putImageData(image, 0, 0);
      return canvas;
    };
    const sized = (canvas, ratio) => {
      const dots = devicePixelRatio || 1;
      const width = canvas.clientWidth || 400;
      canvas.width = Math.round(width * dots);
      canvas.height = Math.round(width * ratio * dots);
      canvas.style.height = `${width * ratio}px`;
      const context = canvas.getContext("2d");
      context.scale(dots, dots);
      context.imageSmoothingEnabled = false;
      return [context, width];
    };
    const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

    const MARGIN = 22;
    const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const drawGrid = () => {
      if (!grid) return;
      const map = current();
      const heads = map.heads;
      const cell = ((grid.clientWidth || 400) - MARGIN) / heads;
      const [context, width] = sized(grid, (MARGIN + cell * map.layers) / (MARGIN + cell * heads));
      const size = (width - MARGIN) / heads;
      context.font = "11px system-ui, sans-serif";
      context.textAlign = "center";
      context.textBaseline = "middle";
      for (let layer = 0; layer < map.layers; layer++) {
        context.fillStyle = ink("--muted");
        context.fillText(String(layer), MARGIN / 2, MARGIN + (layer + 0.5) * size);
        for (let head = 0; head < heads; head++) {
          if (layer === 0) { context.fillStyle = ink("--muted"); context.fillText(String(head), MARGIN + (head + 0.5) * size, MARGIN / 2); }
          const x = MARGIN + head * size + 1.5;
          const y = MARGIN + layer * size + 1.5;
          context.drawImage(picture(map, layer, head), x, y, size - 3, size - 3);
          if (layer === state.layer && head === state.head) {
            context.strokeStyle = ink("--cat-1");
            context.lineWidth = 2.5;
            context.strokeRect(x - 1, y - 1, size - 1, size - 1);
          }
        }
      }
    };
    let frame = null;
    const drawLarge = (large) => {
      const map = current();
      const gutter = 78;
      const [context, width] = sized(large, 1);
      const size = (width - gutter) / Math.max(map.keys, map.queries);
      frame = { gutter, size };
      context.drawImage(picture(map, layerOf(large), state.head), gutter, gutter, size * map.keys, size * map.queries);
      if (state.cell) {
        context.strokeStyle = ink("--cat-1");
        context.lineWidth = 2.5;
        context.strokeRect(gutter + state.cell[1] * size - 1, gutter + state.cell[0] * size - 1, size + 2, size + 2);
      }
      const font = Math.max(7, Math.min(12, size * 0.8));
      const every = Math.ceil(font * 1.05 / size);
      context.font = `${font}px system-ui, sans-serif`;
      context.fillStyle = ink("--text");
      context.textBaseline = "middle";
      tokens.forEach((token, i) => {
        if (i % every) return;
        const text = token.length > 11 ? token.slice(0, 10) + "…" : token;
        context.textAlign = "right";
        context.fillText(text, gutter - 6, gutter + (i + 0.5) * size);
        context.save();
        context.translate(gutter + (i + 0.5) * size, gutter - 6);
        context.rotate(-Math.PI / 2);
        context.textAlign = "left";
        context.fillText(text, 0, 0);
        context.restore();
      });
    };
    const readCell = ([i, j]) => {
      const map = current();
      const weights = larges.map((large) => {
        const weight = value(map, layerOf(large), state.head, i, j) * map.scale;
        return `${large.dataset.name ? `${large.dataset.name} ` : ""}${Number(weight.toPrecision(2))}`;
      });
      readout.textContent = `“${tokens[i]}” (${i}) gives “${tokens[j]}” (${j}) the weight ${weights.join(", ")}`;
    };
    const draw = () => {
      if (grid) {
        title.textContent = `${current().name} · layer ${state.layer} · head ${state.head}`;
        grid.setAttribute("aria-label", `All heads of ${current().name}`);
        larges[0].setAttribute("aria-label", title.textContent);
      }
      readout.textContent = "Point at a cell to read its weight, or walk with the arrow keys.";
      if (state.cell) readCell(state.cell);
      drawGrid();
      larges.forEach(drawLarge);
    };

    const tabs = viewer.querySelector(".tabs");
    if (tabs) maps.forEach((map, i) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = map.name;
      button.setAttribute("aria-pressed", String(i === 0));
      button.addEventListener("click", () => {
        state.map = i;
        [...tabs.children].forEach((other, j) => other.setAttribute("aria-pressed", String(i === j)));
        draw();
      });
      tabs.append(button);
    });
    grid?.addEventListener("click", (event) => {
      const box = grid.getBoundingClientRect();
      const size = (box.width - MARGIN) / current().heads;
      const clamp = (place, count) => Math.max(0, Math.min(count - 1, Math.floor(place)));
      state.head = clamp((event.clientX - box.left - MARGIN) / size, current().heads);
      state.layer = clamp((event.clientY - box.top - MARGIN) / size, current().layers);
      draw();
    });
    grid?.addEventListener("keydown", (event) => {
      const move = MOVES[event.key];
      if (!move) return;
      event.preventDefault();
      state.layer = (state.layer + move[0] + current().layers) % current().layers;
      state.head = (state.head + move[1] + current().heads) % current().heads;
      draw();
    });
    larges.forEach((large) => {
      large.addEventListener("pointermove", (event) => {
        const box = large.getBoundingClientRect();
        const j = Math.floor((event.clientX - box.left - frame.gutter) / frame.size);
        const i = Math.floor((event.clientY - box.top - frame.gutter) / frame.size);
        if (i >= 0 && j >= 0 && i < current().queries && j < current().keys) readCell([i, j]);
      });
      large.addEventListener("keydown", (event) => {
        const move = MOVES[event.key];
        if (!move) return;
        event.preventDefault();
        const last = [current().queries - 1, current().keys - 1];
        state.cell = state.cell ? state.cell.map((place, axis) => Math.max(0, Math.min(last[axis], place + move[axis]))) : [0, 0];
        draw();
      });
      large.addEventListener("blur", () => { state.cell = null; draw(); });
    });
    document.addEventListener("themechange", draw);
    addEventListener("resize", draw);
    draw();
  };
  document.querySelectorAll(".maps").forEach(setUp);
})();
