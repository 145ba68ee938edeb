"""``attnlab reproduce abc-mt``: Tables 3a, 5 and 7, translation with bounded memories in the decoder.

Training leaves hypotheses as text; ``score`` reads them where sacrebleu is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnlab.experiments.abc.differences import UNEQUAL, Comparison, differences, undecided
from attnlab.experiments.abc.summaries import Rows, means, spread
from attnlab.experiments.abc.translators import (
    LONGEST,
    SEARCHES,
    AbcMtConfig,
    Variant,
    last_looks,
    looks_of,
    run_variants,
)
from attnlab.experiments.pairs import TASKS, read_task, tokenised
from attnlab.experiments.parts import Part
from attnlab.experiments.translating import corpus_bleu
from attnlab.reports.numbers import number

__all__ = ["KEYS", "NAME", "NOTES", "SETS", "AbcMtConfig", "derived", "run_task", "score", "untestable"]

NAME = "abc-mt"
APART = ("quarter-position", "quarter-content")
MEANS = ("table_3a", "table_3a_quarter", "table_7")
# The task of the tables that stand beside the paper's.
PRIMARY = "multi30k-en-de"
KEYS = {
    "training": ["data", "seed", "set"],
    "losses": ["data", "variant", "seed"],
    "validation": ["data", "set", "variant", "seed", "step"],
    "table_3a": ["model", "cross", "causal", "seed"],
    "table_3a_other": ["data", "model", "cross", "causal", "seed"],
    "table_3a_quarter": ["model", "cross", "causal", "seed"],
    "table_5": ["cross", "causal", "seed"],
    "differences": ["claim", "first", "second"],
    "table_7": ["model", "cross", "causal", "seed"],
}
NOTES = {
    "table_3a": "SacreBLEU on Multi30k's test set of 2016, English to German; beam 5, length penalty 0.6, the last "
    "five snapshots averaged.",
    "table_3a_quarter": "As Table 3a, with a quarter of the paper's slots, and two rows of Table 7 likewise.",
    "table_3a_other": "As Table 3a on other corpora, with a quarter of the paper's slots.",
    "differences": "What each claim compares: BLEU of the first less that of the second, and its 95 % interval when "
    "sentences are drawn again.",
    "table_5": "Validation SacreBLEU, greedy, the last weights without averaging.",
    "table_7": "As Table 3a. k-means is not causal, so the row Cluster has clusters in the cross-attention and "
    "ABC_MLP in the causal attention.",
}


def _same(model: str, cross: int, causal: int, spec: str, *, encoder: bool = False) -> Variant:
    specs = [spec.format(n=n) for n in (cross, causal)]
    return Variant(model, cross, causal, specs[0], specs[1], specs[0] if encoder else "softmax")


BASE = Variant("BASE")
LINFORMER = f"abc-linformer:slots={{n}},length={LONGEST}"
MLP = "abc-mlp:slots={n}"
TABLE_3A = (
    BASE,
    *(_same("ABC_RD", n, n, "abc-random:slots={n}") for n in (32, 64)),
    *(_same("Linformer", n, n, LINFORMER) for n in (32, 64)),
    *(_same("ABC_MLP", 32, n, MLP) for n in (8, 32)),
)
SIZES = (8, 16, 32, 64)
TABLE_5 = tuple(_same("ABC_MLP", cross, causal, MLP) for causal in SIZES for cross in SIZES if cross >= causal)
TABLE_7 = (
    _same("Window", 32, 32, "abc-window:slots={n}"),
    Variant("Cluster", 32, 32, "abc-cluster:slots=32", "abc-mlp:slots=32"),
    *(_same(f"MLP-{name}", 32, n, f"{MLP},activation={name.lower()}") for name in ("ReLU", "sigmoid") for n in (8, 32)),
    _same("MLP-exp-all", 32, 32, MLP, encoder=True),
)
# Captions are shorter than 32 tokens, so that the paper's sizes hardly bound the memory; a quarter of them does.
QUARTER = (
    Variant("BASE", beside="quarter"),
    *(_same("ABC_RD", n, n, "abc-random:slots={n}") for n in (8, 16)),
    *(_same("Linformer", n, n, LINFORMER) for n in (8, 16)),
    *(_same("ABC_MLP", 8, n, MLP) for n in (2, 8)),
    _same("Window", 8, 8, "abc-window:slots={n}"),
    Variant("Cluster", 8, 8, "abc-cluster:slots=8", "abc-mlp:slots=8"),
)
SETS: dict[str, tuple[Variant, ...]] = {
    "3a": TABLE_3A,
    "5": tuple(v for v in TABLE_5 if v not in (*TABLE_3A, *QUARTER)),
    "7": TABLE_7,
    "quarter": QUARTER,
    # The same in two processes.
    **dict(zip(APART, (QUARTER[:5], QUARTER[5:]), strict=True)),
    # For other corpora, whose sentences are as short or shorter.
    "few": (BASE, *(v for v in QUARTER if v.cross == 8 and v.model in ("ABC_RD", "Linformer", "ABC_MLP"))),
}


def _rivals(first: str, *others: str) -> tuple[tuple[str, str], ...]:
    return tuple((first, other) for other in others)


COMPARISONS = {
    "abc-mt-on-par": Comparison((("ABC_MLP-32-32", "BASE"), ("ABC_MLP-32-8", "BASE")), close=True),
    "abc-mt-beats-larger": Comparison(_rivals("ABC_MLP-32-8", "Linformer-64-64", "ABC_RD-64-64")),
    "abc-mt-linformer-leads-random": Comparison(
        (("Linformer-32-32", "ABC_RD-32-32"), ("Linformer-64-64", "ABC_RD-64-64"))
    ),
    "abc-mt-on-par-quarter": Comparison(
        (("ABC_MLP-8-8", "BASE-quarter"), ("ABC_MLP-8-2", "BASE-quarter")), close=True, search="beams"
    ),
    "abc-mt-beats-larger-quarter": Comparison(
        _rivals("ABC_MLP-8-2", "Linformer-16-16", "ABC_RD-16-16"), search="beams"
    ),
    "abc-mt-linformer-leads-random-quarter": Comparison(
        (("Linformer-8-8", "ABC_RD-8-8"), ("Linformer-16-16", "ABC_RD-16-16")), search="beams"
    ),
    "abc-mt-beats-window-and-cluster-quarter": Comparison(
        _rivals("ABC_MLP-8-8", "Window-8-8", "Cluster-8-8"), search="beams"
    ),
    "abc-mt-causal-memory-small": Comparison((("ABC_MLP-64-8", "ABC_MLP-64-64"),), close=True, search="greedy"),
    "abc-mt-beats-window-and-cluster": Comparison(_rivals("ABC_MLP-32-32", "Window-32-32", "Cluster-32-32")),
    "abc-mt-exp-beats-relu-and-sigmoid": Comparison(_rivals("ABC_MLP-32-32", "MLP-ReLU-32-32", "MLP-sigmoid-32-32")),
    "abc-mt-all-abc": Comparison(_rivals("ABC_MLP-32-32", "MLP-exp-all-32-32")),
}


def run_task(
    name: str,
    config: AbcMtConfig,
    *,
    root: Path,
    part: Part,
    out: Path,
    seconds: float,
    wanted: str = "3a",
    seed: int = 0,
) -> None:
    """Train one set of variants on one task side by side and write what they translate into ``out``."""
    corpus = tokenised(read_task(TASKS[name], root), vocab=config.vocab)
    variants = {v: _searches(v) if name == PRIMARY else ["beam"] for v in SETS[wanted]}
    run_variants(name, variants, config, corpus, part=part, out=out, seconds=seconds, label=wanted, seed=seed)


def _searches(v: Variant) -> list[str]:
    wanted = {"greedy": TABLE_5, "beam": (*TABLE_3A, *TABLE_7), "beams": QUARTER}
    return [how for how, variants in wanted.items() if v in variants]


def derived(tables: Mapping[str, Rows]) -> dict[str, Rows]:
    """Seeds averaged, Table 5 as the square that it is, and how flat the curves were at the end."""
    found = {
        f"{name}_means": means(tables[name], ["model", "cross", "causal"], "bleu") for name in MEANS if name in tables
    }
    if "table_5" in tables:
        found["table_5_square"] = spread(
            sorted(tables["table_5"], key=lambda row: (row["causal"], row["cross"])), ["causal"], "cross", "bleu"
        )
    looks = tables.get("validation", [])
    # What was trained in processes of its own may have had other settings.
    apart = [row for row in looks if row["set"] in APART]
    for name, rows in (("looks", [row for row in looks if row not in apart]), ("looks_quarter", apart)):
        if rows:
            found |= {name: spread(rows, ["variant"], "step", "nll"), f"last_{name}": last_looks(rows)}
    return found


def untestable(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Claims that these sentences cannot decide: too few of them, or too short for a window to be a bounded memory."""
    looks = looks_of(tables.get("validation", []), data=PRIMARY)
    found = undecided(tables.get("differences", []), COMPARISONS, looks=looks)
    steps = sorted(max(looks[v.key]) for v in TABLE_5 if v.key in looks)
    if steps and steps[-1] > (1 + UNEQUAL) * steps[0]:
        found["abc-mt-smallest-memory"] = f"its models had between {number(steps[0])} and {number(steps[-1])} updates"
    if "BASE-quarter" not in looks and {"BASE", "ABC_MLP-8-8"} <= looks.keys():
        most = [number(max(looks[key])) for key in ("BASE", "ABC_MLP-8-8")]
        why = f"no softmax attention was trained beside its models; Table 3a's had {most[0]} updates, they {most[1]}"
        found["abc-mt-on-par-quarter"] = why
    lengths = [r["target_tokens"] for r in tables.get("training", []) if r["data"] == PRIMARY]
    if lengths and max(lengths) <= 32:
        why = f"sentences have {max(lengths):.0f} tokens on average, so a window of 32 holds most of them whole"
        found["abc-mt-beats-window-and-cluster"] = why
    return found


def score(out: Path, root: Path) -> dict[str, list[dict[str, Any]]]:
    """The tables from every file of hypotheses below ``out``."""
    names = ("table_3a", "table_3a_quarter", "table_5", "table_7", "table_3a_other", "differences")
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    by_key = {v.key: v for v in (*TABLE_3A, *QUARTER, *TABLE_5, *TABLE_7)}
    for folder in sorted(p for p in out.iterdir() if p.is_dir() and p.name in TASKS):
        texts = read_task(TASKS[folder.name], root)
        if folder.name == PRIMARY:
            targets = {split: pairs.target for split, pairs in texts.items()}
            tables["differences"] = differences(folder, COMPARISONS, targets)
        found = sorted((path.name.rsplit(".", 3)[:3] for path in folder.glob("*.txt")), key=lambda x: x[1:])
        for key, seed, how in sorted(found, key=lambda x: list(by_key).index(x[0])):
            path, v, split = folder / f"{key}.{seed}.{how}.txt", by_key[key], SEARCHES[how.removesuffix("s")]
            # The first of all tests is the test.
            hypotheses = path.read_text(encoding="utf-8").splitlines()[: len(texts[split].target)]
            bleu = corpus_bleu(hypotheses, texts[split].target[: len(hypotheses)])
            row = {"cross": v.cross, "causal": v.causal, "bleu": bleu, "seed": int(seed), "sentences": len(hypotheses)}
            if folder.name != PRIMARY:
                if how == "beam":
                    tables["table_3a_other"].append({"data": folder.name, "model": v.model, **row})
                continue
            if how == "greedy" and v in TABLE_5:
                tables["table_5"].append(row)
            if how == "beam" and v in TABLE_3A:
                tables["table_3a"].append({"model": v.model, **row})
            if how == "beams" and v in QUARTER:
                tables["table_3a_quarter"].append({"model": v.model, **row})
            name = "MLP-exp" if v.model == "ABC_MLP" else v.model
            if how == "beam" and (
                v in TABLE_7 or v == BASE or (v.model == "ABC_MLP" and v.causal in (8, 32) and v.cross == 32)
            ):
                tables["table_7"].append({"model": name, **row, "converged": bleu >= 1.0})
    return tables
