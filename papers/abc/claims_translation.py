"""Claims of Peng et al., ABC: Attention with Bounded-memory Control, on translators trained with it.

Those at a quarter of the paper's slots are its claims too, for sentences that its slots would hold whole.
"""

from __future__ import annotations

from attnlab.pages.numbers import number
from papers.abc import PAPER
from papers.common.claims import (
    HELD,
    NOT_HELD,
    Bounds,
    Cell,
    Predicate,
    Result,
    Verdict,
    all_of,
    averaged,
    averages,
    averages_more,
    cell,
    claims_of,
    fails,
    less,
    mean_of,
)

__all__ = ["CLAIMS"]

abc_claim = claims_of("abc", PAPER)

# BLEU.
WITHIN = 0.5
NEWS = "wmt10k-en-de"


def _mt(model: str, cross: int | None, causal: int | None) -> Cell:
    return cell("table_3a", "bleu", model=model, cross=cross, causal=causal)


def _few(model: str, cross: int | None, causal: int | None) -> Cell:
    """A quarter of the paper's slots: they bound the memory where sentences are shorter than the paper's."""
    return cell("table_3a_quarter", "bleu", model=model, cross=cross, causal=causal)


def _tatoeba(model: str, cross: int | None, causal: int | None) -> Cell:
    return cell("table_3a_other", "bleu", data="tatoeba-es-en", model=model, cross=cross, causal=causal)


def _loss(model: str, cross: int, causal: int, data: str = "multi30k-en-de") -> Cell:
    return cell("losses", "nll", data=data, model=model, cross=cross, causal=causal)


def _lower(model: str, cross: int, causal: int, *others: Cell, data: str = "multi30k-en-de") -> Predicate:
    """The model's loss is lower than the others', by the seeds' spread."""
    return all_of(*(less(_loss(model, cross, causal, data), other) for other in others))


def _doc(model: str, cross: int | None) -> Cell:
    return cell("table_3b", "bleu", model=model, cross=cross)


def _phi(model: str, causal: int = 32) -> Cell:
    return cell("table_7", "bleu", model=model, cross=32, causal=causal)


def _close(first: Cell, second: Cell) -> Predicate:
    return averaged(first, second, lambda gap: abs(gap) <= WITHIN)


def _smallest_memory() -> Predicate:
    """How far the smallest memory (8-8) is behind the best of Table 5."""

    def run(result: Result, _: Bounds | None) -> Verdict:
        best = max(averages(result, "table_5", "bleu", "cross", "causal").values())
        behind = best - mean_of(result, cell("table_5", "bleu", cross=8, causal=8))
        return Verdict(HELD if behind <= 1.5 else NOT_HELD, f"{number(behind)} BLEU")

    return Predicate(run, (cell("table_5", "bleu", cross=8, causal=8),))


CLAIMS = (
    abc_claim(
        "mt-on-par",
        "abc-mt",
        "Table 3a",
        "ABC_MLP translates as well as softmax attention, with 32-32 and with 32-8 slots (within 0.5 BLEU).",
        "27.3 and 27.1 against 27.2",
        all_of(*(_close(_mt("ABC_MLP", 32, n), _mt("BASE", None, None)) for n in (32, 8))),
    ),
    abc_claim(
        "mt-beats-agnostic",
        "abc-mt",
        "Table 3a",
        "ABC_MLP with 32-32 slots beats Linformer and random control with as many.",
        "27.3 against 26.6, 25.7",
        all_of(*(averages_more(_mt("ABC_MLP", 32, 32), _mt(m, 32, 32)) for m in ("Linformer", "ABC_RD"))),
    ),
    abc_claim(
        "mt-beats-larger",
        "abc-mt",
        "Table 3a",
        "ABC_MLP with 32-8 slots beats Linformer and random control with 64-64.",
        "27.1 against 26.7, 26.2",
        all_of(*(averages_more(_mt("ABC_MLP", 32, 8), _mt(m, 64, 64)) for m in ("Linformer", "ABC_RD"))),
    ),
    abc_claim(
        "mt-linformer-leads-random",
        "abc-mt",
        "Table 3a",
        "In translation, unlike in language modelling, Linformer beats random control.",
        "26.6 against 25.7, 26.7 against 26.2",
        all_of(*(averages_more(_mt("Linformer", n, n), _mt("ABC_RD", n, n)) for n in (32, 64))),
    ),
    abc_claim(
        "mt-on-par-quarter",
        "abc-mt",
        "Table 3a, a quarter of its slots",
        "ABC_MLP translates as well as softmax attention, with 8-8 and with 8-2 slots (within 0.5 BLEU).",
        "",
        all_of(*(_close(_few("ABC_MLP", 8, n), _few("BASE", None, None)) for n in (8, 2))),
    ),
    abc_claim(
        "mt-beats-agnostic-quarter",
        "abc-mt",
        "Table 3a, a quarter of its slots",
        "ABC_MLP with 8-8 slots beats Linformer and random control with as many.",
        "",
        all_of(*(averages_more(_few("ABC_MLP", 8, 8), _few(m, 8, 8)) for m in ("Linformer", "ABC_RD"))),
    ),
    abc_claim(
        "mt-beats-larger-quarter",
        "abc-mt",
        "Table 3a, a quarter of its slots",
        "ABC_MLP with 8-2 slots beats Linformer and random control with 16-16.",
        "",
        all_of(*(averages_more(_few("ABC_MLP", 8, 2), _few(m, 16, 16)) for m in ("Linformer", "ABC_RD"))),
    ),
    abc_claim(
        "mt-linformer-leads-random-quarter",
        "abc-mt",
        "Table 3a, a quarter of its slots",
        "Linformer beats random control, with 8-8 and with 16-16 slots.",
        "",
        all_of(*(averages_more(_few("Linformer", n, n), _few("ABC_RD", n, n)) for n in (8, 16))),
    ),
    abc_claim(
        "mt-beats-window-and-cluster-quarter",
        "abc-mt",
        "Table 7, a quarter of its slots",
        "Learned control with 8-8 slots beats the sliding window and clustering with as many.",
        "",
        all_of(*(averages_more(_few("ABC_MLP", 8, 8), _few(other, 8, 8)) for other in ("Window", "Cluster"))),
    ),
    abc_claim(
        "mt-tatoeba-on-par",
        "abc-mt",
        "Table 3a, a quarter of its slots, Spanish to English",
        "ABC_MLP translates as well as softmax attention, with 8-8 and with 8-2 slots (within 0.5 BLEU).",
        "",
        all_of(*(_close(_tatoeba("ABC_MLP", 8, n), _tatoeba("BASE", None, None)) for n in (8, 2))),
    ),
    abc_claim(
        "mt-tatoeba-beats-agnostic",
        "abc-mt",
        "Table 3a, a quarter of its slots, Spanish to English",
        "ABC_MLP with 8-8 slots beats Linformer and random control with as many.",
        "",
        all_of(*(averages_more(_tatoeba("ABC_MLP", 8, 8), _tatoeba(m, 8, 8)) for m in ("Linformer", "ABC_RD"))),
    ),
    abc_claim(
        "mt-tatoeba-linformer-leads-random",
        "abc-mt",
        "Table 3a, a quarter of its slots, Spanish to English",
        "Linformer beats random control, with 8-8 slots.",
        "",
        averages_more(_tatoeba("Linformer", 8, 8), _tatoeba("ABC_RD", 8, 8)),
    ),
    abc_claim(
        "mt-causal-memory-small",
        "abc-mt",
        "Table 5",
        "With 64 cross slots, 8 causal slots instead of 64 cost little (within 0.5 BLEU).",
        "25.5 against 25.8",
        _close(cell("table_5", "bleu", cross=64, causal=8), cell("table_5", "bleu", cross=64, causal=64)),
    ),
    abc_claim(
        "mt-smallest-memory",
        "abc-mt",
        "Table 5",
        "8-8 slots are only a little behind the best (1.5 BLEU).",
        "1.1 BLEU",
        _smallest_memory(),
    ),
    abc_claim(
        "mt-beats-window-and-cluster",
        "abc-mt",
        "Table 7",
        "Learned control beats the sliding window and clustering at the same memory.",
        "27.3 against 26.3, 26.8",
        all_of(*(averages_more(_phi("MLP-exp"), _phi(other)) for other in ("Window", "Cluster"))),
    ),
    abc_claim(
        "mt-exp-beats-relu-and-sigmoid",
        "abc-mt",
        "Table 7",
        "exp is the better activation than ReLU and sigmoid.",
        "27.3 against 26.4, 27.0",
        all_of(*(averages_more(_phi("MLP-exp"), _phi(other)) for other in ("MLP-ReLU", "MLP-sigmoid"))),
    ),
    abc_claim(
        "mt-relu-fails",
        "abc-mt",
        "Table 7",
        "ReLU control with 32-8 slots does not converge.",
        "did not converge",
        fails(_phi("MLP-ReLU", 8), _phi("MLP-exp", 8), below=0.5),
    ),
    abc_claim(
        "mt-all-abc",
        "abc-mt",
        "Table 7",
        "ABC in the encoder too costs a little.",
        "27.0 against 27.3",
        averages_more(_phi("MLP-exp"), _phi("MLP-exp-all")),
    ),
    abc_claim(
        "mt-loss-beats-agnostic",
        "abc-mt",
        "Table 3a, by the held-out loss",
        "ABC_MLP with 32-32 slots has a lower loss than Linformer and random control with as many.",
        "",
        _lower("ABC_MLP", 32, 32, *(_loss(m, 32, 32) for m in ("Linformer", "ABC_RD"))),
    ),
    abc_claim(
        "mt-loss-beats-larger",
        "abc-mt",
        "Table 3a, by the held-out loss",
        "ABC_MLP with 32-8 slots has a lower loss than Linformer and random control with 64-64.",
        "",
        _lower("ABC_MLP", 32, 8, *(_loss(m, 64, 64) for m in ("Linformer", "ABC_RD"))),
    ),
    abc_claim(
        "mt-loss-beats-agnostic-quarter",
        "abc-mt",
        "Table 3a, a quarter of its slots, by the held-out loss",
        "ABC_MLP with 8-8 slots has a lower loss than Linformer and random control with as many.",
        "",
        _lower("ABC_MLP", 8, 8, *(_loss(m, 8, 8) for m in ("Linformer", "ABC_RD"))),
    ),
    abc_claim(
        "mt-loss-beats-larger-quarter",
        "abc-mt",
        "Table 3a, a quarter of its slots, by the held-out loss",
        "ABC_MLP with 8-2 slots has a lower loss than Linformer and random control with 16-16.",
        "",
        _lower("ABC_MLP", 8, 2, *(_loss(m, 16, 16) for m in ("Linformer", "ABC_RD"))),
    ),
    abc_claim(
        "mt-loss-beats-window-and-cluster-quarter",
        "abc-mt",
        "Table 7, a quarter of its slots, by the held-out loss",
        "Learned control with 8-8 slots has a lower loss than the sliding window and clustering with as many.",
        "",
        _lower("ABC_MLP", 8, 8, *(_loss(m, 8, 8) for m in ("Window", "Cluster"))),
    ),
    abc_claim(
        "mt-loss-news-beats-agnostic",
        "abc-mt",
        "Table 3a, a quarter of its slots, news, by the held-out loss",
        "ABC_MLP with 8-8 slots has a lower loss than Linformer and random control with as many.",
        "",
        _lower("ABC_MLP", 8, 8, *(_loss(m, 8, 8, NEWS) for m in ("Linformer", "ABC_RD")), data=NEWS),
    ),
    abc_claim(
        "mt-loss-exp-beats-relu-and-sigmoid",
        "abc-mt",
        "Table 7, by the held-out loss",
        "exp has a lower loss than ReLU and sigmoid.",
        "",
        _lower("ABC_MLP", 32, 32, *(_loss(m, 32, 32) for m in ("MLP-ReLU", "MLP-sigmoid"))),
    ),
    abc_claim(
        "mt-loss-all-abc",
        "abc-mt",
        "Table 7, by the held-out loss",
        "ABC in the encoder too has a higher loss.",
        "",
        _lower("ABC_MLP", 32, 32, _loss("MLP-exp-all", 32, 32)),
    ),
    abc_claim(
        "doc-mt-beats-random",
        "abc-doc-mt",
        "Table 3b",
        "Translating documents, ABC_MLP beats random control.",
        "39.7 against 38.6",
        averages_more(_doc("ABC_MLP", 128), _doc("ABC_RD", 128)),
    ),
    abc_claim(
        "doc-mt-close-to-base",
        "abc-doc-mt",
        "Table 3b",
        "Translating documents, ABC_MLP is close to softmax attention (within 0.5 BLEU).",
        "39.7 against 39.9",
        _close(_doc("ABC_MLP", 128), _doc("BASE", None)),
    ),
    abc_claim(
        "doc-mt-linformer-fails",
        "abc-doc-mt",
        "Table 3b",
        "Translating documents, Linformer does not converge.",
        "did not converge",
        fails(_doc("Linformer", 128), _doc("ABC_MLP", 128), below=0.5),
    ),
    abc_claim(
        "doc-mt-beats-agnostic-quarter",
        "abc-doc-mt",
        "Table 3b, a quarter of its slots",
        "Translating documents with 32-16 slots, ABC_MLP beats Linformer and random control.",
        "",
        all_of(*(averages_more(_doc("ABC_MLP", 32), _doc(m, 32)) for m in ("Linformer", "ABC_RD"))),
    ),
    abc_claim(
        "doc-mt-close-to-base-quarter",
        "abc-doc-mt",
        "Table 3b, a quarter of its slots",
        "Translating documents with 32-16 slots, ABC_MLP is close to softmax attention (within 0.5 BLEU).",
        "",
        _close(_doc("ABC_MLP", 32), _doc("BASE", None)),
    ),
)
