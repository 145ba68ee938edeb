"""The Python on the pages runs, links lead somewhere, and the template of a mechanism obeys the laws."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import attnlab as al
from attnlab.pages.explorer import read_timeline
from tests.opened_pages import ROOT, missing_models, page_blocks, python_blocks, run_blocks


@pytest.mark.usefixtures("own_registry")
def test_the_template_obeys_the_laws() -> None:
    (source,) = python_blocks("docs/your-own-mechanism.md")
    assert len(source.splitlines()) <= 40
    exec(compile(source, "your-own-mechanism.md", "exec", dont_inherit=True), {"__name__": "power"})
    assert "power:p=2" in al.all_mechanisms()
    report = al.check("power:p=2")
    report.raise_if_failed()
    assert repr(report) in (ROOT / "docs/your-own-mechanism.md").read_text()


def _read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _pages(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


GUIDES = _pages("README.md", "docs/*.md", "docs/*/*.md")
ALL_PAGES = [*GUIDES, *_pages("[!R]*.md", "notes/*.md", "papers/*.md", "papers/*/*.md")]
NOT_RUN = {
    "docs/your-own-mechanism.md": "it registers a mechanism, and has a test of its own above",
    **dict.fromkeys(_pages("docs/tutorials/[!i]*.md"), "a notebook, which tests/test_site.py runs"),
}
RUNNABLE = [page for page in GUIDES if python_blocks(page) and page not in NOT_RUN]


def _check_guidance(names: dict[str, Any]) -> None:
    assert names["best"]["closeness"] > 0.2
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in names["model"].parameters())


def _check_explorer(names: dict[str, Any]) -> None:
    assert Path("page.html").stat().st_size > 50_000
    assert read_timeline(Path("runs/guided")).steps[0].step == 100


def _check_training(names: dict[str, Any]) -> None:
    assert names["outcome"].step == 100
    assert {report.status for report in names["reports"].values()} == {"done"}
    assert Path("runs/seeds/seed-2/result.json").exists()


def _check_readme(names: dict[str, Any]) -> None:
    # The head of the picture: it looks up the answer.
    assert names["tokenizer"].decode(names["inputs"]["input_ids"][0, names["row"].argmax()]) == " blue"
    assert names["row"].max() > 0.5


def _check_models(names: dict[str, Any]) -> None:
    assert names["W"].shape == (2, 8, 16, 16)


# What must be true after a page has run, beyond what the page itself asserts.
AFTERWARDS = {
    "README.md": _check_readme,
    "docs/explorer.md": _check_explorer,
    "docs/guidance.md": _check_guidance,
    "docs/models.md": _check_models,
    "docs/training.md": _check_training,
}


# A page with a real language model takes a while.
LONG = {page for page in RUNNABLE if 'load_model("smollm2")' in "".join(python_blocks(page))}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow) if page in LONG else page for page in RUNNABLE]
)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := missing_models(page):
        pytest.skip(f"{', '.join(missing)} is not here: make models brings it")
    monkeypatch.chdir(tmp_path)
    names = run_blocks(page)
    if page in AFTERWARDS:
        AFTERWARDS[page](names)


# Pages of docs/ that are no guides, so that they may be longer and need not say when to do without.
NO_GUIDES = {
    "docs/architecture.md": "a map for contributors",
    "docs/claims.md": "the ledger, written from the results",
    "docs/command-line.md": "every option, written from the parsers",
    "docs/gallery.md": "pictures",
}


@pytest.mark.parametrize("page", sorted(set(_pages("docs/*.md", "docs/concepts/*.md")) - set(NO_GUIDES)))
def test_a_guide_is_short_and_ends_with_when_not_to_use_it(page: str) -> None:
    text = _read(page)
    assert len(text.splitlines()) <= 200
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE)[-1].startswith("When not to ")


@pytest.mark.parametrize("page", _pages("docs/concepts/[!i]*.md"))
def test_a_concept_has_its_equation_figure_paper_and_verdict(page: str) -> None:
    text = _read(page)
    assert [block.language for block in page_blocks(page)].count("math") == 1
    assert len(re.findall(r"^!\[.+\]\(.+\.svg\)$", text, flags=re.MULTILINE)) == 1
    for part in ("**The paper.** ", "**Our verdict.**", "<!-- headline:"):
        assert text.count(part) == 1


@pytest.mark.parametrize("page", GUIDES)
def test_guides_import_nothing_that_is_not_installed(page: str) -> None:
    assert not re.findall(r"^(?:from|import) (?:papers|tests|benchmarks)\b", _read(page), flags=re.MULTILINE)


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", _read(page)):
        if "://" in target:
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}, which does not exist"
        if anchor:
            assert anchor in _anchors(path), f"{page} links to {target}#{anchor}; there is no such heading"


def _anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
