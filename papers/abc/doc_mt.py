"""``python -m papers abc-doc-mt``: Table 3b, translation of documents in windows of four sentences.

Every ``document`` lines in a row are a document: of Multi30k's captions, which share no story, so that only the length
of documents is there; or of aligned news, Tagalog and English, in the order of publication, whose articles' boundaries
are not marked. An instance is a sentence and the up to three before it in its document, on both sides, with a separator
between them. At test time the model writes the whole window, so its target context is its own prediction, and the last
sentence counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.data import Pairs, read_parallel
from papers.abc.tables import (
    FLAT,
    Comparison,
    Rows,
    curve_ends,
    curves_of,
    differences,
    means,
    undecided,
    with_curves,
    with_seeds,
)
from papers.abc.translators import AbcMtConfig, Variant, hypotheses_in, run_variants, split_of
from papers.common.row_store import Part
from papers.common.translation import TASKS, Corpus, corpus_bleu, find_file, read_task, tokenised

__all__ = [
    "KEYS",
    "NAME",
    "NOTES",
    "VARIANTS",
    "AbcDocMtConfig",
    "derived",
    "run_documents",
    "score_documents",
    "windows",
]

NAME = "abc-doc-mt"
# N of Linformer.
LONGEST = 320
KEYS = {
    "training": ["data", "seed", "set"],
    "translating": ["data", "variant", "seed"],
    "validation": ["data", "variant", "seed", "step"],
    "table_3b": ["model", "cross", "causal", "seed"],
    "differences": ["claim", "first", "second"],
}
NOTES = {
    "table_3b": "SacreBLEU of the last sentence of each window of four captions of Multi30k, English to German, beam "
    "5, length penalty 0.6, the last five snapshots averaged; the paper's is IWSLT14 Spanish to English.",
}


@dataclass(frozen=True)
class AbcDocMtConfig:
    """Table 10's right column, scaled down."""

    translation: AbcMtConfig = field(
        default_factory=lambda: AbcMtConfig(
            tokens=4096,
            widths=(64, 96, 128, 160),
            lr=3e-3,
            longest=LONGEST,
            # An epoch shows each sentence four times.
            snapshots_per_epoch=4,
            look=2,
            held_out=1000,
        )
    )
    # A task of abc-mt, or tagalog-english.
    data: str = "multi30k-en-de"
    window: int = 4
    document: int = 20
    # Lines of the Tagalog news for validation and for the test, each.
    held_out: int = 600

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.document:
            raise ValueError(f"a window of {self.window} does not fit into a document of {self.document}")


SPECS = {
    "Linformer": f"abc-linformer:slots={{n}},length={LONGEST}",
    "ABC_RD": "abc-random:slots={n}",
    "ABC_MLP": "abc-mlp:slots={n}",
}
# The paper's sizes, which hold most windows of captions whole, and a quarter of them.
VARIANTS = (
    Variant("BASE"),
    *(
        Variant(model, cross, causal, spec.format(n=cross), spec.format(n=causal))
        for cross, causal in ((128, 64), (32, 16))
        for model, spec in SPECS.items()
    ),
)
BY_KEY = {v.key: v for v in VARIANTS}

COMPARISONS = {
    "abc-doc-mt-beats-random": Comparison((("ABC_MLP-128-64", "ABC_RD-128-64"),), "table_3b"),
    "abc-doc-mt-close-to-base": Comparison((("ABC_MLP-128-64", "BASE"),), "table_3b", within=0.5),
    "abc-doc-mt-beats-agnostic-quarter": Comparison(
        (("ABC_MLP-32-16", "Linformer-32-16"), ("ABC_MLP-32-16", "ABC_RD-32-16")), "table_3b"
    ),
    "abc-doc-mt-close-to-base-quarter": Comparison((("ABC_MLP-32-16", "BASE"),), "table_3b", within=0.5),
}


def windows(rows: Sequence[Any], *, size: int, document: int, separator: int) -> list[np.ndarray]:
    """Each row after the up to ``size`` - 1 rows before it in its document, with a separator between them.

    >>> [w.tolist() for w in windows([[5], [6], [7, 8], [9]], size=2, document=3, separator=4)]
    [[5], [5, 4, 6], [6, 4, 7, 8], [9]]
    """
    found = []
    for i in range(len(rows)):
        first = max(i - size + 1, i // document * document)
        joined: list[int] = []
        for row in rows[first : i + 1]:
            joined += ([separator] if joined else []) + [int(t) for t in row]
        found.append(np.array(joined, np.int64))
    return found


def read_documents(root: Path, config: AbcDocMtConfig) -> dict[str, Pairs]:
    """train, valid and test, each in the order of the file."""
    if config.data in TASKS:
        return read_task(TASKS[config.data], root)
    if config.data != "tagalog-english":
        raise ValueError(f"data must be tagalog-english or one of {', '.join(TASKS)}, got {config.data!r}")
    lines = read_parallel(find_file(root / "tagalog", "Tagalog.txt"), find_file(root / "tagalog", "English.txt"))
    cuts = [0, len(lines.source) - 2 * config.held_out, len(lines.source) - config.held_out, len(lines.source)]
    return {
        split: Pairs(lines.source[lo:hi], lines.target[lo:hi])
        for split, lo, hi in zip(("train", "valid", "test"), cuts, cuts[1:], strict=False)
    }


def run_documents(
    config: AbcDocMtConfig,
    *,
    root: Path,
    part: Part,
    out: Path,
    seconds: float,
    seeds: Sequence[int] = (0,),
    wanted: Sequence[str] = tuple(BY_KEY),
) -> None:
    """Train the models side by side and write what they say of the test set."""
    if unknown := set(wanted) - set(BY_KEY):
        raise ValueError(f"no model is called {', '.join(sorted(unknown))}; there are {', '.join(BY_KEY)}")
    plain = tokenised(read_documents(root, config), vocab=config.translation.vocab)
    separator = plain.tokeniser.specials.mask
    assert separator is not None
    ids: Any = {
        split: tuple(windows(side, size=config.window, document=config.document, separator=separator) for side in sides)
        for split, sides in plain.ids.items()
    }
    corpus = _LastSentence(plain.tokeniser, plain.texts, ids, separator)
    variants = {BY_KEY[key]: ["beam"] for key in wanted}
    run_variants(
        config.data, variants, config.translation, corpus, part=part, out=out, seconds=seconds, label="3b", seeds=seeds
    )


@dataclass(frozen=True, eq=False)
class _LastSentence(Corpus):
    """Of what a model says only the last sentence is kept."""

    separator: int

    def decode(self, tokens: Sequence[int]) -> str:
        said = list(tokens)
        while self.separator in said:
            said = said[said.index(self.separator) + 1 :]
        return super().decode(said)


def derived(tables: Mapping[str, Rows]) -> dict[str, Rows]:
    """Seeds averaged, and how flat the curves were at the end."""
    found = {}
    if "table_3b" in tables:
        rows = means(tables["table_3b"], ["data", "variant", "model", "cross", "causal"], "bleu")
        validation = tables.get("validation", [])
        found["table_3b_means"] = [x for row in rows for x in with_curves([row], validation, data=row["data"])]
    if "validation" in tables:
        found["last_looks"] = curve_ends(tables["validation"])
    return found


def untestable(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Claims that these sentences are too few to decide, and that a model fails which was still catching up."""
    validation = tables.get("validation", [])
    found = undecided(tables.get("differences", []), COMPARISONS, curves=curves_of(validation))
    ends = {(end["variant"], end["seed"]): end for end in curve_ends(validation)}
    for (variant, seed), look in ends.items():
        sound = ends.get(("ABC_MLP-128-64", seed), {}).get("fell")
        if variant == "Linformer-128-64" and look["fell"] is not None and look["fell"] >= max(FLAT, sound or 0.0):
            told = f"its loss still fell when training ended, from {look['nll_before']:.2f} to {look['nll']:.2f}"
            found["abc-doc-mt-linformer-fails"] = told
    return found


def score_documents(outs: Sequence[Path], root: Path, config: AbcDocMtConfig) -> dict[str, Rows]:
    """Table 3b from the hypotheses below ``outs``."""
    references = split_of(read_documents(root, config), "beam").target
    said, rows = hypotheses_in(outs, config.data), []
    for (key, seed, _), lines in sorted(said.items(), key=lambda x: (list(BY_KEY).index(x[0][0]), x[0][1])):
        v, bleu = BY_KEY[key], corpus_bleu(lines, references[: len(lines)])
        rows.append(
            {
                "data": config.data, "variant": key, "model": v.model, "cross": v.cross, "causal": v.causal,
                "bleu": bleu, "seed": seed, "sentences": len(lines), "converged": bleu >= 1.0,
            }
        )  # fmt: skip
    return {"table_3b": rows, "differences": with_seeds(differences(said, COMPARISONS, {"beam": references}))}
