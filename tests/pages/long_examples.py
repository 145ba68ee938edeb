"""Long texts: one that a small generated model reads, and one of random statistics; and what a page must keep to."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
import transformers as tf

from attnlab.pages.long import HeadLanes, LayerSquares, LongText
from tests.adapters.test_load import write_tokenizer
from tests.adapters.zoo import LLAMA

# A needle stands once, and some markup, which is text.
NEEDLE, MARKUP = "the needle lies here", "<script>alert(1)</script>"
# What the page of LARGEST must keep to: benchmarks/explorer.py measures it, and the slow tests assert it.
MEGABYTES, SECONDS_TO_PAINT, MILLISECONDS_TO_SWITCH = 20, 1.0, 100
LARGEST = {"length": 32_768, "layers": 30, "heads": 9}
# In the page: the milliseconds of some switches from head to head, by key, until the new head is drawn.
SWITCH_HEADS = """async () => {
    const [grid, host, times] = [document.querySelector(".l-grid"), document.documentElement, []];
    for (const key of ["ArrowDown", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft"]) {
        const start = performance.now();
        grid.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        while ("drawing" in host.dataset) await new Promise((next) => setTimeout(next));
        times.push(performance.now() - start);
    }
    return times;
}"""
STATISTICS = ("entropy", "sinks", "recent", "distance", "norm", "removed", "received")


def write_model(folder: Path) -> Path:
    """A Llama of 3 layers with random weights that are large enough to make heads differ."""
    torch.manual_seed(5)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA | {"max_position_embeddings": 512}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_text(file: Path, words: int = 420) -> Path:
    """Words "a" and "b" in lines, with the needle and the markup in the middle."""
    draw = random.Random(3)
    letters = draw.choices("ab", k=words)
    letters[200:200] = [NEEDLE, MARKUP]
    lines = [" ".join(letters[i : i + 20]) for i in range(0, len(letters), 20)]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def random_text(length: int, layers: int, heads: int, *, chosen: int = 16, squares: int = 128) -> LongText:
    """Statistics that no deflating makes small: places, lanes and squares are uniform, weights those of a softmax."""
    draw = np.random.default_rng(0)
    lower = np.tril(np.ones((squares, squares), dtype=np.float32))

    def head(number: int) -> HeadLanes:
        places = (draw.random((length, 8)) * (np.arange(length)[:, None] + 1)).astype(np.int64)
        scores = np.exp(2 * draw.normal(size=(length, 64)))
        weights = scores / (scores.sum(1, keepdims=True) * (1 + np.arange(length) / 64)[:, None])
        lanes = {name: draw.random(length) for name in STATISTICS}
        return HeadLanes(number % layers, number % heads, lanes, -np.sort(-weights, 1)[:, :8], places)

    return LongText(
        title="random",
        subtitle="",
        tokens=[f"word{i % 997}" for i in range(length)],
        before=[" "] * length,
        block=-(-length // squares),
        layers=[
            LayerSquares(i, draw.random((heads, squares, squares), np.float32) ** 2 * lower) for i in range(layers)
        ],
        chosen=[head(i) for i in range(chosen)],
        choice="At random.",
        statistics={name: (name, "") for name in STATISTICS},
    )
