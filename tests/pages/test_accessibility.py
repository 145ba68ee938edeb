"""Every page, by axe-core's rules and by keyboard: light and dark, on a phone and on a desktop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.opened_pages import assert_fits

from .conftest import OpenPage
from .every_page import PAGES, write_page
from .explorer.conftest import settle

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PHONE, DESKTOP = 360, 1280
CONTROLS = "a[href], button, input, select, textarea, summary, [tabindex='0']"
MOST_TABS = 400
# What is wider than the screen scrolls inside of these.
SCROLLS = ".scroll, .x-rows, .x-scroll, [style*='overflow-x']"
# Clicked with the pointer only, since a control beside it does the same.
SAME_BY_ANOTHER_CONTROL = "canvas.x-chart"  # the slider of training steps above it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("every-page")


@pytest.fixture(scope="module", params=PAGES)
def file(request: pytest.FixtureRequest, folder: Path) -> Path:
    return write_page(request.param, folder)


def opened(open_page: OpenPage, file: Path, **screen: Any) -> Any:
    page = open_page(file, **screen)
    if file.stem.startswith("explore"):
        settle(page)
    # What is folded away has to be readable too.
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    return page


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_worse_than_minor(open_page: OpenPage, file: Path, axe: str, scheme: str, width: int) -> None:
    page = opened(open_page, file, width=width, scheme=scheme)
    page.evaluate(axe)
    violations = page.evaluate("axe.run(document, { resultTypes: ['violations'] }).then((result) => result.violations)")
    worse = {
        f"{violation['impact']} {violation['id']}": [node["html"][:160] for node in violation["nodes"]][:5]
        for violation in violations
        if violation["impact"] != "minor"
    }
    assert worse == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_a_page_is_no_wider_than_the_screen(
    open_page: OpenPage, file: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    page = opened(open_page, file, width=width, scheme=scheme)
    picture = f"{file.stem}-{width}-{scheme}.png"
    assert_fits(page, picture, width=width, within="main", scrolls=SCROLLS, folder=tmp_path)


def test_every_control_is_reached_by_keyboard_and_shows_its_focus(open_page: OpenPage, file: Path) -> None:
    page = opened(open_page, file)
    number_controls = """(controls) => [...document.querySelectorAll(controls)]
        .filter((node) => !node.disabled && node.checkVisibility({ visibilityProperty: true }))
        .forEach((node, i) => { node.dataset.control = i; })"""
    page.evaluate(number_controls, CONTROLS)
    expected = set(page.evaluate("[...document.querySelectorAll('[data-control]')].map((n) => n.dataset.control)"))
    reached: set[str] = set()
    unseen: list[str] = []
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        control, shown, markup = page.evaluate(
            """() => {
                const node = document.activeElement;
                const { outlineStyle, outlineWidth } = getComputedStyle(node);
                return [node.dataset.control ?? null, outlineStyle !== "none" && parseFloat(outlineWidth) >= 1,
                    node.cloneNode(false).outerHTML];
            }"""
        )
        if control is None or control in reached:
            break
        reached.add(control)
        if not shown:
            unseen.append(markup)
    assert unseen == []
    missed = page.evaluate(
        "(missed) => missed.map((i) => document.querySelector(`[data-control='${i}']`).outerHTML.slice(0, 160))",
        sorted(expected - reached),
    )
    assert missed == []


def test_what_takes_a_click_takes_a_key(open_page: OpenPage, file: Path) -> None:
    """What the pointer's shape offers to click lies in something that the keyboard reaches."""
    page = opened(open_page, file)
    clickable = page.evaluate(
        """(reached) => [...document.querySelectorAll("body *")].filter((node) =>
            ["pointer", "crosshair"].includes(getComputedStyle(node).cursor)
            && node.checkVisibility() && !node.closest(reached)
        ).map((node) => node.outerHTML.slice(0, 160)).slice(0, 5)""",
        f"{CONTROLS}, label, {SAME_BY_ANOTHER_CONTROL}",
    )
    assert clickable == []
