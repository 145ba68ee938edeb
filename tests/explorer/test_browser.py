"""The explorer in headless Chromium: every view, the numbers under the pointer, keys, files, links, sizes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlab.explorer import Item, LayerMaps, Tokens, explore_run
from attnlab.explorer.page import script, style

from .conftest import press, settle, until
from .examples import NASTY, TOKENS, one_text, shown, softmax, text, translation

pytestmark = pytest.mark.browser
Look = Callable[..., Any]

# Set ATTNLAB_SCREENSHOTS to a folder to keep the pictures and look at them.
SCREENSHOTS = os.environ.get("ATTNLAB_SCREENSHOTS")

MINUS = "\N{MINUS SIGN}"


def point_at(page: Any, query: int, key: int, pane: int = 0) -> str:
    """Put the pointer on a cell; what the readout says then."""
    canvas = page.locator(".x-large").nth(pane)
    canvas.scroll_into_view_if_needed()
    left, over, size, x, y = map(float, canvas.get_attribute("data-frame").split())
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + left + (key + 0.5 - x) * size, box["y"] + over + (query + 0.5 - y) * size)
    settle(page)
    return page.locator(".x-readout").nth(pane).inner_text()


def told(readout: str) -> tuple[float, float]:
    """(value, error) of a readout."""
    value, error = re.search(r": (\S+) ± (\S+)$", readout.replace(MINUS, "-")).groups()
    # Both are rounded for reading, the error to two digits.
    return float(value), float(error) * 1.06


def save(page: Any, kind: str) -> bytes:
    with page.expect_download() as waiting:
        page.click(f"[data-export={kind}]")
    return Path(waiting.value.path()).read_bytes()


def title(page: Any) -> str:
    return page.inner_text(".x-head h2")


@pytest.mark.parametrize("width", [390, 1280, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_screen(look: Look, tmp_path: Path, width: int, scheme: str) -> None:
    exploration, _ = one_text()
    page = look(exploration, width=width, scheme=scheme, fragment="panes=0:standard|0:effective" if width > 390 else "")
    picture = Path(SCREENSHOTS or tmp_path) / f"explorer-{width}-{scheme}.png"
    page.screenshot(path=str(picture), full_page=True)
    assert picture.stat().st_size > 20_000
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = page.evaluate(
        """() => [...document.querySelectorAll("#attnlab *")].filter((node) => {
            const box = node.getBoundingClientRect();
            return !node.closest(".x-rows") && box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
        }).map((node) => node.outerHTML.slice(0, 120))"""
    )
    assert outside == []
    assert page.evaluate("document.querySelectorAll('*').length") < 1000


@pytest.mark.parametrize("precise", [False, True])
def test_the_number_under_the_pointer_is_the_tensor(look: Look, precise: bool) -> None:
    exploration, layers = one_text(precise=precise)
    page = look(exploration, fragment="layer=1&head=3&panes=0:standard|0:effective")
    for query, key in ((0, 0), (3, 7), (10, 2), (10, 10)):
        for pane, reading in enumerate(("standard", "effective")):
            point_at(page, query, key)
            readout = page.locator(".x-readout").nth(pane).inner_text()
            assert f"“{TOKENS[query]}” ({query}) → “{TOKENS[key]}” ({key}): " in readout
            true = float(layers[1].maps[reading][3, query, key])
            if precise:
                assert float(readout.rsplit(": ", 1)[1].replace(MINUS, "-")) == pytest.approx(true, rel=2e-3, abs=1e-6)
            else:
                value, error = told(readout)
                top = np.abs(layers[1].maps[reading][3]).max()
                assert error == pytest.approx(top / (254 if reading == "standard" else 127) / 2, rel=0.12)
                assert abs(value - true) <= error


def test_the_difference_is_signed_and_its_numbers_are_differences(look: Look) -> None:
    exploration, layers = one_text()
    page = look(exploration, fragment="layer=2&head=1")
    press(page, "d")
    assert page.locator(".x-pane select").nth(0).input_value() == '[0,"effective"]'
    assert page.locator(".x-pane select").nth(1).input_value() == '[0,"standard"]'
    value, error = told(point_at(page, 4, 6))
    true = layers[2].maps["effective"][1, 4, 6] - layers[2].maps["standard"][1, 4, 6]
    assert abs(value - true) <= 2 * error
    numbers = ElementTree.fromstring(save(page, "svg").decode()).iter("{http://www.w3.org/2000/svg}text")
    legend = [node.text for node in numbers if re.fullmatch(MINUS + r"?[\d.]+", node.text or "")]
    top = float(legend[-1])
    assert legend[-5:] == [MINUS + legend[-1], MINUS + legend[-2], "0", legend[-2], legend[-1]]
    assert top == pytest.approx(np.abs(layers[2].maps["effective"][1] - layers[2].maps["standard"][1]).max(), rel=0.1)


def test_every_view_draws_something_of_its_own(look: Look) -> None:
    page = look(one_text()[0], fragment="q=3&k=2")
    seen = set()
    for key in "mlt":
        press(page, key)
        seen.add(page.evaluate("document.querySelector('.x-large').toDataURL().length"))
        inks = page.evaluate(
            """() => { const c = document.querySelector(".x-large"); const seen = new Set();
            const copy = new OffscreenCanvas(c.width, c.height).getContext("2d", { willReadFrequently: true });
            copy.drawImage(c, 0, 0);
            const d = copy.getImageData(0, 0, c.width, c.height).data;
            for (let i = 0; i < d.length; i += 4) seen.add((d[i] << 16) + (d[i + 1] << 8) + d[i + 2]); return seen.size; }"""
        )
        assert inks > 20
    assert len(seen) == 3
    assert page.locator(".x-readout").inner_text().startswith(f"“{NASTY}” (3) looks at ")


def test_keys_move_and_help_lists_them(look: Look) -> None:
    page = look(one_text()[0])
    assert title(page) == "Layer 0 · head 0"
    press(page, "ArrowRight", "ArrowRight", "ArrowDown")
    assert title(page) == "Layer 1 · head 2"
    press(page, "ArrowUp", "ArrowUp", "ArrowLeft")
    assert title(page) == "Layer 2 · head 1"
    press(page, "2")
    assert page.locator(".x-pane select").first.input_value() == '[0,"effective"]'
    press(page, "Shift+ArrowDown", "Shift+ArrowDown", "Shift+ArrowRight")
    assert page.locator(".x-readout").inner_text().startswith("“un” (1) → “un” (1): ")
    press(page, "b")
    assert page.locator(".x-pane").count() == 2
    press(page, "b", "b")
    assert page.locator(".x-pane").count() == 1
    press(page, "+")
    assert float(page.locator(".x-large").get_attribute("data-frame").split()[2]) > 60
    press(page, "0", "Escape")
    assert page.locator(".x-readout").inner_text().startswith("Point at a cell")
    page.keyboard.press("?")
    told_keys = page.locator("dialog[open]").inner_text()
    assert "Shift + arrows" in told_keys
    assert "search for a token" in told_keys
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    # In a field, letters are letters.
    page.keyboard.press("/")
    page.keyboard.type("wb")
    settle(page)
    assert page.input_value("input[type=search]") == "wb"
    assert page.locator(".x-pane").count() == 1


def test_a_click_on_a_thumbnail_or_a_row_chooses_the_head(look: Look) -> None:
    page = look(one_text()[0])
    grid = page.locator(".x-grid")
    margin, size, _ = map(float, grid.get_attribute("data-frame").split())
    grid.click(position={"x": margin + 3.5 * size, "y": margin + 2.5 * size})
    settle(page)
    assert title(page) == "Layer 2 · head 3"
    page.locator(".x-table tbody tr:not(.x-space)").first.click()
    settle(page)
    assert page.locator(".x-table .x-chosen td").nth(1).inner_text() == title(page)[-1]


def test_the_table_of_heads_sorts_and_keeps_only_rows_in_sight(look: Look) -> None:
    page = look(one_text(layers=12, heads=12)[0])
    table = page.locator(".x-table table")
    assert table.get_attribute("aria-rowcount") == "145"
    assert page.locator(".x-table tbody tr").count() < 25
    button = table.locator("thead button", has_text="entropy")
    button.click()
    column = "rows => rows.map(row => Number(row.cells[2].textContent))"
    rows = table.locator("tbody tr:not(.x-space)")
    rising = rows.evaluate_all(column)
    assert rising == sorted(rising)
    assert rising[0] == 0
    button.click()
    falling = rows.evaluate_all(column)
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == 1
    assert page.locator(".x-table th[aria-sort=descending]").inner_text() == "entropy"
    page.select_option(".x-left select", "entropy")
    settle(page)
    assert page.inner_text(".x-left .note") == "in nats"


def test_words_are_sums_over_keys_and_means_over_queries(look: Look) -> None:
    exploration, layers = one_text()
    page = look(exploration)
    press(page, "w")
    w = layers[0].maps["standard"][0].astype(np.float64)
    readout = point_at(page, 1, 0)
    assert "“unhappy” (1) → “[CLS]” (0)" in readout
    value, error = told(readout)
    assert abs(value - w[1:3, 0].mean()) <= error
    value, error = told(point_at(page, 1, 1))
    assert abs(value - w[1:3, 1:3].sum(1).mean()) <= error


def test_a_search_marks_tokens_and_walks_them(look: Look) -> None:
    page = look(one_text()[0])
    page.fill("input[type=search]", "script>")
    settle(page)
    press(page, "Enter")
    assert page.inner_text(".x-found") == "2 found"
    assert page.inner_text(".x-weights h2") == f"Where “{NASTY}” (3) looks"
    press(page, "Enter")
    assert page.inner_text(".x-weights h2") == "Where “</script>” (4) looks"


def test_the_weights_of_a_token_are_a_table(look: Look) -> None:
    exploration, layers = one_text()
    page = look(exploration, fragment="q=9&panes=0:standard|0:effective&layer=1")
    rows = page.locator(".x-weights tbody tr:not(.x-space)").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.textContent))"
    )
    row = layers[1].maps["standard"][0, 9]
    order = np.argsort(-row)
    assert [int(r[0].rsplit("(", 1)[1][:-1]) for r in rows[:5]] == order[:5].tolist()
    assert float(rows[0][1]) == pytest.approx(row[order[0]], abs=3e-3)
    assert float(rows[0][2].replace(MINUS, "-")) == pytest.approx(layers[1].maps["effective"][0, 9, order[0]], abs=6e-3)


def test_types_of_tokens_sum_up_what_they_receive(look: Look) -> None:
    exploration, layers = one_text()
    page = look(exploration, fragment="layer=1&head=2")
    rows = dict(
        page.locator(".x-types tbody tr").evaluate_all(
            "rows => rows.map(r => [r.cells[0].textContent, [...r.cells].slice(1).map(c => Number(c.textContent))])"
        )
    )
    w = [one.maps["standard"][:, :, [0, 4, 9]].sum(-1).mean(-1) for one in layers]
    assert rows["special"] == pytest.approx([3, w[1][2], w[1].mean(), np.mean(w)], rel=1e-2)


def test_files_hold_the_numbers_on_show(look: Look) -> None:
    exploration, layers = one_text()
    page = look(exploration, fragment="layer=2&head=4&panes=0:standard|0:effective")
    w = layers[2].maps["standard"][4]
    rows = list(csv.reader(io.StringIO(save(page, "csv").decode())))
    assert rows[0] == ["pane", "kind", "layer", "head", "query", "query token", "key", "key token", "weight"]
    assert len(rows) == 1 + 2 * 11 * 11
    assert rows[1 + 3 * 11 + 5][:8] == ["standard", "encoder", "2", "4", "3", NASTY, "5", "'=1+1"]
    found = np.array([float(row[-1]) for row in rows[1:122]]).reshape(11, 11)
    np.testing.assert_allclose(found, w, atol=w.max() / 254 / 2 + 1e-6)
    whole = json.loads(save(page, "json"))
    assert whole["panes"][1]["shown"] == "effective"
    assert whole["panes"][0]["queries"] == TOKENS
    np.testing.assert_allclose(
        whole["panes"][1]["weights"], layers[2].maps["effective"][4], atol=whole["panes"][1]["error"] * 1.01
    )
    assert whole["heads"]["columns"] == ["layer", "head", "entropy", "pattern"]
    heads = list(csv.reader(io.StringIO(save(page, "heads").decode())))
    assert len(heads) == 16
    png = save(page, "png")
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") > 2000
    svg = ElementTree.fromstring(save(page, "svg").decode())
    names = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert names.count("سلام") == 4
    assert "standard" in names
    press(page, "l")
    page.locator("input[type=range]").first.fill("0.5")
    settle(page)
    lines = list(csv.reader(io.StringIO(save(page, "csv").decode())))[1:]
    first = [row for row in lines if row[0] == "standard" and row[4] == "0"]
    order = np.argsort(-w[0])
    assert [int(row[6]) for row in first] == order[: np.searchsorted(w[0][order].cumsum(), 0.5) + 1].tolist()


def test_a_link_restores_the_view(look: Look) -> None:
    exploration, _ = one_text()
    page = look(exploration)
    press(page, "2", "ArrowDown", "ArrowRight", "b", "w", "l")
    page.locator("input[type=range]").first.fill("0.6")
    settle(page)
    until(page, "location.hash.includes('mass=0.6')")
    fragment = page.evaluate("location.hash.slice(1)")
    other = look(exploration, fragment=fragment)
    assert title(other) == "Layer 1 · head 1"
    assert other.locator(".x-pane").count() == 2
    assert other.locator(".x-pane select").first.input_value() == '[0,"effective"]'
    assert other.locator("[aria-label=View] [aria-pressed=true]").inner_text() == "Lines"
    assert other.locator(".x-tick input").first.is_checked()
    assert other.evaluate("location.hash.slice(1)") == fragment
    broken = look(exploration, fragment="kind=nonsense&layer=99&head=-2&panes=%E0%A4%A&zoom=x&q=1e9")
    assert title(broken) == "Layer 2 · head 0"


def test_encoder_decoder_and_cross(look: Look) -> None:
    exploration, maps = translation()
    page = look(exploration)
    for kind in ("decoder", "cross", "encoder"):
        press(page, "a")
        assert page.locator("[aria-label='Kind of attention'] [aria-pressed=true]").inner_text() == kind
        last = [n - 1 for n in maps[kind].shape[1:]]
        value, error = told(point_at(page, *last))
        assert abs(value - maps[kind][0, last[0], last[1]]) <= error
        press(page, "t", "l", "m")


def test_two_texts_of_different_lengths_stand_side_by_side(look: Look) -> None:
    maps = [softmax(i, 2, n, n) for i, n in enumerate((3, 5))]
    items = [
        Item(f"text {i + 1}", {"source": text(list("abcde")[: len(w[0])])}, [LayerMaps("encoder", 0, {"standard": w})])
        for i, w in enumerate(maps)
    ]
    page = look(shown(items, panes=[(0, "standard"), (1, "standard")]))
    value, error = told(point_at(page, 4, 4, pane=1))
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
    value, error = told(point_at(page, 6, 2, pane=2))
    assert abs(value - lost[1, 6, 2]) <= error
    assert "dimension 2" in page.locator(".x-readout").nth(2).inner_text()
    assert page.inner_text(".x-facts") == "|(W - Ŵ) v| / |W v| 0.5"
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
    value, error = told(point_at(page, 2, 1))
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


def test_what_is_no_number_is_told(look: Look) -> None:
    w = softmax(1, 1, 3, 3)
    w[0, 1, 2] = np.nan
    flat = np.full((1, 3, 3), 1 / 3, dtype=np.float32)
    layers = [LayerMaps("encoder", i, {"standard": maps}) for i, maps in enumerate((w, flat, np.full_like(w, np.nan)))]
    page = look(shown([Item("BERT", {"source": text(list("abc"))}, layers)]))
    assert page.inner_text(".x-note") == "10 weights are not numbers (NaN or infinity); they are drawn hatched."
    assert point_at(page, 1, 2).endswith(": not a number")
    assert told(point_at(page, 1, 1))[0] == pytest.approx(w[0, 1, 1], abs=3e-3)
    press(page, "l", "t", "m", "ArrowDown")
    assert told(point_at(page, 2, 0))[0] == pytest.approx(1 / 3, abs=1e-3)
    press(page, "ArrowDown", "l", "t")
    assert json.loads(save(page, "json"))["panes"][0]["weights"][0] == [None, None, None]


def test_one_token(look: Look) -> None:
    one = LayerMaps("encoder", 0, {"standard": np.ones((1, 1, 1), dtype=np.float32)})
    page = look(shown([Item("BERT", {"source": Tokens(["hm"])}, [one])]))
    assert told(point_at(page, 0, 0))[0] == 1
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
    page = look(shown(items, layers=[1]))
    assert page.inner_text(".x-note").startswith("Layers kept as thumbnails of at most 64 x 64 cells only: decoder 0.")
    assert "150" not in point_at(page, 1, 2)
    # Block 1 of 64 holds tokens 3 and 4, block 2 tokens 5 and 6.
    readout = point_at(page, 1, 2)
    assert "“t3 … t4” (1) → “t5 … t7” (2)" in readout
    value, error = told(readout)
    assert abs(value - made[0][0, 3:5, 5:8].sum(1).mean()) <= error
    press(page, "ArrowDown", "+", "+", "+", "+")
    value, error = told(point_at(page, 75, 75))
    assert abs(value - made[1][0, 75, 75]) <= error


def test_the_same_view_in_a_notebook(look: Look) -> None:
    """anywidget imports the module and calls render; the style stays in its shadow root."""
    exploration, layers = one_text()
    page = look(one_text(layers=1, heads=1)[0])
    places, start = {}, 0
    for name, blob in exploration.packed.blobs.items():
        places[name] = [start, len(blob)]
        start += len(blob)
    told_to = {
        "meta": json.dumps(exploration.packed.meta),
        "places": json.dumps(places),
        "style": style(host=True),
        "blobs": b"".join(exploration.packed.blobs.values()).decode(),
    }
    context = page.context.browser.new_context()
    blank = context.new_page()
    trouble: list[str] = []
    blank.on("console", lambda message: trouble.append(message.text))
    blank.on("pageerror", lambda error: trouble.append(str(error)))
    blank.set_content("<!doctype html><body data-jp-theme-light='false'><div id=cell style='width:1000px'></div>")
    blank.evaluate(
        """async ([code, told]) => {
            const module = await import("data:text/javascript;charset=utf-8," + encodeURIComponent(code));
            const bytes = new TextEncoder().encode(told.blobs);
            const model = { get: (name) => name === "blobs" ? new DataView(bytes.buffer) : told[name] };
            module.default.render({ model, el: document.getElementById("cell") });
        }""",
        [script("widget"), told_to],
    )
    blank.wait_for_selector("#cell div[data-drawn]")
    host = blank.locator("#cell > div")
    assert host.locator("h2").nth(0).inner_text() == "All heads"
    host.locator(".x-grid").focus()
    blank.keyboard.press("ArrowDown")
    until(
        blank,
        "document.querySelector('#cell > div').shadowRoot.querySelector('.x-head h2').textContent === 'Layer 1 · head 0'",
    )
    canvas = host.locator(".x-large")
    canvas.scroll_into_view_if_needed()
    left, over, size, _, _ = map(float, canvas.get_attribute("data-frame").split())
    box = canvas.bounding_box()
    blank.mouse.move(box["x"] + left + 2.5 * size, box["y"] + over + 1.5 * size)
    until(
        blank, "document.querySelector('#cell > div').shadowRoot.querySelector('.x-readout').textContent.includes('±')"
    )
    value, error = told(host.locator(".x-readout").inner_text())
    assert abs(value - layers[1].maps["standard"][0, 1, 2]) <= error
    ground = blank.evaluate("getComputedStyle(document.querySelector('#cell > div')).backgroundColor")
    assert ground == "rgb(16, 20, 26)"
    assert trouble == []
    context.close()
