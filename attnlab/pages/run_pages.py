"""The page of ``attnlab report RUN...``: what was run, how it learned, and the tables beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.pages.charts import Axes, Series, line_chart
from attnlab.pages.fragments import config_list, facts, flatten, provenance_facts, section
from attnlab.pages.html import Html, element, page
from attnlab.pages.numbers import number
from attnlab.pages.runs import Run, curves, differing_settings, grouped, read_run
from attnlab.pages.tables import PAPER, Column, table
from attnlab.progress import each

__all__ = ["run_page"]

KINDS = {"eval": "Evaluation", "train": "Training"}


def run_page(run_dirs: Sequence[Path | str]) -> str:
    """One self-contained page for one or more run folders; seeds of one configuration become one line with a band."""
    if not run_dirs:
        raise ValueError("a report needs at least one run folder, got none")
    runs = [read_run(folder) for folder in each(run_dirs)]
    groups = grouped(runs)
    names = list(dict.fromkeys(run.name for run in runs))
    # A name may hold a comma.
    title = names[0] if len(names) == 1 else f"{len(runs)} runs: {'; '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    body = [
        element("h1", title),
        element("p", _summary(runs, groups), class_="lead"),
        section("What was run", _runs_table(runs), _shared(runs)),
        [_curves(groups, kind) for kind in (*KINDS, *sorted(_kinds(runs) - set(KINDS)))],
        _results(groups),
    ]
    return page(title, body, subtitle="run report" if len(runs) == 1 else f"report on {len(runs)} runs")


def tables_of(result: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The tables of a result: a mapping from name to rows, or a list of ``{"name", "rows"}``."""
    tables = result.get("tables") or {}
    if isinstance(tables, Mapping):
        return {str(name): list(rows) for name, rows in tables.items()}
    return {str(one.get("name", f"table {i + 1}")): list(one["rows"]) for i, one in enumerate(tables)}


def _summary(runs: Sequence[Run], groups: Sequence[tuple[str, list[Run]]]) -> str:
    finished = sum(run.finished for run in runs)
    steps = max((c.steps[-1] for run in runs for c in run.curves.values() if c.steps), default=0)
    parts = ["One run" if len(runs) == 1 else f"{len(runs)} runs of {_count(len(groups), 'configuration')}"]
    parts.append(f"up to step {number(int(steps))}")
    if finished < len(runs):
        parts.append(f"{finished} finished, {len(runs) - finished} without a result yet")
    best = _best_evaluation(groups)
    return f"{', '.join(parts)}." + (f" {best}" if best else "")


def _best_evaluation(groups: Sequence[tuple[str, list[Run]]]) -> str:
    """The lowest evaluation loss at the end, with its configuration if several have one."""
    metrics = dict.fromkeys(m for _, runs in groups for run in runs for kind, m in run.curves if kind == "eval")
    metric = next((m for m in metrics if m.rsplit("/", 1)[-1] == "loss"), "loss")
    ends = []
    for name, runs in groups:
        for series in curves([(name, runs)], "eval", metric):
            values = [y for y in series.y if y is not None]
            ends += [(values[-1], name)] if values else []
    if not ends:
        return ""
    loss, name = min(ends)
    if len(ends) == 1:
        return f"The last evaluation loss is {number(loss)}."
    worst, other = max(ends)
    return f"The lowest last evaluation loss is {number(loss)} ({name}), the highest {number(worst)} ({other})."


def _runs_table(runs: Sequence[Run]) -> Html:
    differing = differing_settings(runs)
    rows = [_run_row(run, differing) for run in runs]
    skipped = sum(run.skipped for run in runs)
    note = f"{_count(skipped, 'line')} of the metrics could not be read and were left out." if skipped else ""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    columns = [Column(key, key.replace("_", " ")) for key in keys]
    return table(rows, name="runs", title=_count(len(runs), "run"), columns=columns, note=note)


def _run_row(run: Run, differing: Sequence[str]) -> dict[str, Any]:
    settings = flatten(dict(run.about.get("config") or {}))
    steps = max((c.steps[-1] for c in run.curves.values() if c.steps), default=None)
    return {
        "name": run.name,
        "state": "finished" if run.finished else "no result yet",
        "seed": run.about.get("seed"),
        **{key: settings.get(key) for key in differing},
        "steps": None if steps is None else int(steps),
        "minutes": run.seconds / 60 if run.seconds else None,
        **((run.result or {}).get("metrics") or {}),
    }


def _shared(runs: Sequence[Run]) -> list[Html | None]:
    """Provenance and settings that all runs share, written once; a run that differs says so in the table above."""
    pairs: list[tuple[str, object]] = []
    for run in runs:
        for name, value in provenance_facts(run.about):
            if name != "Seed" and value not in (None, "") and (name, value) not in pairs:
                pairs.append((name, value))
    differing = set(differing_settings(runs))
    settings = flatten(dict(runs[0].about.get("config") or {}))
    same = {k: v for k, v in settings.items() if k not in differing and k.rpartition(".")[2] != "seed"}
    return [facts(pairs), config_list(same, title="Settings" if len(runs) == 1 else "Settings that all runs share")]


def _curves(groups: Sequence[tuple[str, list[Run]]], kind: str) -> Html | None:
    by_metric = _distinct_curves(groups, kind)
    if not by_metric:
        return None
    charts = [
        line_chart(
            series,
            name=f"{kind}-{metric}".replace("/", "-").replace(" ", "-"),
            title=metric.replace("_", " "),
            x_label="step",
            y_label=metric.replace("_", " "),
            axes=Axes(log_x=_log_spaced([x for s in series for x in s.x])),
        )
        for metric, series in by_metric.items()
    ]
    banded = any(s.low is not None for series in by_metric.values() for s in series)
    about = "Lines are means over seeds; bands reach from the least to the greatest." if banded else ""
    return section(KINDS.get(kind, kind.capitalize()), element("div", charts, class_="grid2"), about=about)


def _distinct_curves(groups: Sequence[tuple[str, list[Run]]], kind: str) -> dict[str, list[Series]]:
    """The lines of each metric that has any value, without a loss term that is the whole loss."""
    metrics = dict.fromkeys(m for _, runs in groups for run in runs for k, m in run.curves if k == kind)
    drawn = {metric: curves(groups, kind, metric) for metric in metrics}
    with_values = {m: series for m, series in drawn.items() if any(y is not None for s in series for y in s.y)}
    # A run with a single loss term has its values twice: as the term's and as the sum's.
    return {m: series for m, series in with_values.items() if m == _sum_of(m) or with_values.get(_sum_of(m)) != series}


def _sum_of(metric: str) -> str:
    """The metric that sums up the loss terms beside this one: valid/loss for valid/causal-lm."""
    return f"{metric.rpartition('/')[0]}/loss" if "/" in metric else "loss"


def _log_spaced(steps: Sequence[float]) -> bool:
    """Whether most steps crowd at the start, as the papers' checkpoints do; a logarithmic axis leaves out step 0."""
    return len(steps) > 4 and sum(x <= max(steps) / 10 for x in steps) > len(steps) / 2


def _results(groups: Sequence[tuple[str, list[Run]]]) -> Html | None:
    """Tables of the same name become one, its rows told apart by run and seed where there are several."""
    merged: dict[str, list[dict[str, Any]]] = {}
    for name, runs in groups:
        for run in runs:
            origin: dict[str, Any] = {"run": name} if len(groups) > 1 else {}
            origin |= {"seed": run.about.get("seed")} if any(len(group) > 1 for _, group in groups) else {}
            for label, rows in tables_of(run.result or {}).items():
                merged.setdefault(label, []).extend({**origin, **row} for row in rows)
    if not merged:
        return None
    paper = any(key.endswith(PAPER) for rows in merged.values() for row in rows for key in row)
    drawn = [table(rows, name=label.replace(" ", "-"), title=label.replace("_", " ")) for label, rows in merged.items()]
    return section("Results", drawn, about="The paper's numbers stand in italics beside ours." if paper else "")


def _kinds(runs: Sequence[Run]) -> set[str]:
    return {kind for run in runs for kind, _ in run.curves}


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
