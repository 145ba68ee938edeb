"""The Python on the pages runs, links lead somewhere, and the template of a mechanism obeys the laws."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import attnlab as al
from attnlab.cli import make_parser
from attnlab.pages.explorer import read_timeline
from tests.opened_pages import ROOT, python_blocks, run_blocks


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
    "docs/kernels.md": "its Python is about tensors on a GPU",
    **dict.fromkeys(_pages("docs/tutorials/*.md"), "a notebook, which tests/test_site.py runs"),
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


def _check_models(names: dict[str, Any]) -> None:
    assert names["W"].shape == (2, 8, 16, 16)


# What must be true after a page has run, beyond what the page itself asserts.
AFTERWARDS = {
    "docs/explorer.md": _check_explorer,
    "docs/guidance.md": _check_guidance,
    "docs/models.md": _check_models,
    "docs/training.md": _check_training,
}


@pytest.mark.parametrize("page", RUNNABLE)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_blocks(page)
    if page in AFTERWARDS:
        AFTERWARDS[page](names)


@pytest.mark.parametrize("page", ALL_PAGES)
def test_python_that_is_only_shown_compiles(page: str) -> None:
    """A block that cannot run in the tests, as it needs a download, is fenced as ``py`` instead of ``python``."""
    for source in re.findall(r"```py\n(.*?)```", _read(page), flags=re.DOTALL):
        compile(source, page, "exec", dont_inherit=True)


def _commands(page: str) -> list[str]:
    """The lines of a page's blocks, other than Python, that call attnlab's command line; a command may go on below."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", _read(page), flags=re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [match.group(1) for line in lines if (match := re.match(r"(?:\.venv/bin/)?attnlab ([a-z].*)", line))]


COMMANDS_SHOWN = [(page, line) for page in GUIDES for line in _commands(page)]


@pytest.mark.parametrize(("page", "line"), COMMANDS_SHOWN, ids=lambda shown: shown[:60])
def test_commands_on_the_pages_are_understood(page: str, line: str) -> None:
    """They are about a reader's own model and text, so they are not run, but every option must be one that there is."""
    words = shlex.split(line, comments=True)
    assert make_parser(words).parse_args(words).command == words[0]


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
