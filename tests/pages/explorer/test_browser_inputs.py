"""The explorer in headless Chromium: every kind of input, and odd ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlab.pages.explorer import Item, LayerMaps, Tokens, explore_run
from attnlab.pages.explorer.page import script, style

from .conftest import press, settle, until
from .examples import one_text, shown, softmax, text, translation
from .pointer import Look, point_at, save, title, value_and_error

pytestmark = pytest.mark.browser


def test_encoder_decoder_and_cross(look: Look) -> None:
    exploration, maps = translation()
    page = look(exploration, fragment="layer=0&head=0")
    for kind in ("decoder", "cross", "encoder"):
        press(page, "a")
        assert page.locator("[aria-label='Kind of attention'] [aria-pressed=true]").inner_text() == kind
        last = [n - 1 for n in maps[kind].shape[1:]]
        value, error = value_and_error(point_at(page, *last))
        assert abs(value - maps[kind][0, last[0], last[1]]) <= error
        press(page, "t", "l", "m")


def test_two_texts_of_different_lengths_stand_side_by_side(look: Look) -> None:
    maps = [softmax(i, 2, n, n) for i, n in enumerate((3, 5))]
    items = [
        Item(f"text {i + 1}", {"source": text(list("abcde")[: len(w[0])])}, [LayerMaps("encoder", 0, {"standard": w})])
        for i, w in enumerate(maps)
    ]
    page = look(shown(items, panes=[(0, "standard"), (1, "standard")]))
    value, error = value_and_error(point_at(page, 4, 4, pane=1))
    assert abs(value - maps[1][0, 4, 4]) <= error
    assert [o.inner_text() for o in page.locator(".x-pane select").first.locator("option").all()] == [
        "text 1 · standard",
        "text 2 · standard",
    ]
    # Texts of different lengths have no difference.
    assert not page.locator(".x-pane select").nth(1).is_visible()


def test_an_approximation_beside_what_it_approximates(look: Look) -> None:
    w, approx, lost = softmax(1, 2, 7, 7), softmax(2, 2, 7, 7), np.random.default_rng(0).normal(size=(2, 7, 3))
    maps = {"standard": w, "top-r:r=2": approx, "(W - Ŵ) v": lost}
    layer = LayerMaps("encoder", 0, maps, {"output": [0.25, 0.5]}, frozenset({"(W - Ŵ) v"}))
    columns = [{"key": "output", "title": "|(W - Ŵ) v| / |W v|", "help": "off"}]
    items = [Item("BERT", {"source": text(list("abcdefg"))}, [layer])]
    page = look(shown(items, columns=columns, panes=[(0, name) for name in maps]), fragment="head=1")
    value, error = value_and_error(point_at(page, 6, 2, pane=2))
    assert abs(value - lost[1, 6, 2]) <= error
    assert "dimension 2" in page.locator(".x-readout").nth(2).inner_text()
    assert page.inner_text(".x-facts:not(.x-why)") == "|(W - Ŵ) v| / |W v| 0.5"
    press(page, "l", "t")


def test_a_run_is_played_over_its_steps(look: Look, tmp_path: Path) -> None:
    import torch

    from attnlab.reading.timeline import record_step

    tokens = ["[CLS]", "a", "cat", "[SEP]"]
    maps = {step: torch.from_numpy(softmax(step, 1, 2, 4, 4)) for step in (0, 10, 40)}
    for step, w in maps.items():
        losses = torch.tensor([[step / 10, 7.0]])
        record_step(tmp_path, step, {("encoder", 3): w}, tokens=tokens, scalars={"guidance loss": losses, "loss": 1.0})
    page = look(explore_run(tmp_path))
    assert page.inner_text(".x-step") == "step 0"
    assert page.inner_text(".x-time .note") == "guidance loss, head 0 of layer 3: 0 at step 0"
    press(page, ".", ".")
    assert page.inner_text(".x-step") == "step 40"
    value, error = value_and_error(point_at(page, 2, 1))
    assert abs(value - maps[40][0, 0, 2, 1].item()) <= error + 1e-3
    page.select_option(".x-time select", "loss")
    settle(page)
    assert page.inner_text(".x-time .note") == "loss: 1 at step 40"
    page.click(".x-play")
    assert page.inner_text(".x-play") == "Pause"
    until(page, "document.querySelector('.x-step').textContent === 'step 10'")
    page.click(".x-play")
    assert page.inner_text(".x-play") == "Play"
    page.locator(".x-time input").fill("0")
    settle(page)
    assert page.inner_text(".x-step") == "step 0"


def test_nan_is_drawn_and_reported(look: Look) -> None:
    w = softmax(1, 1, 3, 3)
    w[0, 1, 2] = np.nan
    flat = np.full((1, 3, 3), 1 / 3, dtype=np.float32)
    layers = [LayerMaps("encoder", i, {"standard": maps}) for i, maps in enumerate((w, flat, np.full_like(w, np.nan)))]
    page = look(shown([Item("BERT", {"source": text(list("abc"))}, layers)]))
    assert page.inner_text(".x-note") == "10 weights are not numbers (NaN or infinity); they are drawn hatched."
    assert point_at(page, 1, 2).endswith(": not a number")
    assert value_and_error(point_at(page, 1, 1))[0] == pytest.approx(w[0, 1, 1], abs=3e-3)
    press(page, "l", "t", "m", "ArrowDown")
    assert value_and_error(point_at(page, 2, 0))[0] == pytest.approx(1 / 3, abs=1e-3)
    press(page, "ArrowDown", "l", "t")
    assert json.loads(save(page, "json"))["panes"][0]["weights"][0] == [None, None, None]


def test_one_token(look: Look) -> None:
    one = LayerMaps("encoder", 0, {"standard": np.ones((1, 1, 1), dtype=np.float32)})
    page = look(shown([Item("BERT", {"source": Tokens(["hm"])}, [one])]))
    assert value_and_error(point_at(page, 0, 0))[0] == 1
    press(page, "l", "t", "m", "+", "w")


def test_two_thousand_heads(look: Look) -> None:
    layers = [layer_of(i, 40, 5) for i in range(50)]
    page = look(shown([Item("big", {"source": text(list("abcde"))}, layers)], heads=2000), fragment="layer=49&head=39")
    assert title(page) == "Layer 49 · head 39"
    assert page.evaluate("document.querySelectorAll('*').length") < 1000
    press(page, "ArrowRight")
    assert title(page) == "Layer 49 · head 0"
    wide = look(shown([Item("wide", {"source": text(list("abcde"))}, [layer_of(0, 2000, 5)])], heads=2000))
    margin, size, per_row = map(float, wide.locator(".x-grid").get_attribute("data-frame").split())
    wide.locator(".x-grid").click(position={"x": margin + 2.5 * size, "y": margin + 3.5 * size})
    settle(wide)
    assert title(wide) == f"Layer 0 · head {3 * int(per_row) + 2}"


def layer_of(number: int, heads: int, n: int) -> LayerMaps:
    return LayerMaps("encoder", number, {"standard": softmax(number, heads, n, n)}, {"entropy": [0.0] * heads})


def test_a_long_text_keeps_the_chosen_layers_whole(look: Look) -> None:
    n = 150
    made = [softmax(i, 1, n, n) for i in range(2)]
    layers = [LayerMaps("decoder", i, {"standard": w}) for i, w in enumerate(made)]
    items = [Item("gpt", {"target": text([f"t{i}" for i in range(n)])}, layers)]
    page = look(shown(items, layers=[1]), fragment="layer=0&head=0")
    assert page.inner_text(".x-note").startswith("Layers kept as thumbnails of at most 64 x 64 cells only: decoder 0.")
    assert "150" not in point_at(page, 1, 2)
    # Block 1 of 64 holds tokens 3 and 4, block 2 tokens 5 and 6.
    readout = point_at(page, 1, 2)
    assert "“t3 … t4” (1) → “t5 … t7” (2)" in readout
    value, error = value_and_error(readout)
    assert abs(value - made[0][0, 3:5, 5:8].sum(1).mean()) <= error
    press(page, "ArrowDown", "+", "+", "+", "+")
    value, error = value_and_error(point_at(page, 75, 75))
    assert abs(value - made[1][0, 75, 75]) <= error


def test_the_same_view_in_a_notebook(browser: Any) -> None:
    """anywidget imports the module and calls render; the style stays in its shadow root."""
    exploration, layers = one_text()
    places, start = {}, 0
    for name, blob in exploration.packed.blobs.items():
        places[name] = [start, len(blob)]
        start += len(blob)
    traits = {
        "meta": json.dumps(exploration.packed.meta),
        "places": json.dumps(places),
        "style": style(host=True),
        "blobs": b"".join(exploration.packed.blobs.values()).decode(),
    }
    context = browser.new_context()
    blank = context.new_page()
    trouble: list[str] = []
    blank.on("console", lambda message: trouble.append(message.text))
    blank.on("pageerror", lambda error: trouble.append(str(error)))
    blank.set_content("<!doctype html><body data-jp-theme-light='false'><div id=cell style='width:1000px'></div>")
    blank.evaluate(
        """async ([code, traits]) => {
            const module = await import("data:text/javascript;charset=utf-8," + encodeURIComponent(code));
            const bytes = new TextEncoder().encode(traits.blobs);
            const model = { get: (name) => name === "blobs" ? new DataView(bytes.buffer) : traits[name] };
            module.default.render({ model, el: document.getElementById("cell") });
        }""",
        [script("widget"), traits],
    )
    blank.wait_for_selector("#cell div[data-drawn]")
    host = blank.locator("#cell > div")
    assert host.locator("h2").nth(0).inner_text() == "All heads"
    host.locator(".x-grid").focus()
    opens = exploration.packed.meta["opens"]
    layer, head = (opens["layer"] + 1) % len(layers), opens["head"]
    blank.keyboard.press("ArrowDown")
    title = f"Layer {layer} · head {head}"
    until(
        blank,
        f"document.querySelector('#cell > div').shadowRoot.querySelector('.x-head h2').textContent === '{title}'",
    )
    canvas = host.locator(".x-large")
    canvas.scroll_into_view_if_needed()
    left, over, size, _, _ = map(float, canvas.get_attribute("data-frame").split())
    box = canvas.bounding_box()
    blank.mouse.move(box["x"] + left + 2.5 * size, box["y"] + over + 1.5 * size)
    until(
        blank, "document.querySelector('#cell > div').shadowRoot.querySelector('.x-readout').textContent.includes('±')"
    )
    value, error = value_and_error(host.locator(".x-readout").inner_text())
    assert abs(value - layers[layer].maps["standard"][head, 1, 2]) <= error
    background = blank.evaluate("getComputedStyle(document.querySelector('#cell > div')).backgroundColor")
    assert background == "rgb(16, 20, 26)"
    assert trouble == []
    context.close()
