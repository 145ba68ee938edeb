"""Results files of KTIW's experiments: tables of what was run, with where and how it was run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.provenance import provenance, write_json
from papers.common.results import beside_paper, merge_results
from papers.ktiw.corpora import TITLES, Corpus, load_corpus, prepare, statistics
from papers.ktiw.rows import Rows
from papers.ktiw.tables import (
    Study,
    appendix_a1,
    bleu_curve,
    run_sizes,
    still_rising,
    studies,
    table_2,
    table_10,
    table_11,
    uniform_curves,
)

__all__ = ["run_toy", "write_heads_result", "write_statistics", "write_study_result"]

# Updates by which a translator is as good as it will be, nearly.
LONG_ENOUGH = 4000
PROVENANCE = ("versions", "python", "device", "commit")
KEYS = {
    "appendix_a1": ["model"],
    "curve": ["dataset", "step"],
    "section_6_2_curves": ["task", "step"],
    "figure_3_curves": ["panel", "data", "step"],
    "figure_6_curves": ["heads", "contexts", "step"],
}
# The toy experiments, and what each file holds.
TOYS = {
    "ktiw-permutations": ("figure_3", "figure_3_curves"),
    "ktiw-multihead": ("figure_6", "figure_6_curves", "heads"),
    "ktiw-permute-function": ("section_6_2", "section_6_2_curves"),
    "ktiw-local": ("figure_7",),
}


def write_study_result(
    name: str, work: Path | str, out: Path | str, *, prepared: Path | None = None, data: Path | None = None
) -> dict[str, Any]:
    """Write results/<name>.json from the run folders in ``work``; rows of data sets that it has not, stay."""
    found = studies(work)
    if not found:
        raise ValueError(f"{work} holds no runs yet; leave out --tables-only to train them")
    tables = _study_tables(name, found, prepared, data)
    configs = {study.name: study.told().get("config") for study in found}
    told = found[0].told()
    header = {"name": name, "paper": "ktiw", "config": configs, "seed": told.get("seed")}
    header |= {key: told.get(key) for key in PROVENANCE}
    if name == "ktiw-table2":
        # Of those whose runs are not here, what was said before still holds.
        names = {study.name for study in found}
        before = [known for known in _read(out).get("still_rising", []) if known not in names]
        header["still_rising"] = before + [study.name for study in found if still_rising(study)]
    if name == "ktiw-optimal":
        short = any(study.evaluations("linear") and study.updates("linear") < LONG_ENOUGH for study in found)
        reason = f"runs of fewer than {LONG_ENOUGH} updates end before either model has converged"
        header["not_testable"] = {"ktiw-linear-output-comparable": reason} if short else {}
    return _write(out, header | {"tables": tables})


def _study_tables(name: str, found: list[Study], prepared: Path | None, data: Path | None) -> dict[str, Any]:
    if name == "ktiw-frozen":
        return {"table_10": table_10(found)}
    if name == "ktiw-logreg":
        return {"table_11": table_11(found)}
    if name == "ktiw-optimal":
        translated = [one for one in found if one.evaluations("linear")]
        if not translated:
            raise ValueError("there is no run of the linear-output model; leave out --tables-only to train it")
        study = translated[0]
        words = _words(study, prepared, data)
        if words is None:
            raise ValueError("BLEU needs the vocabulary: name the data, --prepared FOLDER or --data FOLDER")
        return {"appendix_a1": appendix_a1(study, words)}
    split, tau = ("train" if name == "ktiw-train" else "valid"), name == "ktiw-tau"
    main, with_bleu = {"ktiw-table2": ("2", "6"), "ktiw-tau": ("3", "4"), "ktiw-train": ("7", "8")}[name]
    how: dict[str, Any] = {"split": split, "tau": tau, "results": name}
    tables = {f"table_{main}": table_2(found, **how, table=f"table_{main}")}
    scored = [(study, words) for study in found if (words := _words(study, prepared, data)) is not None]
    scores = {study.name: bleu_curve(study, words, split=split) for study, words in scored}
    chosen = [study for study, _ in scored if scores[study.name]]
    if chosen:
        tables[f"table_{with_bleu}"] = table_2(
            chosen, **how, table=f"table_{with_bleu}", performance=lambda study: scores[study.name]
        )
    if name == "ktiw-table2":
        tables["runs"] = run_sizes(found)
        tables["curve"] = uniform_curves(found)
        tables["second"] = [
            {"dataset": study.name, "step": row["step"], "a_alpha_hat": round(row["valid/alpha_hat"], 2)}
            | {"accuracy": round(row["valid/accuracy"], 2)}
            for study in found
            for row in study.evaluations("second")
            if "valid/alpha_hat" in row
        ]
    return tables


def _words(study: Study, prepared: Path | None, data: Path | None) -> Sequence[str] | None:
    """The pieces of a translation's vocabulary; None for a classification, or where the data is not named."""
    name = study.folder.name
    if not any((study.folder / "reference").glob("valid-*.npz")):
        return None
    if prepared is not None and (prepared / f"{name}.npz.xz").exists():
        return load_corpus(prepared / f"{name}.npz.xz").words
    return prepare(name, data).words if data is not None else None


def run_toy(name: str, out: Path | str, *, seeds: int | None = None, steps: int | None = None) -> dict[str, Any]:
    """Train one of the toy experiments and write its results."""
    from papers.ktiw.local import LocalConfig, run_figure_7
    from papers.ktiw.permutations import (
        PermutationsConfig,
        run_figure_3,
        run_figure_6,
        run_section_6_2,
    )

    rows = Rows(Path(out).with_suffix(".rows"))
    changed: dict[str, Any] = {key: value for key, value in (("seeds", seeds), ("steps", steps)) if value is not None}
    config: Any
    if name == "ktiw-local":
        config = replace(LocalConfig(), **changed)
        run_figure_7(config, rows)
    else:
        config = replace(PermutationsConfig(), **changed)
        runs = {"ktiw-permutations": run_figure_3, "ktiw-multihead": run_figure_6}
        runs.get(name, run_section_6_2)(config, rows)
    result = write_toy_result(name, rows, out, config=asdict(config), told=provenance())
    rows.path.unlink(missing_ok=True)
    return result


def write_toy_result(
    name: str, rows: Rows, out: Path | str, *, config: dict[str, Any], told: dict[str, Any]
) -> dict[str, Any]:
    """Write results/<name>.json from rows that ``run_toy`` or another machine found."""
    tables = {table: rows.tables[table] for table in TOYS[name] if table in rows.tables}
    if not tables:
        raise ValueError(f"there are no rows of {', '.join(TOYS[name])} in {rows.path}")
    judged = [table for table in tables if tables[table] and "learned" in tables[table][0]]
    tables |= {f"{table}_learned": _learned(tables[table]) for table in judged}
    header = {"name": name, "paper": "ktiw", "config": config, "seed": config.get("seed", 0)}
    header |= {key: told.get(key) for key in PROVENANCE}
    result = header | {"tables": tables, "seconds": rows.facts}
    write_json(out, result)
    return result


def _learned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many seeds of each setting learn, and the middle one's accuracies."""
    groups: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple((k, v) for k, v in row.items() if isinstance(v, str)), []).append(row)
    return [
        {
            **dict(labels),
            "seeds": len(mine),
            "learned": sum(row["learned"] for row in mine),
            **{
                f"median_{name}": round(float(np.median([row[name] for row in mine])), 3)
                for name in ("accuracy", "accuracy_at_the_end")
                if name in mine[0]
            },
        }
        for labels, mine in groups.items()
    ]


def write_statistics(corpora: Sequence[Corpus], out: Path | str) -> dict[str, Any]:
    """Table 9: the data sets' statistics, the paper's beside them."""
    rows = beside_paper(
        [statistics(corpus) for corpus in corpora], results="ktiw-data", table="table_9", keys=["dataset"]
    )
    header = {"name": "ktiw-data", "paper": "ktiw", "config": {"longest": 400, "min_count": 3}, "seed": 0}
    return _write(out, header | provenance() | {"tables": {"table_9": rows}})


def write_heads_result(work: Path | str, out: Path | str) -> dict[str, Any]:
    """papers/results/ktiw-transformers.json: each head's agreements over training, and the families' summary."""
    curves, summary, configs, told = [], [], {}, {}
    for folder in sorted(path for path in Path(work).iterdir() if (path / "reference" / "run.json").exists()):
        told = json.loads((folder / "reference" / "run.json").read_text(encoding="utf-8"))
        configs[folder.name] = told["config"]
        chance = (
            json.loads((folder / "chance.json").read_text())["valid"] if (folder / "chance.json").exists() else None
        )
        best: dict[tuple[str, str], dict[str, float]] = {}
        for run in ("reference", "second", "uniform"):
            for step, head, values in _head_rows(folder / run):
                curves.append({"family": folder.name, "run": run, "step": step, "head": head, **values})
                for key, value in values.items():
                    kept = best.setdefault((run, head), {})
                    kept[key] = max(kept.get(key, 0.0), value)
        heads = sorted({head for _, head in best})
        for head in heads:
            second, uniform = best.get(("second", head), {}), best.get(("uniform", head), {})
            summary.append(
                {
                    "family": folder.name,
                    "head": head,
                    "a_alpha_beta": second.get("gold_beta"),
                    "a_alpha_uf": uniform.get("gold_beta"),
                    "a_own": best.get(("reference", head), {}).get("own_beta"),
                    "a_own_alone": best.get(("reference", head), {}).get("own_beta_alone"),
                    "a_other_seed": second.get("gold_alpha"),
                    "a_random": None if chance is None else round(chance, 2),
                }
            )
    if not summary:
        raise ValueError(f"{work} holds no evaluated runs of transformers")
    header = {"name": "ktiw-transformers", "paper": "ktiw", "config": configs, "seed": told.get("seed")}
    header |= {key: told.get(key) for key in PROVENANCE}
    return _write(out, header | {"tables": {"heads": summary, "curves": curves}})


def _head_rows(folder: Path) -> list[tuple[int, str, dict[str, float]]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for row in map(json.loads, lines):
        by_head: dict[str, dict[str, float]] = {}
        for name, value in row["values"].items() if row["kind"] == "eval" else ():
            head, slash, reading = name.partition("/")
            if slash and value is not None:
                by_head.setdefault(head, {})[reading] = round(value, 2)
        found += [(row["step"], head, values) for head, values in by_head.items()]
    return found


def _write(out: Path | str, result: dict[str, Any]) -> dict[str, Any]:
    """Write, keeping the rows of an earlier file that this one does not have; a data set's rows are of one run."""
    result["keys"] = {name: KEYS.get(name) or _key(rows) for name, rows in result["tables"].items()}
    before = _read(out)
    if before:
        anew = {name: {row.get("dataset") for row in rows} - {None} for name, rows in result["tables"].items()}
        kept = {
            name: [row for row in rows if row.get("dataset") not in anew.get(name, ())]
            for name, rows in before["tables"].items()
        }
        result = merge_results({**before, "tables": kept}, result)
        result["tables"] = {name: _in_order(rows) for name, rows in result["tables"].items()}
    write_json(out, result)
    return result


def _read(out: Path | str) -> dict[str, Any]:
    return json.loads(Path(out).read_text(encoding="utf-8")) if Path(out).exists() else {}


def _key(rows: Sequence[dict[str, Any]]) -> list[str]:
    known = ("dataset", "model", "family", "run", "head", "step", "corpus")
    return [key for key in known if rows and key in rows[0]]


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Data sets in the order of the paper's tables; other rows as they came."""
    order = {title: i for i, title in enumerate(TITLES.values())}
    places = np.argsort([order.get(row.get("dataset", ""), 0) for row in rows], kind="stable")
    return [rows[i] for i in places]
