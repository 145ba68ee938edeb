"""The explorer in headless Chromium: what it draws, and the numbers under the pointer."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from tests.opened_pages import assert_fits

from .conftest import press, settle
from .examples import NASTY, TOKENS, one_text
from .pointer import MINUS, Look, point_at, save, value_and_error

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_the_page_fits_the_screen(look: Look, tmp_path: Path, width: int) -> None:
    exploration, _ = one_text()
    page = look(exploration, width=width, fragment="panes=0:standard|0:effective" if width > 390 else "")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        settle(page)
        picture = f"explorer-{width}-{scheme}.png"
        assert_fits(page, picture, width=width, within="#attnlab", scrolls=".x-rows", folder=tmp_path)
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
                value, error = value_and_error(readout)
                top = np.abs(layers[1].maps[reading][3]).max()
                assert error == pytest.approx(top / (254 if reading == "standard" else 127) / 2, rel=0.12)
                assert abs(value - true) <= error


def test_the_difference_is_signed_and_its_numbers_are_differences(look: Look) -> None:
    exploration, layers = one_text()
    page = look(exploration, fragment="layer=2&head=1")
    press(page, "d")
    assert page.locator(".x-pane select").nth(0).input_value() == '[0,"effective"]'
    assert page.locator(".x-pane select").nth(1).input_value() == '[0,"standard"]'
    value, error = value_and_error(point_at(page, 4, 6))
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


def test_words_are_sums_over_keys_and_means_over_queries(look: Look) -> None:
    exploration, layers = one_text()
    page = look(exploration, fragment="layer=0&head=0")
    press(page, "w")
    w = layers[0].maps["standard"][0].astype(np.float64)
    readout = point_at(page, 1, 0)
    assert "“unhappy” (1) → “[CLS]” (0)" in readout
    value, error = value_and_error(readout)
    assert abs(value - w[1:3, 0].mean()) <= error
    value, error = value_and_error(point_at(page, 1, 1))
    assert abs(value - w[1:3, 1:3].sum(1).mean()) <= error


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
