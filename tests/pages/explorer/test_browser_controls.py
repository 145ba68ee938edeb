"""The explorer in headless Chromium: keys, clicks, sorting, searching, files and links."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from .conftest import press, settle, until
from .examples import NASTY, TOKENS, one_text
from .pointer import Look, save, title

pytestmark = pytest.mark.browser


def test_keys_move_and_help_lists_them(look: Look) -> None:
    page = look(one_text()[0], fragment="layer=0&head=0")
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
    assert page.locator(".x-readout").inner_text() == ""
    assert page.locator(".x-hint").inner_text().startswith("Point at a cell")
    page.keyboard.press("?")
    help_text = page.locator("dialog[open]").inner_text()
    assert "Shift + arrows" in help_text
    assert "search for a token" in help_text
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


def test_the_table_of_heads_sorts_and_holds_only_visible_rows(look: Look) -> None:
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


def test_a_search_marks_tokens_and_walks_them(look: Look) -> None:
    page = look(one_text()[0])
    page.fill("input[type=search]", "script>")
    settle(page)
    press(page, "Enter")
    assert page.inner_text(".x-found") == "2 found"
    assert page.inner_text(".x-weights h2") == f"Where “{NASTY}” (3) looks"
    press(page, "Enter")
    assert page.inner_text(".x-weights h2") == "Where “</script>” (4) looks"


def test_files_hold_the_numbers_that_are_shown(look: Look) -> None:
    exploration, layers = one_text()
    page = look(exploration, fragment="layer=2&head=4&panes=0:standard|0:effective")
    w = layers[2].maps["standard"][4]
    rows = list(csv.reader(io.StringIO(save(page, "csv").decode())))
    assert rows[0] == ["pane", "kind", "layer", "head", "query", "query token", "key", "key token", "weight"]
    assert len(rows) == 1 + 2 * 11 * 11
    assert rows[1 + 3 * 11 + 5][:8] == ["standard", "encoder", "2", "4", "3", NASTY, "5", "'=1+1"]
    saved = np.array([float(row[-1]) for row in rows[1:122]]).reshape(11, 11)
    np.testing.assert_allclose(saved, w, atol=w.max() / 254 / 2 + 1e-6)
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
    page = look(exploration, fragment="layer=0&head=0")
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
    press(other, "m", "+", "+")
    until(other, "location.hash.includes('zoom=')")
    # The address follows the last of the two keys a moment later.
    other.wait_for_timeout(400)
    frame = other.locator(".x-large").first.get_attribute("data-frame")
    zoomed = look(exploration, fragment=other.evaluate("location.hash.slice(1)"))
    seen = zoomed.locator(".x-large").first.get_attribute("data-frame")
    assert [float(number) for number in seen.split()] == pytest.approx([float(n) for n in frame.split()], abs=0.02)
    broken = look(exploration, fragment="kind=nonsense&layer=99&head=-2&panes=%E0%A4%A&zoom=x&q=1e9")
    assert title(broken) == f"Layer 2 · head {exploration.packed.meta['opens']['head']}"
