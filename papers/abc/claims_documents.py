"""Claims of Peng et al., ABC: Attention with Bounded-memory Control, on translators of documents trained with it."""

from __future__ import annotations

from papers.abc import PAPER
from papers.abc.claims_translation import CONVERGED, ahead, on_par
from papers.abc.tables import still_falling
from papers.common.cells import Cell, Result, cell
from papers.common.claims import all_of, claims_of, fails, unless

__all__ = ["CLAIMS"]

abc_claim = claims_of("abc", PAPER)


def _doc(model: str, cross: int | None) -> Cell:
    return cell("table_3b", "bleu", model=model, cross=cross)


def _linformer_still_falls(result: Result) -> str | None:
    return still_falling((result.get("tables") or {}).get("validation", []), "Linformer-128-64", "ABC_MLP-128-64")


CLAIMS = (
    abc_claim(
        "doc-mt-beats-random",
        "abc-doc-mt",
        "Table 3b",
        "Translating documents, ABC_MLP beats random control.",
        "39.7 against 38.6",
        ahead(_doc("ABC_MLP", 128), _doc("ABC_RD", 128)),
    ),
    abc_claim(
        "doc-mt-close-to-base",
        "abc-doc-mt",
        "Table 3b",
        "Translating documents, ABC_MLP is close to softmax attention (within 0.5 BLEU).",
        "39.7 against 39.9",
        on_par(_doc("ABC_MLP", 128), _doc("BASE", None)),
    ),
    abc_claim(
        "doc-mt-linformer-fails",
        "abc-doc-mt",
        "Table 3b",
        "Translating documents, Linformer does not converge.",
        "did not converge",
        unless(_linformer_still_falls, fails(_doc("Linformer", 128), _doc("ABC_MLP", 128), below=CONVERGED)),
    ),
    abc_claim(
        "doc-mt-beats-agnostic-quarter",
        "abc-doc-mt",
        "Table 3b, a quarter of its slots",
        "Translating documents with 32-16 slots, ABC_MLP beats Linformer and random control.",
        "",
        all_of(*(ahead(_doc("ABC_MLP", 32), _doc(m, 32)) for m in ("Linformer", "ABC_RD"))),
    ),
    abc_claim(
        "doc-mt-close-to-base-quarter",
        "abc-doc-mt",
        "Table 3b, a quarter of its slots",
        "Translating documents with 32-16 slots, ABC_MLP is close to softmax attention (within 0.5 BLEU).",
        "",
        on_par(_doc("ABC_MLP", 32), _doc("BASE", None)),
    ),
)
