"""Shapes in signatures are checked while the tests run, every test starts from the same seed, and there is one browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Two workers on two cores: one thread each, or they fight. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from tests.shape_checks import checked_signatures

if not torch.cuda.is_available():
    # Triton reads this when it is first imported; then its kernels run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

with checked_signatures("attnlab"):
    import attnlab
    import attnlab.registry

    attnlab.all_mechanisms()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked gpu skips itself where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mechanisms and cache policies that the test registers are forgotten after it."""
    from attnlab.caches import registry as policies

    attnlab.all_mechanisms()
    attnlab.cache_policy_names()
    for registry in (attnlab.registry, policies):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        registry._load.cache_clear()
    yield
    for registry in (attnlab.registry, policies):
        registry._load.cache_clear()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium; playwright can be started once in a process."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=chromium)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, out of node_modules (npm install --no-save axe-core) or the file that ATTNLAB_AXE names."""
    script = Path(os.environ.get("ATTNLAB_AXE") or "node_modules/axe-core/axe.min.js")
    if not script.is_file():
        pytest.skip("there is no axe-core: npm install --no-save axe-core, or name its axe.min.js in ATTNLAB_AXE")
    return script.read_text(encoding="utf-8")
