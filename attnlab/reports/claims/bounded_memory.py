"""Claims of Peng et al., ABC: Attention with Bounded-memory Control, on models trained with it from the start."""

from __future__ import annotations

from attnlab.reports.claims.ledger import HELD, NOT_HELD, Bounds, Cell, Claim, Predicate, Result, Verdict
from attnlab.reports.claims.predicates import (
    all_of,
    averages,
    cell,
    close,
    fails,
    less,
    mean_of,
    more,
)
from attnlab.reports.numbers import number

__all__ = ["CLAIMS", "TABLES"]

PAPER = "ABC"
TABLES = {
    "abc-lm": {
        "table_2a": "model (BASE, Linformer, ABC_RD, ABC_MLP), n, context (0, 480), perplexity",
        "table_2b": "model (BASE, ELU, RFA, T2R, ABC_MLP), n, perplexity",
    },
    "abc-mt": {
        "table_3a": "model, cross, causal, bleu",
        "table_5": "cross, causal, bleu: ABC_MLP, greedy, no averaging",
        "table_7": "model (BASE, Window, Cluster, MLP-ReLU, MLP-sigmoid, MLP-exp, MLP-exp-all), cross, causal, bleu, "
        "converged",
    },
    "abc-doc-mt": {"table_3b": "model, cross, causal, bleu, converged"},
}


def _lm(model: str, n: int | None, context: int) -> Cell:
    return cell("table_2a", "perplexity", model=model, n=n, context=context)


def _mt(model: str, cross: int | None, causal: int | None) -> Cell:
    return cell("table_3a", "bleu", model=model, cross=cross, causal=causal)


def _phi(model: str, causal: int = 32) -> Cell:
    return cell("table_7", "bleu", model=model, cross=32, causal=causal)


def _gap_grows() -> Predicate:
    """ABC_MLP-64's lead over the best other member at context 480 against that at context 0."""
    cells = [_lm(model, 64, context) for context in (0, 480) for model in ("Linformer", "ABC_RD", "ABC_MLP")]

    def run(result: Result, _: Bounds | None) -> Verdict:
        leads = []
        for context in (0, 480):
            linformer, random, learned = (
                mean_of(result, _lm(m, 64, context)) for m in ("Linformer", "ABC_RD", "ABC_MLP")
            )
            leads.append(min(linformer, random) - learned)
        return Verdict(HELD if leads[1] > leads[0] else NOT_HELD, f"{number(leads[1])} against {number(leads[0])}")

    return Predicate(run, tuple(cells))


def _smallest_memory() -> Predicate:
    """How far the smallest memory (8-8) is behind the best of Table 5."""

    def run(result: Result, _: Bounds | None) -> Verdict:
        best = max(averages(result, "table_5", "bleu", "cross", "causal").values())
        behind = best - mean_of(result, cell("table_5", "bleu", cross=8, causal=8))
        return Verdict(HELD if behind <= 1.5 else NOT_HELD, f"{number(behind)} BLEU")

    return Predicate(run, (cell("table_5", "bleu", cross=8, causal=8),))


def _claim(name: str, results: str, where: str, statement: str, paper_value: str, test: Predicate) -> Claim:
    return Claim(f"abc-{name}", PAPER, where, statement, paper_value, results, test)


LANGUAGE_MODELING = (
    _claim(
        "learned-beats-agnostic",
        "abc-lm",
        "Table 2a",
        "At 64 slots ABC_MLP beats Linformer and random control, with context 0 and 480 (perplexity).",
        "21.1 against 24.0, 19.5 against 23.1",
        all_of(*(less(_lm("ABC_MLP", 64, c), _lm(m, 64, c)) for c in (0, 480) for m in ("ABC_RD", "Linformer"))),
    ),
    _claim(
        "gap-grows-with-context",
        "abc-lm",
        "Table 2a",
        "ABC_MLP's lead over the best of them is larger with the longer context.",
        "3.6 against 2.9",
        _gap_grows(),
    ),
    _claim(
        "half-the-memory",
        "abc-lm",
        "Table 2a",
        "ABC_MLP with 32 slots beats Linformer and random control with 64.",
        "21.9 against 24.0, 20.5 against 23.1",
        all_of(*(less(_lm("ABC_MLP", 32, c), _lm(m, 64, c)) for c in (0, 480) for m in ("ABC_RD", "Linformer"))),
    ),
    _claim(
        "linformer-trails-random",
        "abc-lm",
        "Table 2a",
        "In language modelling Linformer is worse than random control.",
        "27.2 against 24.0, 30.7 against 23.1",
        all_of(*(more(_lm("Linformer", 64, c), _lm("ABC_RD", 64, c)) for c in (0, 480))),
    ),
    _claim(
        "linformer-worsens-with-context",
        "abc-lm",
        "Table 2a",
        "Linformer gets worse when it is given 480 tokens of context.",
        "30.7 against 27.2",
        more(_lm("Linformer", 64, 480), _lm("Linformer", 64, 0)),
    ),
    _claim(
        "close-to-base",
        "abc-lm",
        "Table 2a",
        "ABC_MLP with 64 slots is close to softmax attention (within 5 %), and none is better than it.",
        "19.5 against 19.0",
        all_of(
            close(_lm("ABC_MLP", 64, 480), _lm("BASE", None, 480), relative=0.05),
            *(more(_lm(m, 64, 480), _lm("BASE", None, 480)) for m in ("Linformer", "ABC_RD", "ABC_MLP")),
        ),
    ),
    _claim(
        "beats-kernels",
        "abc-lm",
        "Table 2b",
        "ABC_MLP with 64 slots beats the kernel-based ELU, RFA and T2R.",
        "19.1 against 22.8, 21.3, 20.8",
        all_of(
            *(
                less(cell("table_2b", "perplexity", model="ABC_MLP", n=64), cell("table_2b", "perplexity", model=other))
                for other in ("ELU", "RFA", "T2R")
            )
        ),
    ),
)

TRANSLATION = (
    _claim(
        "mt-on-par",
        "abc-mt",
        "Table 3a",
        "ABC_MLP translates as well as softmax attention, with 32-32 and with 32-8 slots (within 0.5 BLEU).",
        "27.3 and 27.1 against 27.2",
        all_of(*(close(_mt("ABC_MLP", 32, n), _mt("BASE", None, None), within=0.5) for n in (32, 8))),
    ),
    _claim(
        "mt-beats-larger",
        "abc-mt",
        "Table 3a",
        "ABC_MLP with 32-8 slots beats Linformer and random control with 64-64.",
        "27.1 against 26.7, 26.2",
        all_of(*(more(_mt("ABC_MLP", 32, 8), _mt(m, 64, 64)) for m in ("Linformer", "ABC_RD"))),
    ),
    _claim(
        "mt-linformer-leads-random",
        "abc-mt",
        "Table 3a",
        "In translation, unlike in language modelling, Linformer beats random control.",
        "26.6 against 25.7, 26.7 against 26.2",
        all_of(*(more(_mt("Linformer", n, n), _mt("ABC_RD", n, n)) for n in (32, 64))),
    ),
    _claim(
        "mt-causal-memory-small",
        "abc-mt",
        "Table 5",
        "With 64 cross slots, 8 causal slots instead of 64 cost little (within 0.5 BLEU).",
        "25.5 against 25.8",
        close(cell("table_5", "bleu", cross=64, causal=8), cell("table_5", "bleu", cross=64, causal=64), within=0.5),
    ),
    _claim(
        "mt-smallest-memory",
        "abc-mt",
        "Table 5",
        "8-8 slots are only a little behind the best (1.5 BLEU).",
        "1.1 BLEU",
        _smallest_memory(),
    ),
    _claim(
        "mt-beats-window-and-cluster",
        "abc-mt",
        "Table 7",
        "Learned control beats the sliding window and clustering at the same memory.",
        "27.3 against 26.3, 26.8",
        all_of(*(more(_phi("MLP-exp"), _phi(other)) for other in ("Window", "Cluster"))),
    ),
    _claim(
        "mt-exp-beats-relu-and-sigmoid",
        "abc-mt",
        "Table 7",
        "exp is the better activation than ReLU and sigmoid.",
        "27.3 against 26.4, 27.0",
        all_of(*(more(_phi("MLP-exp"), _phi(other)) for other in ("MLP-ReLU", "MLP-sigmoid"))),
    ),
    _claim(
        "mt-relu-fails",
        "abc-mt",
        "Table 7",
        "ReLU control with 32-8 slots does not converge.",
        "did not converge",
        fails(_phi("MLP-ReLU", 8), _phi("MLP-exp", 8), below=0.5),
    ),
    _claim(
        "mt-all-abc",
        "abc-mt",
        "Table 7",
        "ABC in the encoder too costs a little.",
        "27.0 against 27.3",
        less(_phi("MLP-exp-all"), _phi("MLP-exp")),
    ),
    _claim(
        "doc-mt-beats-random",
        "abc-doc-mt",
        "Table 3b",
        "Translating documents, ABC_MLP beats random control.",
        "39.7 against 38.6",
        more(cell("table_3b", "bleu", model="ABC_MLP"), cell("table_3b", "bleu", model="ABC_RD")),
    ),
    _claim(
        "doc-mt-close-to-base",
        "abc-doc-mt",
        "Table 3b",
        "Translating documents, ABC_MLP is close to softmax attention (within 0.5 BLEU).",
        "39.7 against 39.9",
        close(cell("table_3b", "bleu", model="ABC_MLP"), cell("table_3b", "bleu", model="BASE"), within=0.5),
    ),
    _claim(
        "doc-mt-linformer-fails",
        "abc-doc-mt",
        "Table 3b",
        "Translating documents, Linformer does not converge.",
        "did not converge",
        fails(cell("table_3b", "bleu", model="Linformer"), cell("table_3b", "bleu", model="ABC_MLP"), below=0.5),
    ),
)

CLAIMS = LANGUAGE_MODELING + TRANSLATION
