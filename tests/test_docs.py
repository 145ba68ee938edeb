"""What the documentation shows runs, and says what is so."""

from __future__ import annotations

import re

import pytest

import attnlab as al
from attnlab import registry
from tests.opened_pages import ROOT, python_blocks, run_blocks


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch):
    al.all_mechanisms()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registry._load.cache_clear()
    yield
    registry._load.cache_clear()


@pytest.mark.usefixtures("_own_registry")
def test_the_template_obeys_the_laws() -> None:
    (source,) = python_blocks("docs/your-own-mechanism.md")
    assert len(source.splitlines()) <= 40
    exec(compile(source, "your-own-mechanism.md", "exec", dont_inherit=True), {"__name__": "power"})
    assert "power:p=2" in al.all_mechanisms()
    report = al.check("power:p=2")
    report.raise_if_failed()
    assert repr(report) in (ROOT / "docs/your-own-mechanism.md").read_text()


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}, which is not there"


def test_readme_code_runs() -> None:
    for source in python_blocks("README.md"):
        exec(compile(source, "README.md", "exec", dont_inherit=True), {"__name__": "readme"})


@pytest.mark.parametrize("page", ["abc", "huggingface", "recommend", "value-aware"])
def test_a_page_runs_from_top_to_bottom(page: str) -> None:
    run_blocks(f"docs/{page}.md")
