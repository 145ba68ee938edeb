"""Results files of KTIW's experiments: the tables of the runs, with their settings and provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.evaluation.intervals import mean_interval
from papers.common.folders import beside_paper
from papers.common.row_store import Part, choose_rows, gather, make_results, merge_results, read_results, write_results
from papers.ktiw.corpora import TITLES, Corpus, load_corpus, prepare, statistics
from papers.ktiw.tables import (
    Study,
    appendix_a1,
    bleu_curve,
    run_sizes,
    studies,
    table_2,
    table_10,
    table_11,
    uniform_curves,
)

__all__ = ["compute_areas", "run_toy", "write_heads_result", "write_statistics", "write_study_result"]

# The paper's name in its results files.
PAPER = "ktiw"
KEYS = {
    "appendix_a1": ["model", "seed"],
    "curve": ["dataset", "seed", "step"],
    "section_6_2_curves": ["task", "step"],
    "figure_3_curves": ["panel", "data", "step"],
    "figure_6_curves": ["heads", "contexts", "step"],
}
# The toy experiments, and the tables of their results files.
TOYS = {
    "ktiw-permutations": ("figure_3", "figure_3_curves"),
    "ktiw-multihead": ("figure_6", "figure_6_curves", "heads"),
    "ktiw-permute-function": ("section_6_2", "section_6_2_curves"),
    "ktiw-local": ("figure_7",),
}


def write_study_result(
    name: str, work: Path | str, out: Path | str, *, prepared: Path | None = None, data: Path | None = None
) -> dict[str, Any]:
    """Write results/<name>.json from the run folders in ``work``.

    Every row has its seed. Rows and configs of data sets and seeds that ``work`` does not have stay as they were.
    """
    finished = studies(work)
    if not finished:
        raise ValueError(f"{work} holds no runs yet; leave out --tables-only to train them")
    tables: dict[str, Any] = {}
    for seed in dict.fromkeys(study.seed for study in finished):
        mine = [study for study in finished if study.seed == seed]
        for table, rows in _study_tables(name, mine, prepared, data).items():
            tables.setdefault(table, []).extend({**row, "seed": seed} for row in rows)
    if not tables.get("appendix_a1", True):
        raise ValueError("there is no run of the linear-output model; leave out --tables-only to train it")
    configs = {study.name: study.run_facts().get("config") for study in finished}
    first = finished[0].run_facts()
    result = make_results(name, PAPER, tables, config=configs, seed=first.get("seed"), made=first)
    return _write(out, result)


def _study_tables(name: str, finished: list[Study], prepared: Path | None, data: Path | None) -> dict[str, Any]:
    if name == "ktiw-frozen":
        return {"table_10": table_10(finished)}
    if name == "ktiw-logreg":
        return {"table_11": table_11(finished)}
    if name == "ktiw-optimal":
        return {"appendix_a1": _optimal_rows(finished, prepared, data)}
    split, tau = ("train" if name == "ktiw-train" else "valid"), name == "ktiw-tau"
    main, with_bleu = {"ktiw-table2": ("2", "6"), "ktiw-tau": ("3", "4"), "ktiw-train": ("7", "8")}[name]
    how: dict[str, Any] = {"split": split, "tau": tau, "results": name}
    tables = {f"table_{main}": table_2(finished, **how, table=f"table_{main}")}
    scored = [(study, words) for study in finished if (words := _words(study, prepared, data)) is not None]
    scores = {study.name: bleu_curve(study, words, split=split) for study, words in scored}
    chosen = [study for study, _ in scored if scores[study.name]]
    if chosen:
        tables[f"table_{with_bleu}"] = table_2(
            chosen, **how, table=f"table_{with_bleu}", performance=lambda study: scores[study.name]
        )
    if name == "ktiw-table2":
        tables["runs"] = run_sizes(finished)
        tables["curve"] = uniform_curves(finished)
        tables["second"] = [row for study in finished for row in _second_seed(study)]
    return tables


def _second_seed(study: Study) -> list[dict[str, Any]]:
    """The agreement of the second seed's attention with the reference's, and its accuracy, over training."""
    return [
        {"dataset": study.name, "step": row["step"], "a_alpha_hat": round(row["valid/alpha_hat"], 2)}
        | {"accuracy": round(row["valid/accuracy"], 2)}
        for row in study.evaluations("second")
        if "valid/alpha_hat" in row
    ]


def _optimal_rows(finished: list[Study], prepared: Path | None, data: Path | None) -> list[dict[str, Any]]:
    translated = [study for study in finished if study.evaluations("linear")]
    if not translated:
        return []
    words = _words(translated[0], prepared, data)
    if words is None:
        raise ValueError("BLEU needs the vocabulary: name the data, --prepared FOLDER or --data FOLDER")
    return appendix_a1(translated[0], words)


def _words(study: Study, prepared: Path | None, data: Path | None) -> Sequence[str] | None:
    """The pieces of a translation's vocabulary; None for a classification, or where the data is not named."""
    name = study.folder.name
    if not any((study.folder / "reference").glob("valid-*.npz")):
        return None
    if prepared is not None and (prepared / f"{name}.npz.xz").exists():
        return load_corpus(prepared / f"{name}.npz.xz").words
    return prepare(name, data).words if data is not None else None


def run_toy(name: str, out: Path | str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Train one of the toy experiments, with some settings changed, and write its results."""
    from papers.ktiw.config import LocalConfig, PermutationsConfig
    from papers.ktiw.local import run_figure_7
    from papers.ktiw.permutations import run_figure_3, run_figure_6, run_section_6_2

    path = Path(out).with_suffix(".rows")
    path.unlink(missing_ok=True)
    part = Part(path)
    config: Any
    if name == "ktiw-local":
        config = replace(LocalConfig(), **changes)
        run_figure_7(config, part)
    else:
        config = replace(PermutationsConfig(), **changes)
        runs = {"ktiw-permutations": run_figure_3, "ktiw-multihead": run_figure_6}
        runs.get(name, run_section_6_2)(config, part)
    result = write_toy_result(name, path, out, config=asdict(config))
    path.unlink()
    return result


def write_toy_result(name: str, part: Path, out: Path | str, *, config: dict[str, Any]) -> dict[str, Any]:
    """Write results/<name>.json from the rows that ``run_toy`` wrote."""
    rows = gather({name: part})
    tables = {table: rows.tables[table] for table in TOYS[name] if table in rows.tables}
    if not tables:
        raise ValueError(f"there are no rows of {', '.join(TOYS[name])} in {part}")
    judged = [table for table in tables if tables[table] and "learned" in tables[table][0]]
    tables |= {f"{table}_learned": _learned(tables[table]) for table in judged} | _areas(tables)
    seconds = rows.facts[name]
    result = make_results(
        name, PAPER, tables, config=config, seed=config.get("seed", 0), rows_of=rows, seconds=seconds
    )  # fmt: skip
    return write_results(out, result)


def compute_areas(out: Path | str) -> dict[str, Any]:
    """The results file of Figure 6 with the table of areas, computed anew from its curves; nothing is trained."""
    result = read_results(out)
    if result is None:
        raise ValueError(f"there is no {out}; leave out --tables-only to train its models")
    return write_results(out, {**result, "tables": {**result["tables"], **_areas(result["tables"])}})


def _areas(tables: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """``figure_6_area``: the mean accuracy of each seed over its training, by the trapezoidal rule; and their means."""
    curves: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in tables.get("figure_6_curves", []):
        curves.setdefault((row["heads"], row["contexts"]), []).append(row)
    rows, averaged = [], []
    for (heads, contexts), points in curves.items():
        steps, accuracy = [row["step"] for row in points], np.array([row["accuracy"] for row in points])
        areas = np.diff(steps) @ (accuracy[1:] + accuracy[:-1]) / 2 / (steps[-1] - steps[0] or 1)
        labels = {"heads": heads, "contexts": contexts, "updates": steps[-1]}
        rows += [{**labels, "seed": seed, "area": round(float(area), 4)} for seed, area in enumerate(areas)]
        mean, low, high, _ = mean_interval(areas.tolist())
        ends = {"area": mean, "low": low, "high": high}
        averaged.append({**labels, "seeds": len(areas)} | {k: v and round(v, 4) for k, v in ends.items()})
    return {"figure_6_area": rows, "figure_6_area_means": averaged} if rows else {}


def _learned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many seeds of each setting learn, and the median accuracies."""
    groups: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple((k, v) for k, v in row.items() if isinstance(v, str)), []).append(row)
    return [
        {
            **dict(labels),
            "seeds": len(of_setting),
            "learned": sum(row["learned"] for row in of_setting),
            **{
                f"median_{name}": round(float(np.median([row[name] for row in of_setting])), 3)
                for name in ("accuracy", "accuracy_at_the_end")
                if name in of_setting[0]
            },
        }
        for labels, of_setting in groups.items()
    ]


def write_statistics(corpora: Sequence[Corpus], out: Path | str) -> dict[str, Any]:
    """Table 9: the data sets' statistics, the paper's beside them."""
    rows = beside_paper(
        [statistics(corpus) for corpus in corpora], results="ktiw-data", table="table_9", keys=["dataset"]
    )
    remarks = {TITLES[corpus.name]: corpus.remark for corpus in corpora if corpus.remark}
    config = {"longest": 400, "min_count": 3}
    return _write(out, make_results("ktiw-data", PAPER, {"table_9": rows}, config=config, remarks=remarks))


def write_heads_result(work: Path | str, out: Path | str) -> dict[str, Any]:
    """papers/results/ktiw-transformers.json: each head's agreements over training, and the families' summary."""
    curves: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    configs, facts = {}, dict[str, Any]()
    for folder in sorted(path for path in Path(work).iterdir() if (path / "reference" / "run.json").exists()):
        facts = json.loads((folder / "reference" / "run.json").read_text(encoding="utf-8"))
        configs[folder.name] = facts["config"]
        of_family = [
            {"family": folder.name, "run": run, "step": step, "head": head, **values}
            for run in ("reference", "second", "uniform")
            for step, head, values in _head_rows(folder / run)
        ]
        curves += of_family
        summary += _best_of_heads(folder, of_family)
    if not summary:
        raise ValueError(f"{work} holds no evaluated runs of transformers")
    tables = {"heads": summary, "curves": curves}
    result = make_results("ktiw-transformers", PAPER, tables, config=configs, seed=facts.get("seed"), made=facts)
    return _write(out, result)


def _best_of_heads(folder: Path, curves: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The greatest agreement of each head over the training of a family, beside chance."""
    chance_file = folder / "chance.json"
    chance = json.loads(chance_file.read_text())["valid"] if chance_file.exists() else None
    best: dict[tuple[str, str], dict[str, float]] = {}
    for row in curves:
        kept = best.setdefault((row["run"], row["head"]), {})
        for name, value in row.items():
            if name not in ("family", "run", "step", "head"):
                kept[name] = max(kept.get(name, 0.0), value)
    rows = []
    for head in sorted({head for _, head in best}):
        reference, second, uniform = (best.get((run, head), {}) for run in ("reference", "second", "uniform"))
        rows.append(
            {
                "family": folder.name,
                "head": head,
                "a_alpha_beta": second.get("gold_beta"),
                "a_alpha_uf": uniform.get("gold_beta"),
                "a_own": reference.get("own_beta"),
                "a_own_alone": reference.get("own_beta_alone"),
                "a_other_seed": second.get("gold_alpha"),
                "a_random": None if chance is None else round(chance, 2),
            }
        )
    return rows


def _head_rows(folder: Path) -> list[tuple[int, str, dict[str, float]]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = []
    for row in map(json.loads, lines):
        by_head: dict[str, dict[str, float]] = {}
        for name, value in row["values"].items() if row["kind"] == "eval" else ():
            head, slash, reading = name.partition("/")
            if slash and value is not None:
                by_head.setdefault(head, {})[reading] = round(value, 2)
        rows += [(row["step"], head, values) for head, values in by_head.items()]
    return rows


def _write(out: Path | str, result: dict[str, Any]) -> dict[str, Any]:
    """Write, keeping the rows, the config and the remarks of an earlier file that this one does not have.

    The rows of a data set and a seed are of one run: where it was run again, none of its earlier rows stays. Rows
    without a seed are of the first.
    """
    result["keys"] = {name: KEYS.get(name) or _key(rows) for name, rows in result["tables"].items()}
    before = read_results(out)
    if before is None:
        return write_results(out, result)
    replaced = {
        name: {_run_of(row) for row in rows if "dataset" in row or "seed" in row}
        for name, rows in result["tables"].items()
    }

    def others(table: str, rows: list[dict[str, Any]]) -> list[int]:
        return [i for i, row in enumerate(rows) if _run_of(row) not in replaced.get(table, ())]

    merged = merge_results(choose_rows(before, others), result)
    for name in ("config", "remarks"):
        if name in result:
            merged[name] = {**(before.get(name) or {}), **result[name]}
    return write_results(out, choose_rows(merged, _in_order))


def _run_of(row: Mapping[str, Any]) -> tuple[str | None, int]:
    """The data set of a row, and its seed."""
    return row.get("dataset"), row.get("seed", 0)


def _key(rows: Sequence[dict[str, Any]]) -> list[str]:
    known = ("dataset", "seed", "model", "family", "run", "head", "step", "corpus")
    return [key for key in known if rows and key in rows[0]]


def _in_order(table: str, rows: list[dict[str, Any]]) -> list[int]:
    """The places of rows in the order of the paper's data sets; other rows as they came."""
    order = {title: i for i, title in enumerate(TITLES.values())}
    return sorted(range(len(rows)), key=lambda i: order.get(rows[i].get("dataset", ""), 0))
