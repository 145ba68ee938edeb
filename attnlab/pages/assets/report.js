"use strict";
// Every page: switching the theme, sorting tables, values under the pointer, hiding series, downloads.
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  const theme = document.querySelector("button.theme");
  const isDark = () => getComputedStyle(root).colorScheme === "dark";
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
    document.dispatchEvent(new Event("themechange"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    nameTheme();
    document.dispatchEvent(new Event("themechange"));
  });
  nameTheme();

  // Numbers sort as numbers and before words; a missing number goes last either way.
  const sortKey = (cell) => cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  const compare = (a, b, sign) => {
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    if (typeof a === "number") return -1;
    if (typeof b === "number") return 1;
    return sign * a.localeCompare(b, undefined, { numeric: true });
  };
  for (const table of all("table")) {
    all("thead th", table).forEach((heading, column) => {
      heading.querySelector("button")?.addEventListener("click", () => {
        const ascending = heading.getAttribute("aria-sort") !== "ascending";
        all("thead th", table).forEach((other) => other.setAttribute("aria-sort", "none"));
        heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        const rows = all("tbody tr", table);
        const keyed = rows.map((row) => [sortKey(row.cells[column]), row]);
        keyed.sort((a, b) => compare(a[0], b[0], ascending ? 1 : -1));
        table.tBodies[0].append(...keyed.map(([, row]) => row));
      });
    });
  }

  // A saved picture has no style sheet, so the computed style is written into a copy of it.
  const COPIED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "font-size",
    "font-family", "font-weight", "text-anchor", "paint-order", "display"];
  const SVG = "http://www.w3.org/2000/svg";
  const make = (tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const standalone = (svg) => {
    const copy = svg.cloneNode(true);
    copy.querySelectorAll(".cross").forEach((node) => node.remove());
    const originals = all("*", svg).filter((node) => !node.classList.contains("cross"));
    all("*", copy).forEach((node, i) => {
      const style = getComputedStyle(originals[i]);
      node.setAttribute("style", COPIED.map((key) => `${key}:${style.getPropertyValue(key)}`).join(";"));
    });
    return copy;
  };
  const placed = (node, box) => {
    for (const [key, value] of Object.entries(box)) node.setAttribute(key, value);
    return node;
  };
  // The scale of a heat map: its end values and the colours between them.
  const scaleKey = (key, y, label) => {
    const [low, ramp, high] = key.children;
    const steps = [...ramp.children].map((step, i) =>
      make("rect", { x: 60 + 10 * i, y: y + 2, width: 10.5, height: 12, fill: getComputedStyle(step).backgroundColor }));
    return [make("text", { ...label, x: 52, y: y + 13, "text-anchor": "end" }, low.textContent), ...steps,
      make("text", { ...label, x: 68 + 10 * steps.length, y: y + 13 }, high.textContent)];
  };
  // One sheet with the title, the pictures in rows, the scale and the legend.
  const poster = (figure) => {
    const { backgroundColor, color, fontFamily } = getComputedStyle(figure);
    const label = { "font-family": fontFamily, "font-size": 13, fill: color };
    const parts = [make("text", { ...label, x: 12, y: 22, "font-weight": 600 }, figure.querySelector("h3").textContent)];
    const grids = all(".heat", figure);
    const pictures = grids.length ? all(".heat > svg", figure) : all(".plot > svg", figure);
    const gap = grids.length ? 24 : 0;
    const sheetWidth = grids.length ? 760 : 560;
    let [x, y, below, width] = [0, 34, 34, 0];
    const key = figure.querySelector(".key");
    if (key) { parts.push(...scaleKey(key, y, label)); y = below = y + 30; }
    pictures.forEach((svg, i) => {
      const [, , w, h] = svg.getAttribute("viewBox").split(" ").map(Number);
      if (x > 0 && x + w > sheetWidth) { x = 0; y = below; }
      const title = grids.length ? 22 : 0;
      if (title) parts.push(make("text", { ...label, x: x + 12, y: y + 14 }, grids[i].querySelector("h4").textContent));
      parts.push(placed(standalone(svg), { x, y: y + title, width: w, height: h }));
      below = Math.max(below, y + title + h + 10);
      x += w + gap;
      width = Math.max(width, x);
    });
    const legend = figure.querySelector(".legend");
    if (legend && getComputedStyle(legend).display !== "none") {
      all("li:not(.off)", legend).forEach((entry) => {
        parts.push(placed(standalone(entry.querySelector("svg")), { x: 12, y: below, width: 16, height: 16 }));
        parts.push(make("text", { ...label, x: 36, y: below + 13 }, entry.textContent));
        below += 20;
      });
    }
    const size = { width: Math.max(width, 300), height: below + 8 };
    const sheet = placed(make("svg", { xmlns: SVG }), { ...size, viewBox: `0 0 ${size.width} ${size.height}` });
    sheet.append(make("rect", { ...size, fill: backgroundColor }), ...parts);
    return new XMLSerializer().serializeToString(sheet);
  };
  const png = async (text) => {
    const image = new Image();
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = image.width * 3;
    canvas.height = image.height * 3;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  };

  const number = (value) => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  const showValuesUnderPointer = (figure, hover) => {
    const plot = figure.querySelector(".plot");
    const svg = plot.querySelector("svg");
    const [low, high, start, end, log] = hover.x;
    const place = (value) => (log ? Math.log10(value) : value);
    const toPixel = (x) => start + (place(x) - place(low)) / (place(high) - place(low) || 1) * (end - start);
    let tip = null;
    let cross = null;
    const leave = () => { tip?.remove(); cross?.remove(); tip = cross = null; };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      leave();
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      const steps = new Set(hover.series.flatMap((s) => s.x.filter((x) => !log || x > 0)));
      let nearest = null;
      for (const x of steps) if (nearest === null || Math.abs(toPixel(x) - at) < Math.abs(toPixel(nearest) - at)) nearest = x;
      if (nearest === null) return;
      const x = toPixel(nearest);
      cross = make("line", { x1: x, x2: x, y1: hover.y[2], y2: hover.y[3], class: "cross" });
      svg.append(cross);
      tip = document.createElement("div");
      tip.className = "tip";
      const head = document.createElement("b");
      head.textContent = `${hover.label} ${number(nearest)}`;
      tip.append(head);
      for (const series of hover.series) {
        const value = series.y[series.x.indexOf(nearest)];
        if (value === undefined || value === null) continue;
        const line = document.createElement("div");
        line.className = series.colour;
        const swatch = document.createElement("i");
        line.append(swatch, `${hover.series.length > 1 ? series.name + ": " : ""}${number(value)}`);
        tip.append(line);
      }
      plot.append(tip);
      const left = x / svg.viewBox.baseVal.width * box.width;
      tip.style.left = `${Math.max(0, left > box.width / 2 ? left - tip.offsetWidth - 12 : left + 12)}px`;
      tip.style.top = "34px";
    });
  };

  for (const figure of all("figure.card")) {
    const payload = JSON.parse(figure.querySelector("script[type='application/json']")?.textContent ?? "{}");
    if (payload.hover) showValuesUnderPointer(figure, payload.hover);
    all(".legend li", figure).forEach((entry) => {
      const button = entry.querySelector("button");
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", String(!entry.classList.toggle("off")));
        all(".plot [data-series]", figure).filter((node) => node.dataset.series === entry.dataset.series)
          .forEach((node) => node.classList.toggle("off-series"));
      });
    });
    all("[data-download]", figure).forEach((button) => button.addEventListener("click", async () => {
      const kind = button.dataset.download;
      const name = `${figure.dataset.name}.${kind}`;
      if (kind === "csv") save(name, new Blob([csvOf(payload.table)], { type: "text/csv;charset=utf-8" }));
      if (kind === "svg") save(name, new Blob([poster(figure)], { type: "image/svg+xml" }));
      if (kind === "png") save(name, await png(poster(figure)));
    }));
  }
  all("[data-download-json]").forEach((button) => button.addEventListener("click", () => {
    const text = document.getElementById(button.dataset.downloadJson).textContent;
    save(`${button.dataset.name}.json`, new Blob([JSON.stringify(JSON.parse(text), null, 1)], { type: "application/json" }));
  }));
})();
