"""Packing: values to the stored precision, thumbnails, limits, sizes, and refusals in one sentence."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import numpy as np
import pytest

from attnlab.pages.explorer import Item, LayerMaps, Packed, Tokens, explorer_page, pack
from attnlab.pages.explorer.codec import encode, pooled
from attnlab.pages.explorer.page import ASSETS, MODULES, SHARED, script, style
from attnlab.pages.html import ASSETS as REPORTS
from attnlab.pages.html import asset, page

from .examples import NASTY, TOKENS, one_text, shown, softmax, text


def unpacked(packed: Packed, reading: int = 0, layer: int = 0, head: int = 0) -> np.ndarray:
    """One head as the page reads it."""
    packed_reading = packed.meta["items"][0]["stacks"][0]["readings"][reading]
    entry = packed_reading["layers"][layer]
    part = entry.get("full") or entry["small"]
    shape = packed_reading["size"] if "full" in entry else packed_reading["thumbnail"]
    rows, cols = shape
    stored = [(i, j) for j in range(cols) for i in range(j if part["causal"] else 0, rows)]
    size = len(stored) * (2 if packed.meta["precise"] else 1)
    # Whole maps are a stream each; thumbnails are one stream together.
    stream, place = (head, 0) if "full" in entry else (0, head * size)
    start = sum(part["lengths"][:stream])
    raw = zlib.decompress(base64.b64decode(packed.blobs[part["blob"]][start : start + part["lengths"][stream]]))
    data = np.frombuffer(raw, np.uint8)
    if part["differences"][stream]:
        data = data.cumsum(dtype=np.uint8)
    data = data[place : place + size]
    values = np.zeros(shape)
    at = tuple(np.array(stored).T)
    if packed.meta["precise"]:
        values[at] = data.reshape(2, -1).T.copy().view("<f2").astype(np.float64)[:, 0]
        return values
    steps = data.astype(np.float64) - (127 if entry["signed"] else 0)
    values[at] = np.where(data == 255, np.nan, steps * part["scales"][head])
    return values


def one_layer(w: np.ndarray, **more: Any) -> Packed:
    tokens = {"source": Tokens([str(i) for i in range(w.shape[1])])}
    return pack([Item("m", tokens, [LayerMaps("encoder", 0, {"standard": w})])], title="t", **more)


@pytest.mark.parametrize("n", [1, 5, 63, 64, 65, 100])
@pytest.mark.parametrize("sign", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_eight_bits_are_off_by_half_a_step_of_the_heads_own_scale(n: int, sign: float, causal: bool) -> None:
    w = softmax(n, 3, n, n) - sign * softmax(n + 1, 3, n, n)
    w = np.tril(w) if causal else w
    packed = one_layer(w)
    assert packed.meta["items"][0]["stacks"][0]["readings"][0]["layers"][0]["small"]["causal"] == (causal or n == 1)
    worst = 0.0
    for head in range(3):
        bound = np.abs(w[head]).max() / (127 if (w < 0).any() else 254) / 2
        worst = max(worst, bound)
        np.testing.assert_allclose(unpacked(packed, head=head), w[head], rtol=0, atol=bound * 1.001 + 1e-9)
    if n <= 64:
        assert packed.meta["error"] == pytest.approx(worst, rel=1e-5)


@pytest.mark.parametrize("n", [5, 70])
@pytest.mark.parametrize("causal", [False, True])
def test_precise_is_half_precision(n: int, causal: bool) -> None:
    w = np.tril(softmax(3, 2, n, n)) if causal else softmax(3, 2, n, n)
    np.testing.assert_array_equal(unpacked(one_layer(w, precise=True), head=1), w[1].astype(np.float16))


@pytest.mark.parametrize("sign", [0.0, 0.4])
def test_causal_maps_are_smaller_than_their_rows_deflated(sign: float) -> None:
    """Keys that all queries prefer, as in language models: 256 tokens take a tenth less than rows of bytes would."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(3, 256, 256)) + 2 * random.normal(size=(3, 1, 256))
    w = np.tril(np.exp(logits))
    w = w / w.sum(-1, keepdims=True)
    w = np.tril(w - sign * w.mean(1, keepdims=True))
    packed = one_layer(w.astype(np.float32))
    whole = packed.meta["items"][0]["stacks"][0]["readings"][0]["layers"][0]["full"]
    scales = np.array(whole["scales"])[:, None, None]
    steps = np.round(w / scales + (127 if sign else 0)).astype(np.uint8)
    rows = sum(len(base64.b64encode(zlib.compress(one.tobytes(), 9))) for one in steps)
    assert sum(whole["lengths"]) < 0.9 * rows


def test_a_thumbnail_is_the_mean_weight_between_blocks() -> None:
    w = softmax(1, 2, 130, 130).astype(np.float64)
    small = pooled(w, 64)
    assert small.shape == (2, 64, 64)
    np.testing.assert_allclose(small.sum(-1), 1)
    edges = [i for i in range(130) if i * 64 // 130 == 7]
    np.testing.assert_allclose(small[0, 7, 7], w[0][np.ix_(edges, edges)].sum(1).mean())
    np.testing.assert_allclose(pooled(w[:1] - w[1:], 64), small[:1] - small[1:], atol=1e-12)


def test_maps_that_are_flat_zero_or_nan() -> None:
    np.testing.assert_allclose(unpacked(one_layer(np.full((1, 3, 3), 0.25))), 0.25, rtol=1e-6)
    assert (unpacked(one_layer(np.zeros((1, 3, 3)))) == 0).all()
    w = softmax(1, 1, 3, 3)
    w[0, 0, 0], w[0, 1, 1] = np.nan, np.inf
    packed = one_layer(w)
    assert np.isnan(unpacked(packed)[[0, 1], [0, 1]]).all()
    assert unpacked(packed)[2, 2] == pytest.approx(w[0, 2, 2], abs=3e-3)
    assert packed.meta["notes"] == ["2 weights are not numbers (NaN or infinity); they are drawn hatched."]
    assert np.isnan(unpacked(one_layer(np.full((1, 2, 2), np.nan)))).all()
    assert encode(w, signed=False, precise=True).missing == 2


def test_only_chosen_layers_are_whole_and_the_page_says_so() -> None:
    layers = [LayerMaps("decoder", i, {"standard": softmax(i, 1, 70, 70)}) for i in range(3)]
    item = Item("m", {"target": Tokens([str(i) for i in range(70)])}, layers)
    for more in ({"layers": [1]}, {"limit": 70 * 70}):
        packed = pack([item], title="t", **more)
        (reading,) = packed.meta["items"][0]["stacks"][0]["readings"]
        whole = [i for i, entry in enumerate(reading["layers"]) if "full" in entry]
        assert whole == ([1] if "layers" in more else [0])
        (note,) = packed.meta["notes"]
        assert note.startswith("Layers kept as thumbnails of at most 64 x 64 cells only: decoder ")


def test_layers_to_keep_must_exist() -> None:
    w = np.full((1, 2, 2), 0.5, np.float32)
    item = Item("m", {"target": Tokens(["a", "b"])}, [LayerMaps("decoder", i, {"standard": w}) for i in range(3)])
    with pytest.raises(ValueError, match="no layer 3, 99 to keep whole; the layers are 0 to 2"):
        pack([item], title="t", layers=[1, 99, 3])


@pytest.mark.slow
def test_four_thousand_tokens() -> None:
    w = np.zeros((1, 4096, 4096), np.float32)
    w[0, np.arange(4096), np.arange(4096) // 2] = 1
    item = Item("m", {"target": Tokens(["x"] * 4096)}, [LayerMaps("decoder", i, {"standard": w}) for i in range(2)])
    packed = pack([item], title="t", layers=[1])
    assert sum(map(len, packed.blobs.values())) < 200_000
    np.testing.assert_allclose(unpacked(packed, layer=1), w[0], rtol=1e-8)
    assert packed.meta["items"][0]["stacks"][0]["readings"][0]["thumbnail"] == [64, 64]


@pytest.mark.parametrize(
    ("tokens", "layer", "message"),
    [
        ([], LayerMaps("encoder", 0, {"standard": np.zeros((1, 0, 0))}), "source text is empty"),
        (["a"], LayerMaps("encoder", 0, {"standard": np.zeros((1, 2, 2))}), "are 2 x 2, but there are 1 source tokens"),
        (
            ["a"],
            LayerMaps("encoder", 0, {"standard": np.zeros((2, 2))}),
            "must be .head, query, key., none of them empty",
        ),
        (
            ["a"],
            LayerMaps("middle", 0, {"standard": np.zeros((1, 1, 1))}),
            "kind must be one of encoder, decoder, cross",
        ),
        (["a"], LayerMaps("decoder", 0, {"standard": np.zeros((1, 1, 1))}), "there are 0 target tokens"),
    ],
)
def test_mistakes_are_sentences(tokens: list[str], layer: LayerMaps, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([Item("m", {"source": Tokens(tokens)}, [layer])], title="t")


def test_nothing_to_show_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to explore"):
        pack([], title="t")
    with pytest.raises(ValueError, match="holds no attention layer"):
        pack([Item("m", {"source": Tokens(["a"])}, [])], title="t")
    with pytest.raises(ValueError, match="words must have one number per token: got 2 for 1"):
        shown([Item("m", {"source": Tokens(["a"], [0, 1])}, [])])


def test_the_page_forbids_everything_from_elsewhere_and_tokens_stay_data() -> None:
    page = one_text()[0].html().decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src &#x27;none&#x27;; script-src &#x27;sha256-")
    assert "unsafe" not in policy
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page
    assert NASTY not in page
    # Every element that is a script is ours: data, blobs and one module.
    assert len(re.findall(r"</script", page)) == 1 + len(one_text()[0].packed.blobs) + 1
    meta = json.loads(re.search(r'id="attnlab-meta">(.*?)</script>', page)[1])
    assert meta["texts"][0]["source"]["tokens"] == TOKENS


def test_texts_that_items_share_are_stored_once() -> None:
    items = [
        Item(f"step {i}", {"source": text(list("ab"))}, [LayerMaps("encoder", 0, {"standard": softmax(i, 1, 2, 2)})])
        for i in range(4)
    ]
    assert len(shown(items).packed.meta["texts"]) == 1


def test_the_script_is_its_modules_and_nothing_else() -> None:
    code = script("page")
    for name in MODULES.split():
        source = asset(f"{name}.js") if name in SHARED else (ASSETS / f"{name}.js").read_text(encoding="utf-8")
        body = [line for line in source.splitlines() if line and not line.startswith(("import ", "export "))]
        assert all(line in code for line in body), name
    assert not re.search(r"^(import|export) ", code, re.MULTILINE)
    assert {path.stem for path in ASSETS.glob("*.js")} == {*MODULES.split(), "page", "widget"} - {*SHARED}
    assert script("widget").rstrip().endswith("export default { render };")


def test_reports_and_explorer_share_their_downloads() -> None:
    """Quoting a cell of a CSV file is written once, and every page has it."""
    quoting = "replaceAll('\"', '\"\"')"
    quoting_files = [
        path.name for folder in (ASSETS, REPORTS) for path in folder.glob("*.js") if quoting in path.read_text()
    ]
    assert quoting_files == ["files.js"]
    assert quoting in script("page")
    report = page("a title", "a body")
    assert quoting in report
    assert "export " not in report


def test_reports_and_explorer_share_their_style() -> None:
    assert asset("report.css") in style()
    hosted = style(host=True)
    assert ":root" not in hosted
    assert ":host(:not([data-theme=light]))" in hosted
    assert ":host([data-theme=dark])" in hosted


def test_the_size_of_a_page_of_twelve_by_twelve_heads_at_128_tokens() -> None:
    """Standard and effective in 8 bits: at most 5 MB, as sharp as trained heads are; half precision at most 13 MB."""
    layers = []
    for i in range(12):
        w = softmax(i, 12, 128, 128)
        layers.append(LayerMaps("encoder", i, {"standard": w, "effective": w - softmax(100 + i, 12, 128, 128) / 4}))
    item = Item("BERT", {"source": Tokens([f"word{i}" for i in range(128)])}, layers)
    assert len(explorer_page(pack([item], title="t"))) < 5e6
    assert len(explorer_page(pack([item], title="t", precise=True))) < 13e6
