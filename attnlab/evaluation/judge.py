"""Cache policies judged on the same cases: a grid of tasks, lengths, policies and budgets beside the full cache.

The protocol is docs/judge.md. Scores have intervals, differences from the full cache paired ones; bytes, reading and
decoding times are ratios to the full cache's in the same run.
"""

from __future__ import annotations

import functools
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.adapters import LoadedModel, load_model
from attnlab.adapters.load import max_length
from attnlab.devices import to_device
from attnlab.evaluation.answers import AnswerFile
from attnlab.evaluation.intervals import mean_interval, wilson
from attnlab.evaluation.judge_grid import Cell, Grid, JudgeConfig, columns_of, make_cells, subjects_of_grid
from attnlab.evaluation.judge_run import COLUMNS, FULL, Unit, Verdict, measure
from attnlab.evaluation.tasks import LAMBADA, LOSS
from attnlab.fields import check_int, expect
from attnlab.models import Transformer
from attnlab.pages.judge import judge_table
from attnlab.pages.notebook import Result
from attnlab.progress import Progress
from attnlab.provenance import command_line, provenance
from attnlab.reading.correlation import bootstrap_interval

__all__ = ["CANNOT", "judge"]

# A full cache that finds fewer answers says nothing about what a smaller one loses.
CANNOT = 0.5
DTYPES = ("float32", "bfloat16", "float16")


def judge(
    model: LoadedModel | str | Path,
    config: JudgeConfig,
    *,
    name: str | None = None,
    answers: Path | str | None = None,
    jobs: int = 1,
    device: str = "cpu",
    dtype: str = "float32",
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Judge cache policies on a causal language model of transformers; the result as JSON.

    ``answers`` is a file that keeps every answer: the same call goes on where another was stopped. ``jobs`` processes
    share the batches; each loads the model, so it is named by a path then. ``device`` and ``dtype`` are for a model
    that is loaded here. ``on_result`` gets the result so far after each task and length.

    >>> result = judge("smollm2", JudgeConfig(("snapkv", "h2o")), answers="a.jsonl")  # doctest: +SKIP
    """
    _check_arguments(model, config, name=name, answers=answers, jobs=jobs, on_result=on_result)
    _check_device(device, dtype)
    source = None if isinstance(model, LoadedModel) else _Source(str(model), device, dtype)
    loaded = model if isinstance(model, LoadedModel) else source.load()  # type: ignore[union-attr]
    _check_model(loaded, config)
    cells = make_cells(config, loaded)
    grid = Grid(loaded, config, cells, None if answers is None else AnswerFile(answers))
    shown = name or (Path(model).name if isinstance(model, (str, Path)) else type(loaded.model).__name__)
    result = _nothing_measured(loaded, shown, config)
    pending = grid.pending()
    # How many answers of policies to batches each task and length still waits for.
    waiting = {cell: sum(len(unit.policies) for unit in units) for cell, units in pending.items()}
    clock = _Clock(result, grid, jobs, waiting=sum(waiting.values()))
    rows = {cell: _rows(grid, cell, config) for cell, count in waiting.items() if not count}
    _put_rows(result, rows, cells, on_result)
    progress = Progress("judging", plain=True)
    progress.expect(sum(waiting.values()))
    try:
        for unit, verdict in _run([unit for units in pending.values() for unit in units], loaded, source, jobs):
            cell = unit.cases[0].task, unit.cases[0].length
            progress.stage(" ".join(map(str, cell)))
            grid.keep(unit, verdict)
            progress.step()
            clock.tick()
            waiting[cell] -= 1
            if waiting[cell]:
                continue
            rows[cell] = _rows(grid, cell, config)
            progress.finished(f"{cell[0]} at {cell[1]} tokens")
            _put_rows(result, rows, cells, on_result)
    finally:
        progress.close()
    return Result(result)


def _check_arguments(model: Any, config: Any, *, name: Any, answers: Any, jobs: Any, on_result: Any) -> None:
    expect("model", model, (str, Path, LoadedModel), "what load_model returns, or what it takes")
    expect("config", config, JudgeConfig, "a JudgeConfig")
    expect("name", name, (str, type(None)), "a string")
    expect("answers", answers, (str, Path, type(None)), "the path of a file")
    check_int("jobs", jobs, least=1)
    if jobs > 1 and isinstance(model, LoadedModel):
        raise ValueError("with several jobs each process loads the model: name it instead of passing it loaded")
    if on_result is not None and not callable(on_result):
        raise ValueError(f"on_result is called with the result so far, got {type(on_result).__name__}")


def _check_device(device: Any, dtype: Any) -> None:
    expect("device", device, str, "a string such as cuda")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


class _Clock:
    """What a call took, in the result: a run that went on after a stop has known some answers before."""

    def __init__(self, result: dict[str, Any], grid: Grid, jobs: int, *, waiting: int) -> None:
        self.began = time.perf_counter()
        # Policies' answers to batches.
        every = sum(len(unit.policies) for cell in grid.cells for unit in grid.units(cell))
        self.took = result["took"] = {"seconds": 0.0, "jobs": jobs, "answers": every, "known_before": every - waiting}

    def tick(self) -> None:
        """Another was measured."""
        self.took["seconds"] = round(time.perf_counter() - self.began, 1)


# For each model, which specs may answer together, as far as this process has seen.
_alike_by_model: weakref.WeakKeyDictionary[Any, dict[str, bool]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Source:
    """Where a process loads the model from."""

    name: str
    device: str
    dtype: str

    def load(self) -> LoadedModel:
        return _loaded(self)


@functools.cache
def _loaded(source: _Source) -> LoadedModel:
    loaded = load_model(source.name, dtype=getattr(torch, source.dtype))
    to_device(source.device, loaded.model)
    return loaded


def _check_model(loaded: LoadedModel, config: JudgeConfig) -> None:
    if loaded.task != "causal" or isinstance(loaded.model, Transformer):
        raise ValueError(
            f"cache policies are judged on a causal language model of transformers, and this is a "
            f"{type(loaded.model).__name__}"
        )
    limit = max_length(loaded.model)
    longest = max(config.settings.lengths)
    if limit is not None and longest > limit:
        raise ValueError(f"{longest} tokens are longer than the model's {limit}; ask for shorter lengths")
    if LAMBADA in config.tasks and config.settings.lambada is None:
        raise ValueError('the task lambada needs its file, JSON lines of {"text": ...}: give it with --lambada')


def _run(
    units: Sequence[Unit], loaded: LoadedModel, source: _Source | None, jobs: int
) -> Iterator[tuple[Unit, Verdict]]:
    """What every batch's policies answer, by this process or by several."""
    if jobs == 1 or len(units) < 2:
        for unit in units:
            for verdict in measure(loaded, unit, _alike(loaded)):
                yield unit, verdict
        return
    try:
        import joblib
    except ImportError as error:
        raise ImportError("several jobs need joblib: pip install joblib") from error
    assert source is not None, "checked before"
    processes = min(jobs, len(units))
    # All batches in one go: processes load the model once, and none waits for the others' task to end.
    parallel = joblib.Parallel(n_jobs=processes, return_as="generator_unordered", pre_dispatch="all")
    done: Iterable[tuple[int, list[Verdict]]] = parallel(
        joblib.delayed(_measure_elsewhere)(source, number, unit, processes) for number, unit in enumerate(units)
    )
    for number, verdicts in done:
        for verdict in verdicts:
            yield units[number], verdict


def _measure_elsewhere(source: _Source, number: int, unit: Unit, processes: int) -> tuple[int, list[Verdict]]:
    loaded = source.load()
    return number, list(measure(loaded, unit, _alike(loaded), processes=processes))


def _alike(loaded: LoadedModel) -> dict[str, bool]:
    return _alike_by_model.setdefault(loaded.model, {})


def _nothing_measured(loaded: LoadedModel, name: str, config: JudgeConfig) -> dict[str, Any]:
    """The result before the first batch: what is judged, how and where."""
    settings = {k: _printable(str(v)) if isinstance(v, Path) else v for k, v in asdict(config.settings).items()}
    used = ("text", "lambada", "lengths", "cases", "seed")
    return {
        "name": "judge",
        "model": {
            "name": _printable(name),
            "parameters": loaded.model.num_parameters(),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
        },
        "config": {
            "policies": list(config.policies),
            "budgets": list(config.budgets),
            "tasks": list(config.tasks),
            "batch": config.batch,
            **{key: list(value) if isinstance(value := settings[key], tuple) else value for key in used},
        },
        "seed": config.settings.seed,
        "rows": [],
        "command": _printable(command_line()),
        **provenance(),
    }


def _printable(text: str) -> str:
    """The name of a file may hold bytes that are no text, and a result is text."""
    return text.encode(errors="backslashreplace").decode()


def _rows(grid: Grid, cell: Cell, config: JudgeConfig) -> list[dict[str, Any]]:
    """The rows of a task and a length: the full cache, then every policy at every budget."""
    subjects = {FULL: (FULL, 1.0), **subjects_of_grid(config)}
    own = {column: grid.scores(cell, column, FULL) for column in columns_of(cell[0])}
    rows = []
    for spec, (policy, budget) in subjects.items():
        row: dict[str, Any] = {"task": cell[0], "length": cell[1], "policy": policy, "budget": budget, "spec": spec}
        for column in COLUMNS:
            row[column] = None if column not in own else _scores(grid.scores(cell, column, spec), own[column], cell[0])
        row |= {
            "bytes": grid.bytes_a_case(cell, spec),
            **{f"{what}_ratio": grid.ratio(cell, spec, what) for what in ("bytes", "prefill", "decode")},
        }
        rows.append(row)
    return rows


def _put_rows(
    result: dict[str, Any],
    rows: Mapping[Cell, list[dict[str, Any]]],
    cells: Iterable[Cell],
    on_result: Callable[[dict[str, Any]], None] | None,
) -> None:
    """The rows of what is complete, in the order of the grid; told where there are some."""
    result["rows"] = [row for cell in cells for row in rows.get(cell, ())]
    result["tables"] = {"scores": judge_table(result)}
    if rows and on_result is not None:
        on_result(result)


def _scores(scores: list[float] | str, full: list[float] | str, task: str) -> dict[str, Any]:
    """A column's score with its interval, and the paired difference from the full cache's on the same cases."""
    if isinstance(scores, str):
        return {"refused": scores}
    assert not isinstance(full, str), "the full cache refuses nothing"
    interval = mean_interval(scores) if task == LOSS else wilson(sum(scores), len(scores))
    over, low, high = bootstrap_interval([a - b for a, b in zip(scores, full, strict=True)])
    return {
        "score": interval.value,
        "low": interval.low,
        "high": interval.high,
        "n": interval.n,
        # Of every case, in their order: two policies are compared by differences on the same case.
        "scores": [int(score) if score in (0, 1) else round(score, 4) for score in scores],
        "over_full": {"value": over, "low": low, "high": high},
        # A share that the full cache itself does not reach.
        "full_cannot": task != LOSS and statistics.fmean(full) < CANNOT,
    }
