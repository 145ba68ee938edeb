"""The explorer in headless Chromium: the readout at the cell, tables without cut columns, several heads' lines."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from .conftest import press, settle, until
from .examples import COLUMNS, one_text, shown, softmax, text
from .pointer import Look, point_at, save, title

pytestmark = pytest.mark.browser

LONG = [f"token{i}" for i in range(60)]


def cell_box(page: Any, query: int, key: int) -> dict[str, float]:
    """Where a cell of the first pane is on the screen."""
    canvas = page.locator(".x-large").first
    left, over, size, x, y = map(float, canvas.get_attribute("data-frame").split())
    box = canvas.bounding_box()
    return {"x": box["x"] + left + (key - x) * size, "y": box["y"] + over + (query - y) * size, "size": size}


def assert_readout_is_at(page: Any, query: int, key: int) -> None:
    """The readout is on the screen, near the cell, and does not cover it."""
    cell, note = cell_box(page, query, key), page.locator(".x-readout").first.bounding_box()
    screen = page.viewport_size
    assert note["x"] >= 0
    assert note["y"] >= 0
    assert note["x"] + note["width"] <= screen["width"]
    assert note["y"] + note["height"] <= screen["height"]
    assert min(abs(note["y"] - cell["y"] - cell["size"]), abs(note["y"] + note["height"] - cell["y"])) < 12
    assert note["x"] - 12 <= cell["x"] + cell["size"]
    assert note["x"] + note["width"] + 12 >= cell["x"]


@pytest.mark.parametrize("width", [390, *(pytest.param(w, marks=pytest.mark.slow) for w in (1024, 1280)), 1440])
def test_the_readout_is_at_the_pointer_and_at_the_keyboards_cell(look: Look, width: int) -> None:
    page = look(one_text(LONG)[0], width=width, fragment="q=0&k=0")
    if width > 390:
        for query, key in ((0, 0), (20, 59), (30, 2)):
            page.evaluate("scrollTo(0, 0)")
            cell = cell_box(page, query, key)
            page.mouse.move(cell["x"] + cell["size"] / 2, cell["y"] + cell["size"] / 2)
            settle(page)
            assert f"“token{query}” ({query}) → “token{key}” ({key})" in page.locator(".x-readout").inner_text()
            assert_readout_is_at(page, query, key)
        page.mouse.move(1, 1)
        settle(page)
    press(page, *["Shift+ArrowDown"] * 59)
    assert "“token59” (59)" in page.locator(".x-readout").inner_text()
    assert_readout_is_at(page, 59, 0)


@pytest.mark.parametrize("width", [1024, 1280, 1440])
@pytest.mark.parametrize("panes", [1, 2])
def test_no_column_is_cut_off(look: Look, width: int, panes: int) -> None:
    names = ["distance", "removed", "follows", "closeness"]
    columns = [*COLUMNS, *({"key": name, "title": name, "help": ""} for name in names)]
    exploration, layers = one_text(columns=columns)
    for layer in layers:
        layer.statistics.update({"class": ["vertical+diagonal"] * 5, "follows": ["delimiter"] * 5})
        layer.statistics.update({name: [0.001234] * 5 for name in ("distance", "removed", "closeness")})
    exploration = shown([item_of(layers)], columns=columns)
    fragment = "panes=0:standard|0:effective" if panes == 2 else ""
    page = look(exploration, width=width, fragment=fragment)
    cut = "nodes => nodes.filter(n => n.scrollWidth > n.clientWidth).map(n => n.getAttribute('aria-label'))"
    assert page.locator(".x-rows").evaluate_all(cut) == []


def item_of(layers: Any) -> Any:
    from attnlab.pages.explorer import Item

    from .examples import TOKENS

    return Item("BERT", {"source": text(TOKENS)}, layers)


def drawn_names(page: Any) -> set[str]:
    """The words in the picture of what is shown."""
    import xml.etree.ElementTree as ElementTree

    return {node.text for node in ElementTree.fromstring(save(page, "svg").decode()).iter() if node.text}


def test_a_phone_keeps_the_name_of_every_token(look: Look) -> None:
    tokens = [f"t{i}" for i in range(48)]
    page = look(one_text(tokens)[0], width=390)
    assert set(tokens) <= drawn_names(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_page_says_why_it_opens_on_this_head(look: Look) -> None:
    exploration = one_text()[0]
    opens = exploration.packed.meta["opens"]
    page = look(exploration)
    assert title(page) == f"Layer {opens['layer']} · head {opens['head']}"
    assert page.inner_text(".x-why").startswith("Shown first because it depends most on what the tokens are")
    press(page, "ArrowRight")
    assert page.locator(".x-why").inner_text() == ""


def test_lines_of_several_heads_in_one_view(look: Look) -> None:
    exploration, layers = one_text()
    page = look(exploration, fragment="layer=0&head=1&view=lines")
    press(page, "h", "ArrowDown", "h", "ArrowRight")
    legend = page.locator(".x-legend[aria-label='Heads whose lines are drawn'] > li:not(.x-legend-note)")
    assert [one.split("\n")[0] for one in legend.all_inner_texts()] == [
        "layer 0, head 1",
        "layer 1, head 1",
        "layer 1, head 2",
    ]
    assert legend.nth(2).get_attribute("aria-current") == "true"
    swatches = "nodes => nodes.map(n => getComputedStyle(n.querySelector('.x-swatch')).backgroundColor)"
    assert len(set(legend.evaluate_all(swatches))) == 3
    assert "layer 0, head 1; layer 1, head 1; layer 1, head 2" in page.locator(".x-large").get_attribute("aria-label")
    rows = list(csv.DictReader(io.StringIO(save(page, "csv").decode("utf-8-sig"))))
    assert {(row["layer"], row["head"]) for row in rows} == {("0", "1"), ("1", "1"), ("1", "2")}
    for row in rows[::7]:
        true = layers[int(row["layer"])].maps["standard"][int(row["head"]), int(row["query"]), int(row["key"])]
        assert float(row["weight"]) == pytest.approx(float(true), abs=3e-3)
    until(page, "decodeURIComponent(location.hash).includes('kept=0.1,1.1')")
    link = page.evaluate("location.hash")
    page.get_by_label("Remove the lines of layer 0, head 1").click()
    settle(page)
    assert legend.count() == 2
    until(page, "!location.hash.includes('0.1')")
    page.evaluate("(link) => { location.hash = link; }", link)
    page.wait_for_timeout(300)
    settle(page)
    assert legend.count() == 3


def test_shift_and_click_in_the_grid_keeps_a_head(look: Look) -> None:
    page = look(one_text()[0], fragment="layer=0&head=0")
    grid = page.locator(".x-grid")
    margin, size, _ = map(float, grid.get_attribute("data-frame").split())
    grid.click(position={"x": margin + 3.5 * size, "y": margin + 2.5 * size}, modifiers=["Shift"])
    settle(page)
    assert title(page) == "Layer 0 · head 0"
    assert page.get_by_label("Remove the lines of layer 2, head 3").is_visible()
    assert page.locator(".x-legend li:not(.x-legend-note)").count() == 2


def test_no_more_heads_are_kept_than_there_are_colours(look: Look) -> None:
    kept = ",".join(f"0.{head}" for head in range(9))
    page = look(one_text(heads=10)[0], fragment=f"layer=1&head=9&view=lines&kept={kept},junk,1.x")
    assert page.locator(".x-legend li:not(.x-legend-note)").count() == 7
    press(page, "h")
    assert page.locator(".x-legend li:not(.x-legend-note)").count() == 7


def test_a_frame_without_an_address_shows_the_page_without_errors(open_page: Any, tmp_path: Path) -> None:
    """What a notebook shows."""
    frame = one_text()[0]._repr_mimebundle_()["text/html"]
    holder = tmp_path / "notebook.html"
    holder.write_text(f"<!doctype html><title>A notebook</title>{frame}", encoding="utf-8")
    page = open_page(holder)
    inside = page.frame_locator("iframe")
    inside.locator("html[data-drawn]:not([data-drawing])").wait_for(state="attached")
    before = inside.locator(".x-head h2").inner_text()
    inside.locator(".x-grid").press("ArrowRight")
    page.wait_for_timeout(400)
    assert inside.locator(".x-head h2").inner_text() != before
    assert inside.get_by_text("Link", exact=True).count() == 0


def test_pointing_is_not_needed_to_know_what_the_softmax_gives(look: Look) -> None:
    """The readout of a chosen cell stays without the pointer."""
    w = softmax(0, 5, 11, 11)
    page = look(one_text()[0], fragment="layer=0&head=0&q=4&k=6")
    shown_value = float(page.locator(".x-readout").inner_text().rsplit(": ", 1)[1].split(" ")[0])
    assert shown_value == pytest.approx(float(w[0, 4, 6]), abs=3e-3)
    assert point_at(page, 1, 1).startswith("“un” (1) → “un” (1)")
