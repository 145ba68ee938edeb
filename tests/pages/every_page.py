"""Every kind of page that attnlab writes, from made-up results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from attnlab.pages import compare_page, demo_page, run_page
from attnlab.pages.audit import audit_page
from attnlab.pages.evaluate import evaluate_page
from attnlab.pages.explorer import explore_run
from attnlab.pages.judge import judge_page
from attnlab.pages.long import Region, long_page, pack_long
from attnlab.pages.notebook import Result
from attnlab.reading.timeline import record_step
from papers.common.ledger_page import claims_page
from tests.papers.common.made_up import as_the_papers_say

from .examples import (
    NASTY,
    a_comparison,
    a_comparison_with_maps,
    a_demo,
    a_judgement,
    a_recommendation,
    an_audit,
    an_evaluation,
    write_run,
)
from .explorer.examples import one_text, translation
from .long_examples import random_text

__all__ = ["PAGES", "write_page"]


def _hostile(folder: Path) -> str:
    result = a_comparison_with_maps()
    result["rows"][1]["mechanism"] = NASTY
    result["tokens"][3] = NASTY
    return compare_page(result)


def _stopped_demo(folder: Path) -> str:
    return demo_page({name: value for name, value in a_demo().items() if name not in ("comparison", "memory")})


def _runs(folder: Path) -> str:
    return run_page([write_run(folder / f"{lr}-{seed}", seed=seed, lr=lr) for lr in (1e-3, 3e-4) for seed in range(3)])


def _training(folder: Path) -> bytes:
    for step in (0, 10, 20):
        maps = {("encoder", layer): torch.randn(2, 3, 5, 5).softmax(-1) for layer in (0, 1)}
        record_step(folder, step, maps, tokens=["[CLS]", "the", "cat", "sat", "[SEP]"], scalars={"loss": 3 - step / 10})
    return explore_run(folder).html()


def _long(folder: Path) -> bytes:
    exact = Region(0, 1, 100, 90, np.random.default_rng(0).random((20, 30), np.float32))
    return long_page(pack_long(replace(random_text(600, 3, 4, chosen=3, squares=32), regions=[exact])))


def _notebook(folder: Path) -> str:
    """Views of results as a notebook sets them: its own colours, on its own ground."""
    results = (a_comparison(), an_evaluation(), a_judgement(), an_audit())
    views = "".join(Result(result)._repr_html_() for result in results)
    head = "<title>A notebook</title><meta name='viewport' content='width=device-width'><style>:root { color-scheme: light dark }</style>"
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><main><h1>A notebook</h1>{views}</main></body></html>'
    )


# By name: the page's content, made with an empty folder for what it reads.
PAGES: dict[str, Callable[[Path], str | bytes]] = {
    "compare": lambda _: compare_page(a_comparison()),
    "compare-layers": lambda _: compare_page(a_comparison() | {"recommendation": a_recommendation()}),
    "compare-heads": lambda _: compare_page(a_comparison() | {"recommendation": a_recommendation(by="heads")}),
    "compare-maps": lambda _: compare_page(a_comparison_with_maps()),
    "demo": lambda _: demo_page(a_demo()),
    "demo-stopped": _stopped_demo,
    "hostile": _hostile,
    "runs": _runs,
    "claims": lambda _: claims_page(as_the_papers_say())[0],
    "judge": lambda _: judge_page(a_judgement()),
    "evaluate": lambda _: evaluate_page(an_evaluation()),
    "audit": lambda _: audit_page(an_audit()),
    "explore": lambda _: one_text()[0].html(),
    "explore-translation": lambda _: translation()[0].html(),
    "explore-training": _training,
    "explore-long": _long,
    "notebook": _notebook,
}


def write_page(name: str, folder: Path) -> Path:
    """The page ``name`` in a file of its name."""
    read_from = folder / name
    read_from.mkdir()
    content = PAGES[name](read_from)
    path = folder / f"{name}.html"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
