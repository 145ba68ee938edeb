"""The site: it builds strictly and loads nothing from elsewhere, names every public name, and its tutorials run."""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attnlab as al
from attnlab.commands.table import COMMANDS
from tests.opened_pages import ROOT, missing_models
from tests.pages.test_accessibility import PHONE
from tools.site_pages import NAMES, command_table, moved_links, names_of, outside_files, with_outputs
from tools.tutorials import cells, executed, tutorials

API = sorted((ROOT / "docs" / "api").glob("*.md"))
# Seconds of a processor that a tutorial may take: by the clock a busy machine takes longer.
LONGEST_TUTORIAL = 90


def installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) for package in packages)


needs_site = pytest.mark.skipif(
    not installed("mkdocs", "material", "mkdocstrings", "latex2mathml"),
    reason="MkDocs is not here: make site brings it",
)
needs_notebooks = pytest.mark.skipif(
    not installed("nbclient", "ipykernel"), reason="nbclient is not here: make site brings it"
)


@pytest.mark.parametrize("name", ["site_pages", "tutorials", "doctest_fences"])
def test_examples_of_the_tools_are_true(name: str) -> None:
    if name == "doctest_fences":
        pytest.importorskip("griffe", reason="griffe is not here: make site brings it")
    done = doctest.testmod(importlib.import_module(f"tools.{name}"))
    assert done.attempted > 0
    assert done.failed == 0


def test_every_public_name_is_on_one_page_of_the_api() -> None:
    rooms = [room for page in API for found in NAMES.findall(page.read_text()) for room in found.split()]
    assert len(rooms) == len(set(rooms))
    assert sorted(names_of(rooms)) == sorted(set(al.__all__) - {"__version__"})


@pytest.mark.parametrize("name", sorted(set(al.__all__) - {"__version__"}))
def test_every_public_name_says_what_it_is(name: str) -> None:
    value = getattr(al, name)
    # A dataclass without a docstring has its signature as one.
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")


def test_links_that_leave_the_documents_lead_to_pages_of_the_site() -> None:
    page = "See [ABC](../papers/abc/RESULTS.md#x), [`code`](../attnlab/trace.py), [here](#there), `[a](b.py)`."
    assert moved_links(page, "abc.md") == (
        "See [ABC](repository/papers/abc/RESULTS.md#x), <code>code</code>, [here](#there), `[a](b.py)`."
    )
    assert "papers/ktiw/figures/dynamics-counts.svg" in outside_files(["docs/dynamics.md"])


def test_the_table_of_commands_has_them_all() -> None:
    rows = command_table().splitlines()[2:]
    assert [row.split("`")[1].split()[1] for row in rows] == list(COMMANDS)


@pytest.mark.parametrize("page", tutorials(), ids=lambda page: page.stem)
def test_a_tutorial_is_short_and_says_when_not_to_use_it(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 200
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE)[-1] == "When not to use this"
    assert [kind for kind, _ in cells(text)].count("code") >= 3


@needs_notebooks
def test_outputs_stand_below_their_cells() -> None:
    import nbformat

    page = "```python\nprint('<')\n```\nText.\n```python\n1\n```\n"
    new = nbformat.v4
    outputs = [
        [new.new_output("stream", name="stdout", text="<\n"), new.new_output("stream", name="stderr", text="warned")],
        [new.new_output("display_data", data={"text/html": '<iframe srcdoc="&lt;p&gt;"></iframe>', "text/plain": "p"})],
    ]
    notebook = new.new_notebook(cells=[new.new_code_cell("", outputs=one) for one in outputs])
    shown, files = with_outputs(page, notebook, "mine")
    first, second = shown.split("Text.")
    assert "<pre><code>&lt;\n</code></pre>" in first
    assert "warned" not in shown
    assert 'src="mine-0-0.html"' in second
    assert files == {"mine-0-0.html": "<p>"}


@pytest.mark.slow
@needs_notebooks
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", tutorials(), ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path) -> None:
    if missing := missing_models(str(page.relative_to(ROOT))):
        pytest.skip(f"{', '.join(missing)} is not here: make models brings it")
    notebook = executed(page)
    assert 0 < notebook.metadata["attnlab"]["processor_seconds"] < LONGEST_TUTORIAL
    assert any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a broken link, a missing anchor or a page without its place fails."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
@needs_site
def test_the_site_documents_every_public_name(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    anchors = set(re.findall(r'id="attnlab\.(\w+)"', text))
    assert set(al.__all__) - {"__version__"} <= anchors


@pytest.mark.slow
@needs_site
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loading = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//|<link[^>]*\shref=[\"']?(?:https?:)?//"
    )
    pages: list[Any] = [page for page in site.rglob("*.html") if loading.search(page.read_text(errors="replace"))]
    assert pages == []


# Not opened from a file: its addresses begin at the root of a server.
FOR_SERVERS = {"404.html"}


@pytest.mark.slow
@pytest.mark.browser
@needs_site
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_a_phone_and_no_page_is_wider(
    site: Path, browser: Any, axe: str, scheme: str
) -> None:
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": PHONE, "height": 800})
    page = context.new_page()
    found: dict[str, Any] = {}
    for file in sorted(site.rglob("*.html")):
        # The pages that tutorials show in frames have tests of their own.
        if file.name in FOR_SERVERS or "md-main" not in file.read_text(encoding="utf-8"):
            continue
        page.goto(file.as_uri())
        page.evaluate(axe)
        run = "axe.run({ exclude: ['iframe'] }, { resultTypes: ['violations'] }).then((result) => result.violations)"
        for violation in page.evaluate(run):
            if violation["impact"] in ("serious", "critical"):
                nodes = [node["html"][:120] for node in violation["nodes"]]
                found.setdefault(violation["id"], {})[str(file.relative_to(site))] = nodes[:2]
        if page.evaluate("document.documentElement.scrollWidth") > PHONE:
            found.setdefault("wider than the screen", []).append(str(file.relative_to(site)))
    context.close()
    assert found == {}
