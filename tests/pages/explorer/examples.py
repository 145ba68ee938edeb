"""Small explorations whose numbers are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnlab.pages.explorer import Exploration, Item, LayerMaps, Tokens, pack
from attnlab.pages.explorer.tokens import TYPE_NAMES, guess_types, guess_words

NASTY = "<script>alert(1)</script>"
TOKENS = ["[CLS]", "un", "##happy", NASTY, "</script>", "=1+1", "سلام", "🎉", "😀", "[SEP]", "]]>"]
COLUMNS = (
    {"key": "entropy", "title": "entropy", "help": "in nats"},
    {"key": "class", "title": "pattern", "help": "what it looks like"},
)


def softmax(seed: int, *shape: int) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=shape) * 2
    e = np.exp(x - x.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)).astype(np.float32)


def text(tokens: Sequence[str]) -> Tokens:
    words = guess_words(tokens)
    return Tokens(tokens, words, guess_types(tokens, words))


def layer(number: int, heads: int, n: int, *, signed: bool = True) -> LayerMaps:
    w = softmax(number, heads, n, n)
    maps = {"standard": w}
    if signed:
        maps["effective"] = w - softmax(100 + number, heads, n, n) / 2
    statistics = {
        "entropy": [round(0.1 * ((7 * number + 3 * head) % 11), 3) for head in range(heads)],
        "class": ["diagonal" if (number + head) % 2 else "vertical" for head in range(heads)],
    }
    return LayerMaps("encoder", number, maps, statistics)


def one_text(
    tokens: Sequence[str] = TOKENS, *, layers: int = 3, heads: int = 5, **more: Any
) -> tuple[Exploration, list[LayerMaps]]:
    """(the exploration, the layers that went into it)."""
    made = [layer(i, heads, len(tokens)) for i in range(layers)]
    return shown([Item("BERT", {"source": text(tokens)}, made)], **more), made


def shown(items: Sequence[Item], **more: Any) -> Exploration:
    settings: Mapping[str, Any] = {"title": "BERT", "type_names": TYPE_NAMES, "columns": COLUMNS, **more}
    return Exploration(pack(items, **settings))


def translation() -> tuple[Exploration, dict[str, np.ndarray]]:
    """Encoder, decoder and cross attention over two texts of different lengths."""
    source, target = ["the", "cat", "sat", "."], ["▁die", "▁Katze", "▁saß", "▁da", ".", "</s>"]
    n, m = len(source), len(target)
    maps = {"encoder": softmax(1, 2, n, n), "decoder": softmax(2, 2, m, m), "cross": softmax(3, 2, m, n)}
    layers = [LayerMaps(kind, 0, {"standard": w}) for kind, w in maps.items()]
    return shown([Item("marian", {"source": text(source), "target": text(target)}, layers)], columns=()), maps
