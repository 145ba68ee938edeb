"""A notebook that a kernel runs, and its outputs in Chromium: light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.opened_pages import SCREENSHOTS

from .conftest import OpenPage
from .parsing import parse
from .test_notebook import assert_plain

nbformat = pytest.importorskip("nbformat", reason="a notebook needs nbformat: pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="a notebook needs nbclient: pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="a notebook needs ipykernel: pip install nbclient ipykernel")

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FIRST = """
import torch
import attnlab as al
model, tokenizer, _ = al.shipped_model()
text = "The old ferry stayed in the harbour."
with torch.no_grad(), al.record(model) as trace:
    model(**tokenizer(text, return_tensors="pt"))
"""
CELLS = {
    "a trace": "trace",
    "a layer": "trace[3]",
    "effective attention": "al.effective_attention(trace[3])",
    "approximation errors": "al.approximation_error(trace, 'top-r:r=2')",
    "an exploration": "al.explore(model, tokenizer, text)",
}
# As a notebook sets it: a colour of its own on a ground of its own.
GROUND = "<style>body { color: #222; background: #fff } @media (prefers-color-scheme: dark) { body { color: #ddd; background: #111 } }</style>"


@pytest.fixture(scope="module")
def outputs() -> dict[str, dict[str, Any]]:
    """For each cell what the kernel sent, by MIME type."""
    cells = [nbformat.v4.new_code_cell(source) for source in (FIRST, *CELLS.values())]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return {name: cell.outputs[-1].data for name, cell in zip(CELLS, notebook.cells[1:], strict=True)}


def test_every_object_has_html_and_text(outputs: dict[str, dict[str, Any]]) -> None:
    for name, data in outputs.items():
        assert {"text/html", "text/plain"} <= data.keys(), name
        if name != "an exploration":
            assert_plain(parse(data["text/html"]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_outputs_are_readable_in_a_browser(
    open_page: OpenPage, outputs: dict[str, dict[str, Any]], tmp_path: Path, scheme: str
) -> None:
    holder = tmp_path / "notebook.html"
    shown = "".join(data["text/html"] for data in outputs.values())
    holder.write_text(
        f'<!doctype html><html lang="en"><title>A notebook</title>{GROUND}<main>{shown}</main></html>', "utf-8"
    )
    page = open_page(holder, scheme=scheme)
    table = page.locator("table").first
    assert table.locator("tbody tr").count() == 6
    color, ground = page.evaluate(
        "[getComputedStyle(document.querySelector('td')).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert (color, ground) == (
        ("rgb(34, 34, 34)", "rgb(255, 255, 255)") if scheme == "light" else ("rgb(221, 221, 221)", "rgb(17, 17, 17)")
    )
    # A frame that is off the screen draws when it comes into view.
    page.locator("iframe").scroll_into_view_if_needed()
    inside = page.frame_locator("iframe")
    inside.locator("html[data-drawn]:not([data-drawing])").wait_for(state="attached")
    page.screenshot(path=str(Path(SCREENSHOTS or tmp_path) / f"notebook-{scheme}.png"), full_page=True)
    before = inside.locator(".x-head h2").inner_text()
    inside.locator(".x-grid").press("ArrowRight")
    page.wait_for_timeout(400)
    assert inside.locator(".x-head h2").inner_text() != before
