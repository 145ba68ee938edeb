"""Claims of Peng et al., ABC: Attention with Bounded-memory Control, on language models trained with it."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from attnlab.pages.numbers import number
from papers.abc import PAPER
from papers.abc.lm_differences import Place, ratio_of
from papers.common.cells import Cell, Missing, Result, cell, mean_of, rows_of, select
from papers.common.claims import (
    HELD,
    Bounds,
    Predicate,
    Verdict,
    all_of,
    claims_of,
    close,
    compared,
    decide,
    seed_bounds,
    unless,
)
from papers.common.folders import paper_table

__all__ = ["CLAIMS"]

abc_claim = claims_of("abc", PAPER)


def _papers_perplexity(model: str, n: int | None) -> float:
    rows = paper_table("abc-lm", "table_2a")
    return next(r["perplexity"] for r in rows if (r["model"], r["n"], r["context"]) == (model, n, 480))


# Twice the paper's own gap: a model that is as close as the paper's passes, whatever its seeds do.
CLOSE = 2 * (_papers_perplexity("ABC_MLP", 64) / _papers_perplexity("BASE", None) - 1)


def _lm(model: str, n: int | None, context: int) -> Cell:
    return cell("table_2a", "perplexity", model=model, n=n, context=context)


def _deep(model: str) -> Cell:
    return cell("table_2b", "perplexity", model=model)


def _place(rows: list[dict[str, Any]], wanted: Cell) -> Place:
    where = dict(wanted.where)
    # Table 2b's cells do not name the memory, of which each model has one.
    n = where["n"] if "n" in where else next((row["n"] for row in rows if row["model"] == where["model"]), None)
    return where["model"], n, where.get("context")


def _lower(first: Cell, second: Cell) -> Predicate:
    """The first perplexity is lower; its interval is over seeds, by a deviation that is pooled over the table."""

    def bounds(result: Result) -> Bounds | None:
        rows = rows_of(result, first.table)
        ratio = ratio_of(rows, _place(rows, first), _place(rows, second))
        if ratio is None:
            return None
        of = mean_of(result, second)
        return of * (1 - ratio["high"]), of * (1 - ratio["low"])

    return compared(first, second, lambda a, b: b - a, bounds=bounds)


def _context_unused(result: Result) -> str | None:
    """Why claims on the context cannot be tested: softmax attention itself gains nothing from one, by its interval."""
    long, short = (_lm("BASE", None, context) for context in (480, 0))
    gains = _lower(long, short)(result)
    return None if gains.state == HELD else f"softmax attention itself gains nothing from the context: {gains.reason}"


def _gap_grows() -> Predicate:
    """ABC_MLP-64's lead over the best other member at context 480 against that at context 0, seed by seed."""
    cells = [_lm(model, 64, context) for context in (0, 480) for model in ("Linformer", "ABC_RD", "ABC_MLP")]

    def run(result: Result) -> Verdict:
        leads: list[dict[Any, float]] = []
        for context in (0, 480):
            linformer, random, learned = (
                select(result, _lm(m, 64, context)) for m in ("Linformer", "ABC_RD", "ABC_MLP")
            )
            shared = [seed for seed in learned if seed in linformer and seed in random]
            leads.append({seed: min(linformer[seed], random[seed]) - learned[seed] for seed in shared})
        grown = [leads[1][seed] - leads[0][seed] for seed in leads[0] if seed in leads[1]]
        if not grown:
            raise Missing("table table_2a has no seed that all its models share")
        ours = " against ".join(number(fmean(lead.values())) for lead in reversed(leads))
        return decide(fmean(grown), ours, seed_bounds(grown), seeds=len(grown))

    return unless(_context_unused, Predicate(run, tuple(cells)))


CLAIMS = (
    abc_claim(
        "learned-beats-agnostic",
        "abc-lm",
        "Table 2a",
        "At 64 slots ABC_MLP beats Linformer and random control, with context 0 and 480 (perplexity).",
        "21.1 against 24.0, 19.5 against 23.1",
        all_of(*(_lower(_lm("ABC_MLP", 64, c), _lm(m, 64, c)) for c in (0, 480) for m in ("ABC_RD", "Linformer"))),
        headline="ahead of Linformer and random control in language modelling",
    ),
    abc_claim(
        "gap-grows-with-context",
        "abc-lm",
        "Table 2a",
        "ABC_MLP's lead over the best of them is larger with the longer context.",
        "3.6 against 2.9",
        _gap_grows(),
    ),
    abc_claim(
        "half-the-memory",
        "abc-lm",
        "Table 2a",
        "ABC_MLP with 32 slots beats Linformer and random control with 64.",
        "21.9 against 24.0, 20.5 against 23.1",
        all_of(*(_lower(_lm("ABC_MLP", 32, c), _lm(m, 64, c)) for c in (0, 480) for m in ("ABC_RD", "Linformer"))),
    ),
    abc_claim(
        "linformer-trails-random",
        "abc-lm",
        "Table 2a",
        "In language modelling Linformer is worse than random control.",
        "27.2 against 24.0, 30.7 against 23.1",
        all_of(*(_lower(_lm("ABC_RD", 64, c), _lm("Linformer", 64, c)) for c in (0, 480))),
    ),
    abc_claim(
        "linformer-worsens-with-context",
        "abc-lm",
        "Table 2a",
        "Linformer gets worse when it is given 480 tokens of context.",
        "30.7 against 27.2",
        unless(_context_unused, _lower(_lm("Linformer", 64, 0), _lm("Linformer", 64, 480))),
    ),
    abc_claim(
        "close-to-base",
        "abc-lm",
        "Table 2a",
        f"ABC_MLP with 64 slots is close to softmax attention (within {100 * CLOSE:.1f} %), which none beats.",
        "19.5 against 19.0",
        all_of(
            close(_lm("ABC_MLP", 64, 480), _lm("BASE", None, 480), relative=CLOSE),
            *(_lower(_lm("BASE", None, 480), _lm(m, 64, 480)) for m in ("Linformer", "ABC_RD", "ABC_MLP")),
        ),
        headline="close to softmax attention in language modelling",
    ),
    abc_claim(
        "beats-kernels",
        "abc-lm",
        "Table 2b",
        "ABC_MLP with 64 slots beats the kernel-based ELU, RFA and T2R.",
        "19.1 against 22.8, 21.3, 20.8",
        all_of(*(_lower(_deep("ABC_MLP"), _deep(other)) for other in ("ELU", "RFA", "T2R"))),
    ),
)
