"""The tables of papers/results/guidance.json from the rows of the parts of the reproduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from papers.guidance.curves import Row, converged_at, drops_at, plateau, reaches_at

__all__ = ["ELECTRA_RUN", "RUN", "best_arm", "guessing", "made_tables"]

# The columns that identify a run of a masked LM.
RUN = ("part", "depth", "language", "arm", "seed")
# The columns that identify a run of ELECTRA.
ELECTRA_RUN = ("width", "steps", "arm", "seed")
CONVERGED = (("loss", "held-out loss"), ("steps", "updates to the unguided model's last loss"))
PRETRAINED = {"short": "half of the planned pretraining", "long": "all of the pretraining"}

Tables = Mapping[str, list[dict[str, Any]]]


def _last_loss(tables: Tables, run: Row) -> float | None:
    """The held-out loss at a run's last evaluation."""
    looks = _looks(tables, run)
    return looks[max(looks)] if looks else None


def _curve(tables: Tables, run: Row) -> Row | None:
    return next((c for c in tables.get("curves", []) if all(c.get(k) == run.get(k) for k in RUN)), None)


def _runs(tables: Tables, part: str) -> list[dict[str, Any]]:
    """The part's runs that made at least one update."""
    return [run for run in tables.get("runs", []) if run["part"] == part and run["steps"] > 0]


def tuning(tables: Tables, part: str = "a") -> list[dict[str, Any]]:
    """One row for each rate, warm-up and seed, read at the last update that all arms of the seed share."""
    columns = ("guided", "lr", "warmup", "seed")
    runs = _runs(tables, part)
    shared = {
        seed: _shared_look([run for run in runs if run["seed"] == seed], tables) for seed in {r["seed"] for r in runs}
    }
    rows = [
        {**{c: run[c] for c in columns}, "at": shared[run["seed"]], "loss": _loss_at(tables, run, shared[run["seed"]]),
         "of_steps": run["steps"]}
        for run in runs
    ]  # fmt: skip
    return sorted(rows, key=lambda r: (r["seed"], not r["guided"], -r["lr"], r["warmup"]))


def _shared_look(runs: Sequence[Row], tables: Tables) -> int | None:
    """The last update at which all of these runs were evaluated: a fair place to compare runs of several lengths."""
    looks = [set(_looks(tables, run)) for run in runs]
    both = set.intersection(*looks) if looks else set()
    return max(both) if both else None


def _looks(tables: Tables, run: Row) -> dict[int, float]:
    """{update: held-out loss} of a run."""
    own = [e for e in tables.get("evaluations", []) if all(e.get(k) == run.get(k) for k in RUN)]
    return {e["at"]: e["valid_loss"] for e in own}


def _loss_at(tables: Tables, run: Row, at: int | None) -> float | None:
    return None if at is None else _looks(tables, run).get(at)


def _best_arms(runs: Sequence[Row], tables: Tables) -> dict[bool, str]:
    """By guidance, of the arms trained on every seed the lowest on the first, at the last update all of them share."""
    seeds = {run["seed"] for run in runs}
    on_all = {arm for arm in {run["arm"] for run in runs} if {r["seed"] for r in runs if r["arm"] == arm} == seeds}
    first = [run for run in runs if run["seed"] == min(seeds) and run["arm"] in on_all]
    at, best = _shared_look(first, tables), {}
    for guided in (True, False):
        own = [(loss, run["arm"]) for run in first if run["guided"] == guided
               and (loss := _loss_at(tables, run, at)) is not None]  # fmt: skip
        if own:
            best[guided] = min(own)[1]
    return best


def best_arm(tables: Tables) -> dict[bool, str]:
    """By guidance, the name of the best arm of part (a)."""
    runs = _runs(tables, "a")
    return _best_arms(runs, tables) if runs else {}


def convergence(tables: Tables, parts: tuple[str, ...] = ("a", "e")) -> list[dict[str, Any]]:
    """The best arms by depth and seed."""
    every = [run for part in parts for run in _runs(tables, part)]
    depths = sorted({run["depth"] for run in every})
    return [row for depth in depths for row in _convergence_at(tables, [r for r in every if r["depth"] == depth])]


def _convergence_at(tables: Tables, runs: Sequence[Row]) -> list[dict[str, Any]]:
    """The best arms of one depth, each beside the unguided one of its seed."""
    rows, best = [], _best_arms(runs, tables)
    unguided = {r["seed"]: r for r in reversed(runs) if not r["guided"] and r["arm"] == best.get(False)}
    for run in (run for run in runs if best.get(run["guided"]) == run["arm"]):
        other, curve = unguided.get(run["seed"]), _curve(tables, run)
        if other is not None and curve is not None:
            steps = reaches_at(curve, other["loss"]) if run["guided"] else run["steps"]
            settings = {"lr": run["lr"], "warmup": run["warmup"], "loss": _last_loss(tables, run)}
            rows.append({"layers": run["depth"], "guided": run["guided"], "patterns": run["patterns"],
                         "seed": run["seed"], **settings, "steps": steps, "mlm_drop": _left(tables, run),
                         "of_steps": run["steps"]})  # fmt: skip
    return rows


def guessing(tables: Tables, part: str = "a") -> float | None:
    """The loss of guessing by frequency, as a part's unguided runs show it: the plateau they reach first."""
    curves = [_curve(tables, run) for run in _runs(tables, part) if not run["guided"]]
    levels = [level for curve in curves if curve is not None and (level := plateau(curve)) is not None]
    return sum(levels) / len(levels) if levels else None


def _left(tables: Tables, run: Row) -> int | None:
    """The update at which a run's loss was well below guessing; None if it never was."""
    curve = _curve(tables, run)
    return None if curve is None else drops_at(curve, guessing(tables, "large" if run["part"] == "large" else "a"))


def ag_loss(tables: Tables, part: str = "a") -> list[dict[str, Any]]:
    """Figure 5 in two numbers, for every seed of a part's best guided arm."""
    runs = _runs(tables, part)
    if not runs:
        return []
    best, level, rows = _best_arms(runs, tables).get(True), guessing(tables, part), []
    for run in runs:
        curve = _curve(tables, run)
        if run["arm"] != best or curve is None:
            continue
        converged, drop, steps = converged_at(curve), drops_at(curve, level), curve["at"][-1]
        row = {"seed": run["seed"], "arm": run["arm"], "steps": steps, "ag_converged": converged, "mlm_drop": drop}
        shares = {
            "ag_converged_share": converged / steps if converged else None,
            "mlm_drop_share": drop / steps if drop else None,
        }
        rows.append({**row, **shares, "plateau_loss": level})
    return rows


def finetuned(tables: Tables) -> list[dict[str, Any]]:
    """Part (b)."""
    rows = [
        {
            "task": r["task"],
            "training": r["training"],
            "guided": r["arm"].startswith("AG"),
            "accuracy": r["accuracy"],
            **({"f1": r["f1"]} if "f1" in r else {}),
            "seed": r["seed"],
        }
        for r in tables.get("finetuned_runs", [])
    ]
    return sorted(rows, key=lambda r: (r["training"] != "short", r["task"], not r["guided"], r["seed"]))


def electra(tables: Tables) -> list[dict[str, Any]]:
    """Part (c): of each run, the better arm with and without guidance, and when it reached the latter's last loss."""
    runs, rows = tables.get("electra_runs", []), []
    # The arms of a run are as wide and had as many updates.
    for group in sorted({(run["width"], run["steps"]) for run in runs}, key=lambda group: (-group[0], group[1])):
        best = _best_of_group([run for run in runs if (run["width"], run["steps"]) == group])
        for guided, run in best.items():
            curve = next(c for c in tables["electra_curves"] if all(c[key] == run[key] for key in ELECTRA_RUN))
            reached = reaches_at(curve, best[False]["loss"]) if guided and False in best else None
            settings = {name: run[name] for name in ("layers", "width", "guided", "patterns", "lr", "warmup")}
            rows.append({**settings, "alpha0": run["alpha0"] if guided else None, "loss": run["loss"],
                         "ag_loss": run["ag_loss"] if guided else None, "steps": reached or run["steps"],
                         "of_steps": run["steps"]})  # fmt: skip
    return rows


def _best_of_group(runs: Sequence[Row]) -> dict[bool, Row]:
    """With and without guidance, the run with the lowest loss."""
    best: dict[bool, Row] = {}
    for guided in (True, False):
        own = [run for run in runs if run["guided"] == guided]
        if own:
            best[guided] = min(own, key=lambda run: run["loss"])
    return best


def translation(tables: Tables) -> list[dict[str, Any]]:
    """Part (d)."""
    scores = {(r["arm"], r["seed"]): r["bleu"] for r in tables.get("bleu", [])}
    return [
        {
            "model": r["arm"],
            "seed": r["seed"],
            "loss": r["loss"],
            "valid_nll": r["valid_nll"],
            "bleu": scores.get((r["arm"], r["seed"])),
            "steps": r["steps"],
        }
        for r in tables.get("translation_runs", [])
    ]


def low_resource(tables: Tables) -> list[dict[str, Any]]:
    """Part (f)."""
    runs, rows = _runs(tables, "f"), []
    for language in dict.fromkeys(run["language"] for run in runs):
        own = [run for run in runs if run["language"] == language]
        best = _best_arms(own, tables)
        rows += [
            {
                "language": language,
                "guided": run["guided"],
                "patterns": run["patterns"],
                "lr": run["lr"],
                "warmup": run["warmup"],
                "loss": _last_loss(tables, run),
                "seed": run["seed"],
            }
            for run in own
            if best.get(run["guided"]) == run["arm"]
        ]
    return rows


def summary(made: Tables) -> list[dict[str, Any]]:
    """The outcomes with and without guidance in one table: means over the seeds."""
    rows = [
        *(
            _compared(f"masked LM, 12 layers, larger batches: {text}", made["large_convergence"], column)
            for column, text in CONVERGED
        ),
        *_masked_lm_summary(made["convergence"]),
        *_grouped_summary(made["finetuned"], ("task", "training"), _finetuned_title, "accuracy"),
        *_grouped_summary(made["electra"], ("width", "of_steps"), _electra_title, "loss"),
        *(
            _compared(f"translation: {text}", made["translation"], column, "model", ("AG", "BASE"))
            for column, text in (("loss", "training loss"), ("valid_nll", "held-out loss"), ("bleu", "BLEU"))
        ),
        *_grouped_summary(made["low_resource"], ("language",), lambda k: f"{k.capitalize()}: held-out loss", "loss"),
    ]
    return [row for row in rows if row is not None]


def _compared(
    what: str, rows: Iterable[Row], column: str, key: str = "guided", values: tuple[Any, Any] = (True, False)
) -> dict[str, Any] | None:
    """The means of a column with and without guidance; None where either is missing."""
    both = [[r[column] for r in rows if r[key] == value and r[column] is not None] for value in values]
    if not all(both):
        return None
    guided, unguided = (sum(some) / len(some) for some in both)
    return {"what": what, "guided": guided, "unguided": unguided, "seeds": min(map(len, both))}


def _masked_lm_summary(rows: Sequence[Row]) -> Iterable[dict[str, Any] | None]:
    for layers in sorted({row["layers"] for row in rows}, key=lambda layers: (layers != 12, layers)):
        own = [row for row in rows if row["layers"] == layers]
        for column, text in CONVERGED:
            yield _compared(f"masked LM, {layers} layers: {text}", own, column)


def _grouped_summary(
    rows: Sequence[Row], keys: Sequence[str], title: Callable[..., str], column: str
) -> Iterable[dict[str, Any] | None]:
    """A comparison for each setting of ``keys``, in the order of the rows."""
    for setting in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        own = [row for row in rows if tuple(row[key] for key in keys) == setting]
        yield _compared(title(*setting), own, column)


def _finetuned_title(task: str, training: str) -> str:
    return f"{task} after {PRETRAINED[training]}: accuracy, %"


def _electra_title(width: int, steps: int) -> str:
    return f"ELECTRA of width {width}, {steps:,} updates: training loss"


def ablated(tables: Tables) -> list[dict[str, Any]]:
    """Part (g); a model without guidance has no alpha0, and one without a bias either no patterns."""
    rows = []
    for run in _runs(tables, "g"):
        guided, biased = run["guided"], run["bias"] is not None
        applies = {"alpha0": guided, "fraction": guided or biased, "patterns": guided or biased, "bias": biased}
        settings = {name: run[name] if applied else None for name, applied in applies.items()}
        ends = {"loss": _last_loss(tables, run), "mlm_drop": _left(tables, run)}
        rows.append({"arm": run["arm"], **settings, "seed": run["seed"], **ends})
    return rows


def made_tables(tables: Tables) -> dict[str, list[dict[str, Any]]]:
    """Every table, by its name."""
    made = {
        "tuning": tuning(tables),
        # An earlier run of (a), with larger batches.
        "large_tuning": tuning(tables, "large"),
        "large_convergence": convergence(tables, ("large",)),
        "large_ag_loss": ag_loss(tables, "large"),
        "convergence": convergence(tables),
        "ag_loss": ag_loss(tables),
        "finetuned": finetuned(tables),
        "electra": electra(tables),
        "translation": translation(tables),
        "low_resource": low_resource(tables),
        "ablations": ablated(tables),
        "table_11": list(tables.get("table_11", [])),
    }
    return {"summary": summary(made), **made}
