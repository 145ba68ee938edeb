"""The pages in headless Chromium: phone and desktop, light and dark, no errors, no requests, nothing wider than the screen."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from attnlab.pages import compare_page
from tests.opened_pages import assert_fits

from .conftest import OpenPage
from .every_page import write_page
from .examples import a_comparison

pytestmark = pytest.mark.browser

NAMES = ("compare", "compare-maps", "demo", "hostile", "runs", "claims", "judge")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {name: write_page(name, folder) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "schemes"), [(1280, ["light"]), (390, ["light", "dark"])], ids=["desktop", "phone"])
def test_page_opens_offline_without_errors_and_fits_the_screen(
    open_page: OpenPage, pages: dict[str, Path], tmp_path: Path, name: str, width: int, schemes: list[str]
) -> None:
    page = open_page(pages[name], width=width)
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        picture = f"{name}-{width}-{scheme}.png"
        assert_fits(page, picture, width=width, within="main", scrolls=".scroll", folder=tmp_path)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(247, 248, 250)" if scheme == "light" else "rgb(16, 20, 26)")


def test_a_judgement_fits_a_narrow_phone_and_its_table_sorts(open_page: OpenPage, pages: dict[str, Path]) -> None:
    page = open_page(pages["judge"], width=360, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    table = page.locator("figure[data-name=scores] table")
    heading = table.locator("thead button", has_text="over full").first
    # By keyboard, as a button.
    heading.focus()
    page.keyboard.press("Enter")
    values = "rows => rows.map(row => row.cells[5].dataset.value).filter(value => value !== undefined).map(Number)"
    sorted_values = table.locator("tbody tr").evaluate_all(values)
    assert sorted_values == sorted(sorted_values)
    assert len(sorted_values) == 15
    assert table.locator("tbody tr", has_text="the full cache cannot do this either").count() == 5
    entry = page.locator("figure[data-name='needle-512-unseen'] .legend button").first
    entry.focus()
    page.keyboard.press("Enter")
    assert page.locator("figure[data-name='needle-512-unseen'] .plot .off-series").count() == 2
    page.keyboard.press("Space")
    assert page.locator(".off-series").count() == 0


def test_text_in_charts_stays_readable_on_a_phone(open_page: OpenPage, pages: dict[str, Path]) -> None:
    for name in ("runs", "compare"):
        page = open_page(pages[name], width=360)
        heights = page.evaluate(
            """() => [...document.querySelectorAll("svg .tick")].map((t) => t.getBoundingClientRect().height)"""
        )
        assert min(heights) > 10


def test_the_switch_changes_the_theme_and_back(open_page: OpenPage, pages: dict[str, Path]) -> None:
    page = open_page(pages["demo"])
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.click("button.theme")
    assert page.evaluate(background) != light
    assert page.inner_text("button.theme") == "Light"
    page.click("button.theme")
    assert page.evaluate(background) == light


def test_a_click_on_a_heading_sorts_numbers_as_numbers(open_page: OpenPage, pages: dict[str, Path]) -> None:
    page = open_page(pages["compare"])
    table = page.locator("figure[data-name=mechanisms] table")
    heading = table.locator("thead button", has_text="Time")
    column = "rows => rows.map(row => Number(row.cells[6].dataset.value))"
    heading.click()
    rising = table.locator("tbody tr").evaluate_all(column)
    assert rising == sorted(rising)
    assert len(rising) == 9
    assert rising[-1] == 14.2
    heading.click()
    assert table.locator("tbody tr").evaluate_all(column) == sorted(rising, reverse=True)


def test_downloads_are_the_numbers_and_the_pictures(open_page: OpenPage, pages: dict[str, Path]) -> None:
    page = open_page(pages["compare"])
    figure = page.locator("figure[data-name=quality-and-time]")
    saved = {}
    for kind in ("csv", "svg", "png"):
        with page.expect_download() as waiting:
            figure.locator(f"[data-download={kind}]").click()
        assert waiting.value.suggested_filename == f"quality-and-time.{kind}"
        saved[kind] = Path(waiting.value.path()).read_bytes()
    rows = list(csv.reader(io.StringIO(saved["csv"].decode())))
    assert rows[0] == ["name", "time relative to softmax", "MLM error in %"]
    assert rows[8][0] == "lsh:r=64,rounds=4"
    assert float(rows[8][1]) == 3.3
    svg = saved["svg"].decode()
    assert svg.startswith("<svg")
    assert "var(--" not in svg
    assert "rgb(0, 114, 178)" in svg
    assert saved["png"].startswith(b"\x89PNG")
    assert int.from_bytes(saved["png"][16:20], "big") == 3 * 560
    with page.expect_download() as waiting:
        page.click("[data-download-json]")
    assert b"value-aware:r=33" in Path(waiting.value.path()).read_bytes()


def test_a_cell_that_looks_like_a_formula_is_text_in_the_csv(open_page: OpenPage, tmp_path: Path) -> None:
    result = a_comparison()
    result["rows"][1]["mechanism"] = '=HYPERLINK("x")'
    path = tmp_path / "page.html"
    path.write_text(compare_page(result), encoding="utf-8")
    page = open_page(path)
    with page.expect_download() as waiting:
        page.locator("figure[data-name=mechanisms] [data-download=csv]").click()
    rows = list(csv.reader(io.StringIO(Path(waiting.value.path()).read_text())))
    assert rows[2][0] == '\'=HYPERLINK("x")'


def test_the_pointer_reads_values_and_the_legend_hides_a_series(open_page: OpenPage, pages: dict[str, Path]) -> None:
    page = open_page(pages["runs"])
    figure = page.locator("figure[data-name=eval-loss]")
    figure.scroll_into_view_if_needed()
    box = figure.locator(".plot > svg").bounding_box()
    # The right edge of the plot area: 540 of 560 units, the last step.
    page.mouse.move(box["x"] + box["width"] * 540 / 560, box["y"] + box["height"] / 2)
    tip = figure.locator(".tip").inner_text()
    assert tip.startswith("step 2,000")
    assert "mlm (lr 0.0003), 3 seeds: 3." in tip
    page.mouse.move(0, 0)
    assert figure.locator(".tip").count() == 0
    hidden = figure.locator(".plot .off-series")
    figure.locator(".legend button").first.click()
    assert hidden.count() == 2
    figure.locator(".legend button").first.click()
    assert hidden.count() == 0


def test_the_maps_show_the_head_that_is_chosen(open_page: OpenPage, pages: dict[str, Path]) -> None:
    page = open_page(pages["compare-maps"])
    title = page.locator(".maps-title")
    grid = page.locator(".maps-grid")
    assert title.inner_text() == "standard · layer 0 · head 0"
    page.locator(".tabs button", has_text="effective").click()
    grid.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    assert title.inner_text() == "effective · layer 2 · head 7"
    box = grid.bounding_box()
    cell = (box["width"] - 22) / 8
    grid.click(position={"x": 22 + 3.5 * cell, "y": 22 + 5.5 * cell})
    assert title.inner_text() == "effective · layer 5 · head 3"
    large = page.locator(".maps-large")
    large.scroll_into_view_if_needed()
    box = large.bounding_box()
    step = (box["width"] - 78) / 19
    page.mouse.move(box["x"] + 78 + 0.5 * step, box["y"] + 78 + 1.5 * step)
    assert page.inner_text(".readout").startswith("“You” (1) gives “[CLS]” (0) the weight ")
    large.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert page.inner_text(".readout").startswith("“You” (1) gives “You” (1) the weight ")
    assert page.evaluate("document.querySelectorAll('*').length") < 3000


def test_two_maps_of_a_head_are_read_together(open_page: OpenPage, pages: dict[str, Path]) -> None:
    page = open_page(pages["demo"])
    maps = page.locator(".maps-pair .maps-large")
    assert maps.count() == 2
    maps.nth(1).scroll_into_view_if_needed()
    box = maps.nth(1).bounding_box()
    step = (box["width"] - 78) / 19
    page.mouse.move(box["x"] + 78 + 18.5 * step, box["y"] + 78 + 1.5 * step)
    read = page.inner_text(".readout")
    assert read.startswith("“You” (1) gives “[SEP]” (18) the weight Attention, W ")
    assert ", Effective attention " in read
    maps.first.focus()
    page.keyboard.press("ArrowDown")
    assert page.inner_text(".readout").startswith("“[CLS]” (0) gives “[CLS]” (0) the weight ")
