"""The explorer against bertviz on the same attention: size of the file, time until it is drawn, nodes, memory.

The model is BERT-base with random weights whose queries and keys are scaled until heads are as sharp as trained ones.
The peer is optional: --peer names a folder with bertviz (pip install --no-deps --target DIR bertviz==1.4.1), and
--libraries one with the three scripts it loads from a CDN (require.min.js, jquery.min.js, d3.min.js), which are served
from that folder, since without them its page is blank.

--long measures the page of ``attnlab explore --long`` alone, at its largest: 270 heads of 32,768 tokens, with random
statistics, which deflate worst. The targets stand beside the numbers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from storing import make_results, read_results, write_results

from attnlab.adapters import record
from attnlab.measure import median_seconds
from attnlab.pages.explorer import Exploration, Item, LayerMaps, Tokens, pack
from attnlab.reading.effective import effective_attention

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEYS = {"writing": ["tokens"], "page": ["tokens", "bits"], "against_bertviz": ["tokens"], "long": ["tokens", "heads"]}
CDN = "https://cdnjs.cloudflare.com/"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", type=Path, help="a folder with bertviz")
    parser.add_argument("--libraries", type=Path, help="a folder with the scripts it loads")
    parser.add_argument("--peer-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="where the result is written as JSON")
    parser.add_argument("--long", action="store_true", help="measure the page of a long text alone")
    options = parser.parse_args()
    if options.long:
        store(options, {"long": [measure_long(options.repeats)]}, {"repeats": options.repeats})
        return
    rows, writing, peers = [], [], []
    for n in options.tokens:
        attention, effective, row = measure_writing(n, options)
        writing.append(row)
        for precise in (False, True):
            rows.append(measure_page(attention, effective, n, precise=precise))
        if options.peer and n == options.peer_tokens:
            peers.append(measure_peer(attention, n, options, ours=rows[-2]))
    config = {"layers": options.layers, "heads": 12, "width": 768, "repeats": options.repeats}
    store(options, {"writing": writing, "page": rows, "against_bertviz": peers}, config)


def store(options: argparse.Namespace, tables: dict[str, list[dict[str, Any]]], config: dict[str, Any]) -> None:
    """Print the rows; with --out, put them into the file, where tables of another run stay."""
    for row in (row for rows in tables.values() for row in rows):
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    if options.out:
        result = make_results("explorer", None, tables, config=config, keys=KEYS)
        write_results(options.out, result, before=read_results(options.out))


@torch.no_grad()
def measure_writing(n: int, options: argparse.Namespace) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, Any]]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=options.layers), add_pooling_layer=False).eval()
    for layer in model.encoder.layer:
        for linear in (layer.attention.self.query, layer.attention.self.key):
            linear.weight.mul_(3.2)
    ids = torch.randint(1000, 20000, (1, n))
    with record(model) as trace:
        model(input_ids=ids)
    attention = [layer.weights()[0].numpy() for layer in trace]
    effective = [effective_attention(layer).weights[0].numpy() for layer in trace]
    folder = Path(tempfile.mkdtemp())

    def write(*, precise: bool) -> None:
        exploration(attention, effective, n, precise=precise).save(folder / "page.html")

    jobs = {
        "forward": lambda: model(input_ids=ids),
        "write": lambda: write(precise=False),
        "write_precise": lambda: write(precise=True),
        "readings": lambda: [(layer.weights(), effective_attention(layer)) for layer in trace],
    }
    times = median_seconds(jobs, repeats=options.repeats)
    shutil.rmtree(folder)
    seconds = {f"{name}_ms": round(1000 * value, 1) for name, value in times.items()}
    return (
        attention,
        effective,
        {"tokens": n, **seconds, "write_over_forward": round(times["write"] / times["forward"], 3)},
    )


def exploration(attention: list[np.ndarray], effective: list[np.ndarray], n: int, *, precise: bool) -> Exploration:
    layers = [
        LayerMaps("encoder", i, {"standard": w, "effective": e}, {"entropy": [0.0] * len(w)})
        for i, (w, e) in enumerate(zip(attention, effective, strict=True))
    ]
    text = {"source": Tokens(words(n), list(range(n)), [0] * n)}
    return Exploration(pack([Item("BERT", text, layers)], title="BERT-base", type_names=("word",), precise=precise))


def words(n: int) -> list[str]:
    return [f"word{i}" for i in range(n)]


def measure_page(attention: list[np.ndarray], effective: list[np.ndarray], n: int, *, precise: bool) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    page = exploration(attention, effective, n, precise=precise).save(folder / "page.html")
    row: dict[str, Any] = {"tokens": n, "bits": 16 if precise else 8, "MB": round(page.stat().st_size / 1e6, 2)}
    drawn = "html[data-drawn]:not([data-drawing])"
    switch = """async (key) => {
        const root = document.documentElement;
        const times = [];
        for (let i = 0; i < 24; i++) {
            const start = performance.now();
            document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, composed: true }));
            while ("drawing" in root.dataset) await new Promise((resolve) => setTimeout(resolve, 0));
            times.push(performance.now() - start);
        }
        return times;
    }"""
    with chromium() as browser:
        opened = []
        for _ in range(3):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            start = time.perf_counter()
            tab.goto(page.as_uri(), wait_until="commit")
            tab.wait_for_selector(drawn, state="attached", timeout=120_000)
            opened.append(time.perf_counter() - start)
            if len(opened) < 3:
                tab.close()
        paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        heads, layers = (tab.evaluate(switch, key) for key in ("ArrowRight", "ArrowDown"))
        row |= {
            "first_paint_s": round(paint / 1000, 3),
            "grid_drawn_s": round(statistics.median(opened), 3),
            "head_switch_ms": round(statistics.median(heads), 1),
            "layer_switch_ms": round(statistics.median(layers), 1),
            "nodes": tab.evaluate("document.querySelectorAll('*').length"),
            "tab_MB": round(tab_memory(browser), 0),
        }
    shutil.rmtree(folder)
    return row


def measure_long(repeats: int) -> dict[str, Any]:
    """The page of the longest text, opened offline ``repeats`` times, each time in a new tab."""
    from attnlab.pages.long import long_page, pack_long
    from tests.pages import long_examples as examples

    folder = Path(tempfile.mkdtemp())
    page = folder / "page.html"
    page.write_bytes(long_page(pack_long(examples.random_text(**examples.LARGEST))))
    requests: list[str] = []
    paints, drawn, switches = [], [], []
    with chromium() as browser:
        context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
        for _ in range(repeats):
            tab = context.new_page()
            tab.on("request", lambda request: requests.append(request.url))
            start = time.perf_counter()
            tab.goto(page.as_uri(), wait_until="commit")
            tab.wait_for_selector("html[data-drawn]:not([data-drawing])", state="attached", timeout=120_000)
            drawn.append(time.perf_counter() - start)
            paints.append(tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000)
            switches += tab.evaluate(examples.SWITCH_HEADS)
            memory, nodes = tab_memory(browser), tab.evaluate("document.querySelectorAll('*').length")
            tab.close()
    size = page.stat().st_size / 1e6
    shutil.rmtree(folder)
    return {
        "tokens": examples.LARGEST["length"],
        "heads": examples.LARGEST["layers"] * examples.LARGEST["heads"],
        "MB": round(size, 2),
        "MB_target": examples.MEGABYTES,
        "first_paint_s": round(statistics.median(paints), 3),
        "first_paint_s_target": examples.SECONDS_TO_PAINT,
        "drawn_s": round(statistics.median(drawn), 3),
        "head_switch_ms": round(statistics.median(switches), 1),
        "head_switch_ms_slowest": round(max(switches), 1),
        "head_switch_ms_target": examples.MILLISECONDS_TO_SWITCH,
        "requests_elsewhere": sum(not url.startswith((page.as_uri(), "blob:", "data:image/")) for url in requests),
        "nodes": nodes,
        "tab_MB": round(memory),
        # Processes that wanted a core: with more of them than cores, the times are too long.
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }


def measure_peer(
    attention: list[np.ndarray], n: int, options: argparse.Namespace, *, ours: dict[str, Any]
) -> dict[str, Any]:
    sys.path.insert(0, str(options.peer))
    from bertviz import model_view

    folder = Path(tempfile.mkdtemp())
    start = time.perf_counter()
    tensors = [torch.from_numpy(w)[None] for w in attention]
    html = model_view(tensors, words(n), html_action="return").data
    page = folder / "page.html"
    page.write_text(f"<!doctype html><body>{html}", encoding="utf-8")
    writing = time.perf_counter() - start
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.set_default_timeout(900_000)
        served = {path.name: path for path in options.libraries.glob("*.js")}
        tab.route(f"{CDN}**", lambda route: route.fulfill(path=str(served[route.request.url.rsplit("/", 1)[1]])))
        start = time.perf_counter()
        tab.goto(page.as_uri(), wait_until="commit", timeout=900_000)
        tab.wait_for_selector("#vis svg line", state="attached", timeout=900_000)
        tab.evaluate("new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 0)))")
        drawn = time.perf_counter() - start
        nodes = tab.evaluate("document.querySelectorAll('*').length")
        memory = tab_memory(browser)
    size = page.stat().st_size / 1e6
    shutil.rmtree(folder)
    return {
        "tokens": n,
        "bertviz_MB": round(size, 1),
        "bertviz_write_s": round(writing, 2),
        "bertviz_drawn_s": round(drawn, 1),
        "bertviz_nodes": nodes,
        "bertviz_tab_MB": round(memory),
        "size_ratio": round(size / ours["MB"], 1),
        "time_ratio": round(drawn / ours["grid_drawn_s"], 1),
        "node_ratio": round(nodes / ours["nodes"]),
    }


class chromium:  # noqa: N801 - a context manager that reads as a function
    def __enter__(self) -> Any:
        from playwright.sync_api import sync_playwright

        self.playwright = sync_playwright().start()
        self.browser = self.playwright.chromium.launch(executable_path=CHROMIUM)
        return self.browser

    def __exit__(self, *error: object) -> None:
        self.browser.close()
        self.playwright.stop()


def tab_memory(browser: Any) -> float:
    """The resident memory of the largest renderer in MB."""
    import psutil

    session = browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    return max(psutil.Process(int(one["id"])).memory_info().rss for one in processes if one["type"] == "renderer") / 1e6


if __name__ == "__main__":
    main()
