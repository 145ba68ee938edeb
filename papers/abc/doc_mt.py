"""``python -m papers abc-doc-mt``: Table 3b, translation of documents in windows of four sentences.

Every ``document`` lines in a row are a document: of Multi30k's captions, which share no story, so that only the length
of documents is there; or of aligned news, Tagalog and English, in the order of publication, whose articles' boundaries
are not marked. An instance is a sentence and the up to three before it in its document, on both sides, with a separator
between them. At test time the model writes the whole window, so its target context is its own prediction, and the last
sentence counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.data import Pairs
from papers.abc.differences import Comparison, differences, with_seeds
from papers.abc.tables import Rows, curve_ends, means, with_curves
from papers.abc.translators import CONFIGS as TRANSLATORS
from papers.abc.translators import AbcMtConfig, Training, Variant, hypotheses_in, in_order, run_variants, split_of
from papers.common.row_store import Part
from papers.common.translation import TASKS, Corpus, corpus_bleu, read_filipino, read_task, tokenised

__all__ = [
    "CONFIGS",
    "CURVES",
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
# What the rows of one curve share.
CURVES = {"validation": ["data", "variant", "seed"]}
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
            snapshots_per_evaluation=2,
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


# Table 10's right column; its rate is 1 / sqrt(width x warm-up).
CONFIGS = {
    "small": AbcDocMtConfig(),
    "paper": AbcDocMtConfig(
        translation=replace(
            TRANSLATORS["paper"],
            vocab=30_000,
            hidden=1024,
            dropout=0.3,
            warmup=4000,
            lr=7e-4,
            widths=(64, 96, 128, 160, LONGEST),
            longest=LONGEST,
        )
    ),
}
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
# What a training of all of them is called.
SET = "3b"

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
    joined_rows = []
    for i in range(len(rows)):
        first = max(i - size + 1, i // document * document)
        joined: list[int] = []
        for row in rows[first : i + 1]:
            joined += ([separator] if joined else []) + [int(t) for t in row]
        joined_rows.append(np.array(joined, np.int64))
    return joined_rows


def read_documents(root: Path, config: AbcDocMtConfig) -> dict[str, Pairs]:
    """train, valid and test, each in the order of the file."""
    if config.data in TASKS:
        return read_task(TASKS[config.data], root)
    if config.data != "tagalog-english":
        raise ValueError(f"data must be tagalog-english or one of {', '.join(TASKS)}, got {config.data!r}")
    lines = read_filipino(root / "tagalog")
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
    """Train the models side by side and write their translations of the test set."""
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
    label = SET if set(wanted) == set(BY_KEY) else "+".join(wanted)
    training = Training(config.data, corpus, config.translation, part, label=label, seeds=seeds)
    run_variants(variants, training, out=out, seconds=seconds)


@dataclass(frozen=True, eq=False)
class _LastSentence(Corpus):
    """Of a translated window only the last sentence is kept."""

    separator: int

    def decode(self, tokens: Sequence[int]) -> str:
        sentence = list(tokens)
        while self.separator in sentence:
            sentence = sentence[sentence.index(self.separator) + 1 :]
        return super().decode(sentence)


def derived(tables: Mapping[str, Rows]) -> dict[str, Rows]:
    """Seeds averaged, and how flat the curves were at the end."""
    made = {}
    if "table_3b" in tables:
        rows = means(tables["table_3b"], ["data", "variant", "model", "cross", "causal"], "bleu")
        validation = tables.get("validation", [])
        made["table_3b_means"] = [x for row in rows for x in with_curves([row], validation, data=row["data"])]
    if "validation" in tables:
        made["last_looks"] = curve_ends(tables["validation"])
    return made


def score_documents(outs: Sequence[Path], root: Path, config: AbcDocMtConfig) -> dict[str, Rows]:
    """Table 3b from the hypotheses below ``outs``."""
    references = split_of(read_documents(root, config), "beam").target
    hypotheses, rows = hypotheses_in(outs, config.data), []
    for (key, seed, _), lines in in_order(hypotheses, BY_KEY):
        v, bleu = BY_KEY[key], corpus_bleu(lines, references[: len(lines)])
        rows.append(
            {
                "data": config.data, "variant": key, "model": v.model, "cross": v.cross, "causal": v.causal,
                "bleu": bleu, "seed": seed, "sentences": len(lines), "converged": bleu >= 1.0,
            }
        )  # fmt: skip
    return {"table_3b": rows, "differences": with_seeds(differences(hypotheses, COMPARISONS, {"beam": references}))}
