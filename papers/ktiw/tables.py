"""Tables 2 to 8, 10 and 11 of KTIW from the run folders of its studies, the paper's numbers beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.dynamics import contextualised
from papers.common.folders import beside_paper
from papers.ktiw.corpora import TITLES

__all__ = [
    "Study",
    "appendix_a1",
    "bleu",
    "bleu_curve",
    "run_sizes",
    "seed_folder",
    "studies",
    "table_2",
    "table_10",
    "table_11",
    "uniform_curves",
]

Row = dict[str, Any]
AGREEMENTS = ("alpha_uf", "uf_px", "delta_uf", "alpha_beta")
# The run whose evaluations hold each agreement.
MADE_BY = {"alpha_uf": "uniform", "uf_px": "uniform", "delta_uf": "uniform", "uf_log": "uniform"}
MADE_BY |= {"alpha_beta": "second", "alpha_hat": "second", "alpha_frozen": "frozen"}


@dataclass(frozen=True)
class Study:
    """The run folders of one data set and one seed."""

    folder: Path
    seed: int = 0

    @property
    def name(self) -> str:
        """As the paper's tables call the data set."""
        return TITLES[self.folder.name]

    def evaluations(self, run: str) -> list[Row]:
        """(step and values) of each evaluation of a run, agreements included; none if it was not run."""
        by_step: dict[int, Row] = {}
        for name in ("metrics.jsonl", "agreements.jsonl"):
            path = self.folder / run / name
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            for row in map(json.loads, lines):
                if row["kind"] == "eval":
                    by_step.setdefault(row["step"], {"step": row["step"]}).update(row["values"])
        return [by_step[step] for step in sorted(by_step)]

    def curve(self, run: str, value: str) -> list[tuple[int, float]]:
        """(step, value) of the evaluations that have it."""
        return [(row["step"], row[value]) for row in self.evaluations(run) if row.get(value) is not None]

    def most(self, split: str, name: str, *, tau: bool = False) -> float | None:
        """The greatest agreement over a run's checkpoints (A.7); None where it was not measured."""
        values = [v for _, v in self.curve(MADE_BY[name], f"{split}/{name}{'_tau' if tau else ''}")]
        return max(values) if values else None

    def chance(self, key: str) -> float | None:
        """The random baseline."""
        path = self.folder / "chance.json"
        return json.loads(path.read_text(encoding="utf-8")).get(key) if path.exists() else None

    def updates(self, run: str = "reference") -> int:
        """The updates after which a run was last evaluated; a time limit may end it before its config's steps."""
        return max((row["step"] for row in self.evaluations(run)), default=0)

    def run_facts(self, run: str = "reference") -> Row:
        """The run.json: config, seed, versions, device."""
        path = self.folder / run / "run.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def seed_folder(work: Path | str, seed: int) -> Path:
    """Where the runs of a seed lie: those of the first in the folder itself, others in a folder of their own in it."""
    if seed < 0:
        raise ValueError(f"a seed is at least 0, got {seed}")
    return Path(work) / f"seed-{seed}" if seed else Path(work)


def studies(work: Path | str) -> list[Study]:
    """The data sets that ``work`` holds runs of, seed by seed, in the order of the paper's tables."""
    seeds = [0, *sorted(int(path.name.removeprefix("seed-")) for path in Path(work).glob("seed-*"))]
    places = [(seed_folder(work, seed) / name, seed) for seed in seeds for name in TITLES]
    return [Study(folder, seed) for folder, seed in places if (folder / "reference" / "run.json").exists()]


def table_2(
    finished: Iterable[Study],
    *,
    split: str = "valid",
    tau: bool = False,
    performance: Callable[[Study], list[tuple[int, float]]] | None = None,
    results: str = "ktiw-table2",
    table: str = "table_2",
) -> list[Row]:
    """Agreements and what they are worth (Tables 2, 3, 5, 7; with BLEU as ``performance`` 4, 6, 8), in per cent.

    A star among ``starred`` says that no checkpoint agreed as much, so that the value is the last one's.
    """
    rows = []
    for study in finished:
        reached = performance(study) if performance else study.curve("second", f"{split}/accuracy")
        agreed = dict(study.curve("second", f"{split}/alpha_hat{'_tau' if tau else ''}"))
        reached = [(step, value) for step, value in reached if step in agreed]
        row: Row = {"dataset": study.name}
        starred = []
        for name in AGREEMENTS:
            value = study.most(split, name, tau=tau)
            row[f"a_{name}"] = _rounded(value)
            if value is not None and reached:
                xi = contextualised(
                    value, curve=[agreed[step] for step, _ in reached], performance=[v for _, v in reached]
                )
                row[f"xi_{name}"] = _rounded(xi.value)
                starred += [name] if xi.starred else []
        row["a_random"] = _rounded(study.chance(f"{split}_tau" if tau else split))
        row["xi_star"] = _rounded(reached[-1][1]) if reached else None
        row["starred"] = ", ".join(starred)
        rows.append(_ordered(row))
    return beside_paper(rows, results=results, table=table, keys=["dataset"])


def run_sizes(finished: Iterable[Study]) -> list[Row]:
    """How long each data set's runs were trained, and on how much their agreements were measured."""
    rows = []
    for study in finished:
        config = study.run_facts().get("config") or {}
        epochs = study.updates() * config.get("batch", 0) / max(1, config.get("examples", 0))
        row = {"dataset": study.name, "updates": study.updates(), "batch": config.get("batch")}
        row |= {"epochs": round(epochs, 1) if config.get("examples") else None, "measured_on": config.get("count")}
        best = max((row["valid/accuracy"] for row in study.evaluations("reference")), default=None)
        rows.append({**row, "best_accuracy": _rounded(best)})
    return rows


def uniform_curves(finished: Iterable[Study]) -> list[Row]:
    """A(alpha, beta_uf) over the training of the model with uniform attention (A.7)."""
    return [
        {"dataset": study.name, "step": step, "a_alpha_uf": _rounded(value)}
        for study in finished
        for step, value in study.curve("uniform", "valid/alpha_uf")
    ]


def table_10(finished: Iterable[Study]) -> list[Row]:
    """Attention trained while all else is frozen, against the probe trained without attention."""
    return _pairs(finished, "a_alpha_frozen", "a_alpha_uf", results="ktiw-frozen", table="table_10")


def table_11(finished: Iterable[Study]) -> list[Row]:
    """The proxy and logistic regression against the probe."""
    return _pairs(finished, "a_uf_px", "a_uf_log", results="ktiw-logreg", table="table_11")


def _pairs(finished: Iterable[Study], first: str, second: str, *, results: str, table: str) -> list[Row]:
    rows = []
    for study in finished:
        values = {name: _rounded(study.most("valid", name.removeprefix("a_"))) for name in (first, second)}
        if None not in values.values():
            rows.append({"dataset": study.name, **values})
    return beside_paper(rows, results=results, table=table, keys=["dataset"])


def appendix_a1(study: Study, words: Sequence[str]) -> list[Row]:
    """BLEU of the main and the linear-output model at their best checkpoints, and A(alpha_opt, beta) of the latter."""
    rows: list[Row] = []
    for model, run in (("linear", "linear"), ("main", "reference")):
        evaluated = study.evaluations(run)
        if not evaluated:
            continue
        best = max(evaluated, key=lambda row: row["valid/accuracy"])
        score = bleu(study.folder / run / f"valid-{best['step']:06d}.npz", words)
        rows.append(
            {
                "model": model,
                "bleu": round(score, 2),
                "accuracy": _rounded(best["valid/accuracy"]),
                "step": best["step"],
            }
        )
    optimal = study.folder / "optimal.json"
    if rows and optimal.exists():
        agreements = json.loads(optimal.read_text(encoding="utf-8"))
        rows[0] |= {
            name: value if name == "targets" else _rounded(value)
            for name, value in agreements.items()
            if name != "step"
        }
    return beside_paper(rows, results="ktiw-optimal", table="appendix_a1", keys=["model"])


def bleu(path: Path, words: Sequence[str]) -> float:
    """sacrebleu's corpus BLEU of the translations that an evaluation left, cased, with its own tokenisation (13a)."""
    from papers.common.translation import corpus_bleu

    def texts(name: str) -> list[str]:
        rows = np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"].astype(np.int64))[:-1])
        return ["".join(words[i] for i in row).replace("▁", " ").strip() for row in rows]

    with np.load(path, allow_pickle=False) as arrays:
        return corpus_bleu(texts("hypotheses"), texts("references"))


def bleu_curve(
    study: Study, words: Sequence[str], *, split: str = "valid", run: str = "second"
) -> list[tuple[int, float]]:
    """BLEU at each evaluation of a run."""
    paths = sorted((study.folder / run).glob(f"{split}-*.npz"))
    return [(int(path.stem.rsplit("-", 1)[1]), bleu(path, words)) for path in paths]


def _ordered(row: Row) -> Row:
    """The columns in order: agreements, then their xi."""
    first = ["dataset", *(f"a_{name}" for name in AGREEMENTS), "a_random", *(f"xi_{name}" for name in AGREEMENTS)]
    return {key: row[key] for key in (*first, "xi_star", "starred") if key in row}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
