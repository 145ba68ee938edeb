"""MNLI and QQP with the columns of GLUE's files, small."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

GENRES = {"train": "fiction", "dev_matched": "fiction", "dev_mismatched": "letters"}
MNLI_LABELS = ("neutral", "entailment", "contradiction")


def write_mnli(folder: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """train, dev_matched and dev_mismatched; the labels take turns, and dev files have those of five annotators."""
    (folder / "MNLI").mkdir(parents=True)
    parses = [f"sentence{i}_{kind}" for kind in ("binary_parse", "parse") for i in (1, 2)]
    for split, genre in GENRES.items():
        votes = [f"label{i}" for i in range(1, 2 if split == "train" else 6)]
        lines = [["index", "promptID", "pairID", "genre", *parses, "sentence1", "sentence2", *votes, "gold_label"]]
        for i, (first, second) in enumerate(pairs):
            label = MNLI_LABELS[i % 3]
            # One annotator disagrees, and a quotation mark quotes nothing.
            given = [label] * (len(votes) - 1) + ["neutral"]
            parsed = ["( a )", "( b )", '(ROOT " )', "(ROOT (S b))"]
            lines.append(
                [str(i), f"{i}n", f"{i}n{label[0]}", genre, *parsed, f"{first} {genre}", second, *given, label]
            )
        write_tsv(folder / "MNLI" / f"{split}.tsv", lines)


def write_qqp(folder: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """train and dev; train ends with a line that lacks its last fields, as some of GLUE's do."""
    (folder / "QQP").mkdir(parents=True)
    for split in ("train", "dev"):
        lines = [["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]]
        lines += [[str(i), f"{2 * i}", f"{2 * i + 1}", *pair, str(i % 2)] for i, pair in enumerate(pairs)]
        write_tsv(folder / "QQP" / f"{split}.tsv", [*lines, ["99", "1", "2", "What is"]] if split == "train" else lines)


def write_tsv(path: Path, lines: Sequence[Sequence[str]]) -> None:
    """The lines' fields between tabs."""
    path.write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
