"""``python -m papers abc-mt``: Tables 3a, 5 and 7, translation with bounded memories in the decoder.

Training leaves hypotheses as text; ``score`` reads them where sacrebleu is installed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from papers.abc.differences import Comparison, differences, with_seeds
from papers.abc.tables import ALONE, Rows, curve_ends, means, run_of, spread, with_curves
from papers.abc.translators import (
    CONFIGS,
    LONGEST,
    SEARCHES,
    AbcMtConfig,
    Place,
    Training,
    Variant,
    hypotheses_in,
    in_order,
    run_variants,
    split_of,
)
from papers.common.row_store import Part
from papers.common.translation import TASKS, corpus_bleu, read_task, tokenised

__all__ = [
    "CONFIGS",
    "CURVES",
    "KEYS",
    "NAME",
    "NOTES",
    "SETS",
    "AbcMtConfig",
    "derived",
    "run_task",
    "score",
    "variants_of",
]

NAME = "abc-mt"
# The task whose tables are compared with the paper's.
PRIMARY = "multi30k-en-de"
# A model below this BLEU has not learned to translate.
LEARNED = 1.0
ROW = ["model", "cross", "causal", "seed"]
KEYS = {
    "training": ["data", "seed", "set"],
    "translating": ["data", "variant", "seed"],
    "validation": ["data", "set", "variant", "seed", "step"],
    "table_3a": ROW,
    "table_3a_other": ["data", *ROW],
    "table_3a_quarter": ROW,
    "table_5": ["cross", "causal", "seed"],
    "differences": ["data", "claim", "first", "second"],
    "table_7": ROW,
}
# What the rows of one curve share.
CURVES = {"validation": ["data", "set", "variant", "seed"]}
NOTES = {
    "table_3a": "SacreBLEU on Multi30k's test sets of 2016, 2017 and 2018 as one, English to German, and on the first "
    "alone; beam 5, length penalty 0.6, the last five snapshots averaged.",
    "table_3a_quarter": "As Table 3a, with a quarter of the paper's slots, and two rows of Table 7 likewise.",
    "table_3a_other": "As Table 3a on other corpora, with a quarter of the paper's slots.",
    "differences": "What each claim compares: BLEU of the first less that of the second, and its 95 % interval over "
    "sentences and seeds.",
    "losses": "-log p of a token of the validation set at the end of the run that trained most models of a corpus.",
    "table_5": "Validation SacreBLEU, greedy, the last weights without averaging.",
    "table_7": "As Table 3a. The row Cluster has clusters in the cross-attention and ABC_MLP in the causal attention: "
    "k-means assigns a token by all keys, later ones included, so that abc-cluster refuses causal attention. The paper "
    "does not say how its row was made causal.",
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
    BASE,
    *(_same("ABC_RD", n, n, "abc-random:slots={n}") for n in (8, 16)),
    *(_same("Linformer", n, n, LINFORMER) for n in (8, 16)),
    *(_same("ABC_MLP", 8, n, MLP) for n in (2, 8)),
    _same("Window", 8, 8, "abc-window:slots={n}"),
    Variant("Cluster", 8, 8, "abc-cluster:slots=8", "abc-mlp:slots=8"),
)
EXP = tuple(v for v in TABLE_3A if v.model == "ABC_MLP")
# The rows of each table, and their search.
TABLES = {
    "table_3a": (TABLE_3A, "beam"),
    "table_3a_quarter": (QUARTER, "beam"),
    "table_5": (TABLE_5, "greedy"),
    "table_7": ((BASE, *EXP, *TABLE_7), "beam"),
}
BY_KEY = {v.key: v for variants, _ in TABLES.values() for v in variants}
# Models that are trained together. A model that is in several tables is trained for the first of them.
SETS: dict[str, tuple[Variant, ...]] = {
    "3a": TABLE_3A,
    "quarter": tuple(v for v in QUARTER if v != BASE),
    "5": tuple(v for v in TABLE_5 if v not in (*TABLE_3A, *QUARTER)),
    "7": TABLE_7,
    # For other corpora, whose sentences are as short or shorter.
    "few": (BASE, *(v for v in QUARTER if v.cross == 8 and v.model in ("ABC_RD", "Linformer", "ABC_MLP"))),
}


def variants_of(wanted: str) -> tuple[Variant, ...]:
    """The models that ``wanted`` names: sets and single models with + between them.

    >>> [v.key for v in variants_of("BASE+ABC_MLP-8-8")]
    ['BASE', 'ABC_MLP-8-8']
    """
    variants: dict[str, Variant] = {}
    for name in wanted.split("+"):
        if name not in SETS and name not in BY_KEY:
            raise ValueError(f"no set or model is called {name!r}; there are {', '.join([*SETS, *BY_KEY])}")
        variants |= {v.key: v for v in SETS.get(name, (BY_KEY.get(name, BASE),))}
    return tuple(variants.values())


def _rivals(first: str, *others: str) -> tuple[tuple[str, str], ...]:
    return tuple((first, other) for other in others)


def _compared(
    *pairs: tuple[str, str], table: str = "table_3a", within: float | None = None, search: str = "beam"
) -> Comparison:
    return Comparison(pairs, table, within, search)


_quarter = partial(_compared, table="table_3a_quarter")
COMPARISONS = {
    "abc-mt-on-par": _compared(("ABC_MLP-32-32", "BASE"), ("ABC_MLP-32-8", "BASE"), within=0.5),
    "abc-mt-beats-agnostic": _compared(*_rivals("ABC_MLP-32-32", "Linformer-32-32", "ABC_RD-32-32")),
    "abc-mt-beats-larger": _compared(*_rivals("ABC_MLP-32-8", "Linformer-64-64", "ABC_RD-64-64")),
    "abc-mt-linformer-leads-random": _compared(
        ("Linformer-32-32", "ABC_RD-32-32"), ("Linformer-64-64", "ABC_RD-64-64")
    ),
    "abc-mt-on-par-quarter": _quarter(("ABC_MLP-8-8", "BASE"), ("ABC_MLP-8-2", "BASE"), within=0.5),
    "abc-mt-beats-agnostic-quarter": _quarter(*_rivals("ABC_MLP-8-8", "Linformer-8-8", "ABC_RD-8-8")),
    "abc-mt-beats-larger-quarter": _quarter(*_rivals("ABC_MLP-8-2", "Linformer-16-16", "ABC_RD-16-16")),
    "abc-mt-linformer-leads-random-quarter": _quarter(
        ("Linformer-8-8", "ABC_RD-8-8"), ("Linformer-16-16", "ABC_RD-16-16")
    ),
    "abc-mt-beats-window-and-cluster-quarter": _quarter(*_rivals("ABC_MLP-8-8", "Window-8-8", "Cluster-8-8")),
    "abc-mt-causal-memory-small": _compared(
        ("ABC_MLP-64-8", "ABC_MLP-64-64"), table="table_5", within=0.5, search="greedy"
    ),
    "abc-mt-smallest-memory": _compared(("ABC_MLP-8-8", "ABC_MLP-64-64"), table="table_5", within=1.5, search="greedy"),
    "abc-mt-beats-window-and-cluster": _compared(
        *_rivals("ABC_MLP-32-32", "Window-32-32", "Cluster-32-32"), table="table_7"
    ),
    "abc-mt-exp-beats-relu-and-sigmoid": _compared(
        *_rivals("ABC_MLP-32-32", "MLP-ReLU-32-32", "MLP-sigmoid-32-32"), table="table_7"
    ),
    "abc-mt-all-abc": _compared(("ABC_MLP-32-32", "MLP-exp-all-32-32"), table="table_7"),
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
    seeds: Sequence[int] = (0,),
    alone: bool = False,
) -> None:
    """Train some variants on one task side by side and write what they translate into ``out``.

    With ``alone`` there is one variant, which has the config's updates however long they take.
    """
    if alone and len(variants_of(wanted)) > 1:
        raise ValueError(f"--alone trains one model at a time, got {wanted}; name one, such as ABC_MLP-32-32")
    label, seconds = (f"{ALONE}{wanted}", math.inf) if alone else (wanted, seconds)
    corpus = tokenised(read_task(TASKS[name], root), vocab=config.vocab)
    variants = {v: _searches(v) if name == PRIMARY else ["beam"] for v in variants_of(wanted)}
    run_variants(variants, Training(name, corpus, config, part, label=label, seeds=seeds), out=out, seconds=seconds)


def _searches(v: Variant) -> list[str]:
    return sorted({search for variants, search in TABLES.values() if v in variants})


def derived(tables: Mapping[str, Rows]) -> dict[str, Rows]:
    """Seeds averaged, how long their models were trained and how flat their curves were, and Table 5 as a square."""
    validation = tables.get("validation", [])
    made = {f"{name}_means": _means_of(name, tables[name], validation) for name in TABLES if name in tables}
    if other := tables.get("table_3a_other"):
        rows = means(other, ["data", "variant", *ROW[:-1]], "bleu")
        made["table_3a_other_means"] = [x for row in rows for x in with_curves([row], validation, data=row["data"])]
    if "table_5" in tables:
        made["table_5_square"] = spread(
            sorted(tables["table_5"], key=lambda row: (row["causal"], row["cross"])), ["causal"], "cross", "bleu"
        )
    return made | (_loss_tables(validation) if validation else {})


def _means_of(name: str, rows: Rows, validation: Rows) -> Rows:
    """A table of BLEU, seeds averaged, with the curves of its own trainings."""
    trained = {(row["variant"], row["seed"]) for row in rows}
    averaged = means(rows, ["variant", *ROW[:-1]], "bleu", also=() if name == "table_5" else ("bleu_2016",))
    return with_curves(averaged, [x for x in validation if (x["variant"], x["seed"]) in trained], data=PRIMARY)


def _loss_tables(validation: Rows) -> dict[str, Rows]:
    """The losses on validation sets at the end of the trainings."""
    losses = [x for data in dict.fromkeys(r["data"] for r in validation) for x in _side_by_side(validation, data)]
    seven = {v.key for v in TABLES["table_7"][0]}
    of_seven = [row for row in losses if row["data"] == PRIMARY and row["variant"] in seven]
    return {"last_looks": curve_ends(validation), "losses": losses, "table_7_losses": means(of_seven, ROW[:-1], "nll")}


def _side_by_side(validation: Rows, data: str) -> Rows:
    """The losses of models and seeds at the end of the run that trained most of them on a corpus."""
    mine = [row for row in validation if row["data"] == data]
    size = Counter(label for label, _ in {(run_of(row["set"]), row["variant"]) for row in mine})
    ends = curve_ends([row for row in mine if run_of(row["set"]) == max(size, key=size.__getitem__)])
    return [
        {"data": data, "variant": v.key, "model": v.model, "cross": v.cross, "causal": v.causal, "seed": end["seed"],
         "nll": end["nll"]}
        for end in ends
        # Of rows whose model is not trained any more there is no loss beside the others'.
        if (v := BY_KEY.get(end["variant"])) is not None
    ]  # fmt: skip


def score(outs: Sequence[Path], root: Path) -> dict[str, Rows]:
    """The tables from every file of hypotheses below ``outs``."""
    tables: dict[str, Rows] = {name: [] for name in (*TABLES, "table_3a_other")}
    compared: Rows = []
    for data in TASKS:
        hypotheses = hypotheses_in(outs, data)
        if not hypotheses:
            continue
        texts = read_task(TASKS[data], root)
        references = {search: split_of(texts, search).target for search in SEARCHES}
        rows = _scored(hypotheses, references, first=len(texts["test"].target))
        seeds = {claim: {row["seed"] for row in rows} for claim in COMPARISONS}
        if data == PRIMARY:
            tables |= {name: _beside_each_other(_rows_of(name, rows)) for name in TABLES}
            seeds = {claim: {row["seed"] for row in tables[c.table]} for claim, c in COMPARISONS.items()}
        else:
            tables["table_3a_other"] += [{"data": data, "model": BY_KEY[row["variant"]].model, **row} for row in rows]
        # Models that have not learned to translate are not compared.
        if max(row["bleu"] for row in rows) >= LEARNED:
            compared += [{"data": data, **row} for row in _differences_by_claim(hypotheses, seeds, references)]
    # For a corpus with one seed the spread of the other corpora is taken.
    return {**tables, "differences": with_seeds(compared)}


def _differences_by_claim(
    hypotheses: Mapping[Place, list[str]], seeds: Mapping[str, set[int]], references: Mapping[str, list[str]]
) -> Rows:
    """The differences that each claim needs, over its seeds."""
    rows: Rows = []
    for claim, comparison in COMPARISONS.items():
        mine = {place: lines for place, lines in hypotheses.items() if place[1] in seeds[claim]}
        rows += differences(mine, {claim: comparison}, references)
    return rows


def _scored(hypotheses: Mapping[Place, list[str]], references: Mapping[str, list[str]], *, first: int) -> Rows:
    """A row for each file of hypotheses, in the order of the tables; the ``first`` sentences are the test of 2016."""
    rows = []
    for (key, seed, search), lines in in_order(hypotheses, BY_KEY):
        v, right = BY_KEY[key], references[search][: len(lines)]
        row = {
            "variant": key, "cross": v.cross, "causal": v.causal, "bleu": corpus_bleu(lines, right), "seed": seed,
            "sentences": len(lines), "search": search,
        }  # fmt: skip
        rows.append({**row, "bleu_2016": corpus_bleu(lines[:first], right[:first])} if search == "beam" else row)
    return rows


def _rows_of(name: str, rows: Rows) -> Rows:
    """The rows of a table, with its names for the models."""
    variants, search = TABLES[name]
    rows_of_table = []
    for row in rows:
        if (v := BY_KEY[row["variant"]]) in variants and row["search"] == search:
            seven = {"converged": row["bleu"] >= LEARNED} if name == "table_7" else {}
            rows_of_table.append({"model": "MLP-exp" if seven and v in EXP else v.model, **row, **seven})
    return rows_of_table


def _beside_each_other(rows: Rows) -> Rows:
    """The rows of those seeds that most of a table was trained with; a model that tables share has others too."""
    count = Counter(row["seed"] for row in rows)
    return [row for row in rows if 2 * count[row["seed"]] > max(count.values())]
