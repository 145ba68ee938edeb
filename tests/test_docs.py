"""What the documentation shows runs, and says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import attnlab as al
from attnlab import registry
from tests.conformance.laws import LAWS

ROOT = Path(__file__).resolve().parent.parent


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch):
    al.all_mechanisms()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    registry._load.cache_clear()
    yield
    registry._load.cache_clear()


@pytest.mark.usefixtures("_own_registry")
def test_the_template_obeys_the_laws() -> None:
    (source,) = python_blocks(ROOT / "docs" / "your-own-mechanism.md")
    assert len(source.splitlines()) <= 40
    exec(compile(source, "your-own-mechanism.md", "exec", dont_inherit=True), {"__name__": "power"})
    assert "power:p=2" in al.all_mechanisms()
    for law in LAWS.values():
        law(al.mechanism("power:p=2"))


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}, which is not there"


def test_readme_code_runs() -> None:
    for source in python_blocks(ROOT / "README.md"):
        exec(compile(source, "README.md", "exec", dont_inherit=True), {"__name__": "readme"})
