"""Cache policies judged on the same cases: a grid of tasks, lengths, policies and budgets beside the full cache.

The protocol is docs/judge.md. Scores have intervals, differences from the full cache paired ones; bytes, reading and
decoding times are ratios to the full cache's in the same run.
"""

from __future__ import annotations

import functools
import statistics
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnlab.adapters import LoadedModel, load_model
from attnlab.adapters.load import max_length
from attnlab.caches.kv_policy import cache_policy
from attnlab.devices import to_device
from attnlab.evaluation.answers import AnswerFile, SubjectAnswers, fingerprint
from attnlab.evaluation.intervals import mean_interval, wilson
from attnlab.evaluation.judge_cases import JUDGE_TASKS, JudgeCase, Tokens, has_question, judge_cases
from attnlab.evaluation.judge_run import COLUMNS, FULL, UNSEEN, Unit, Verdict, measure
from attnlab.evaluation.tasks import LAMBADA, LOSS, TaskSettings
from attnlab.fields import check_fields, check_int, expect
from attnlab.models import Transformer
from attnlab.pages.judge import judge_table
from attnlab.progress import Progress
from attnlab.provenance import command_line, provenance
from attnlab.reading.correlation import bootstrap_interval
from attnlab.registry import FILE_SPEC

__all__ = ["CANNOT", "DEFAULT_TASKS", "JudgeConfig", "judge", "policy_at"]

DEFAULT_TASKS = ("needle", "variables", "common-words", LOSS)
CASES = TaskSettings(passages=None, lengths=(1024,))
# A full cache that finds fewer answers says nothing about what a smaller one loses.
CANNOT = 0.5
DTYPES = ("float32", "bfloat16", "float16")
MOST_CASES = 10_000
# More keys than any context has: a budget of 1 would be one key.
ALL_KEYS = 1 << 30


@dataclass(frozen=True)
class JudgeConfig:
    """The grid: policies without their budgets, budgets as shares of the context, tasks, and what cases are made from.

    ``settings`` has the lengths, the number of cases and their seed, the text that fills contexts, and LAMBADA's file.
    ``batch`` is how many cases are read at once.
    """

    policies: tuple[str, ...]
    budgets: tuple[float, ...] = (0.5, 0.25)
    tasks: tuple[str, ...] = DEFAULT_TASKS
    settings: TaskSettings = CASES
    batch: int = 8

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("batch", self.batch, least=1)
        expect("settings", self.settings, TaskSettings, "a TaskSettings")
        for name in ("policies", "budgets", "tasks"):
            values = getattr(self, name)
            expect(name, values, tuple, "a tuple")
            if not values:
                raise ValueError(f"{name}: at least one is needed")
            twice = {value for value in values if values.count(value) > 1}
            if twice:
                raise ValueError(f"{name}: {min(twice)!r} is there twice")
        if self.settings.cases > MOST_CASES:
            raise ValueError(f"at most {MOST_CASES:,} cases of a task and length are made, got {self.settings.cases}")
        for budget in self.budgets:
            if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget <= 1:
                raise ValueError(f"a budget is a share of the context's keys, above 0 and at most 1, got {budget}")
        for task in self.tasks:
            if task not in JUDGE_TASKS:
                raise ValueError(f"there is no task named {task!r} here; there are {', '.join(JUDGE_TASKS)}")
        for policy in self.policies:
            for budget in self.budgets:
                policy_at(policy, budget)


def policy_at(policy: str, budget: float) -> str:
    """A policy's spec with a budget, cut once after the context unless it says ``when=step`` itself.

    >>> policy_at("snapkv:window=16", 0.25), policy_at("h2o", 0.5)
    ('snapkv:window=16,budget=0.25,when=prefill', 'h2o:budget=0.5,when=prefill')
    """
    if not isinstance(policy, str):
        raise ValueError(f"a policy is a spec string such as snapkv:window=16, got {type(policy).__name__}")
    in_file = FILE_SPEC.fullmatch(policy)
    settings = (in_file["settings"] or "") if in_file else policy.partition(":")[2] or policy
    names = {part.partition("=")[0].strip() for part in settings.split(",") if "=" in part}
    if "budget" in names:
        raise ValueError(f"{policy!r}: budgets are those of the whole grid; leave budget= out of a policy")
    more = f"budget={ALL_KEYS if budget == 1 else f'{budget:g}'}" + ("" if "when" in names else ",when=prefill")
    made = f"{policy}{',' if names else ':'}{more}"
    cache_policy(made)
    return made


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
    expect("device", device, str, "a string such as cuda")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = None if isinstance(model, LoadedModel) else _Source(str(model), device, dtype)
    loaded = model if isinstance(model, LoadedModel) else source.load()  # type: ignore[union-attr]
    _check_model(loaded, config)
    cells = _cells(config, loaded)
    grid = _Grid(loaded, config, cells, None if answers is None else AnswerFile(answers))
    shown = name or (Path(model).name if isinstance(model, (str, Path)) else type(loaded.model).__name__)
    result = _nothing_measured(loaded, shown, config)
    progress = Progress("judging", plain=True)
    progress.expect(sum(len(unit.policies) for units in grid.pending().values() for unit in units))
    try:
        for cell, units in grid.pending().items():
            progress.stage(" ".join(map(str, cell)))
            for unit, verdict in _run(units, loaded, source, jobs):
                grid.keep(unit, verdict)
                progress.step()
            _put_rows(result, grid, cell, config)
            progress.finished(f"{cell[0]} at {cell[1]} tokens")
            if on_result is not None:
                on_result(result)
    finally:
        progress.close()
    return result


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


# A task at a length.
Cell = tuple[str, int]

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


def _cells(config: JudgeConfig, loaded: LoadedModel) -> dict[Cell, list[JudgeCase]]:
    """The cases of each task and length; all are made before anything is measured."""
    tokens = Tokens(loaded.tokenizer, config.settings)
    cells = {}
    for length in config.settings.lengths:
        for task in config.tasks:
            try:
                cells[task, length] = judge_cases(task, length, config.settings, tokens)
            except ValueError as error:
                raise ValueError(f"{task} at {length} tokens: {error}") from None
    return cells


def _columns(task: str) -> tuple[str, ...]:
    return COLUMNS if has_question(task) else (UNSEEN,)


def _subjects(config: JudgeConfig) -> dict[str, tuple[str, float]]:
    """{spec: (policy, budget)}; the same number of keys stands together, so that caches of one shape do."""
    return {policy_at(policy, budget): (policy, budget) for budget in config.budgets for policy in config.policies}


class _Grid:
    """All answers so far, from the file and from this run."""

    def __init__(
        self, loaded: LoadedModel, config: JudgeConfig, cells: Mapping[Cell, list[JudgeCase]], file: AnswerFile | None
    ) -> None:
        self.config, self.cells = config, cells
        self.kept = None if file is None else file.of(f"judge {fingerprint(loaded.model)}")
        self.answers: dict[tuple[str, str, str], dict[str, Any]] = {}
        # By task, length and policy: what its caches cost, one for each batch.
        self.costs: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
        for cell in cells:
            for unit in self.units(cell):
                self._take_known(unit)

    def units(self, cell: Cell) -> list[Unit]:
        """The batches of a task and a length, whole."""
        cases, size = self.cells[cell], self.config.batch
        specs = (FULL, *_subjects(self.config))
        first = cell[0] == self.config.tasks[0]
        return [
            Unit(tuple(cases[at : at + size]), column, specs, timed=first and at == 0 and column == UNSEEN)
            for column in _columns(cell[0])
            for at in range(0, len(cases), size)
        ]

    def pending(self) -> dict[Cell, list[Unit]]:
        """The batches with the policies whose answers are not known."""
        return {
            cell: [
                replace(unit, policies=left)
                for unit in self.units(cell)
                if (left := tuple(spec for spec in unit.policies if not self._is_known(unit, spec)))
            ]
            for cell in self.cells
        }

    def keep(self, unit: Unit, verdict: Verdict) -> None:
        """Keep a policy's answers to a batch, here and in the file."""
        refused = None if verdict.refused is None else {"refused": verdict.refused}
        cost = {**verdict.cost, "cases": len(unit.cases)} if refused is None else refused
        for i, case in enumerate(unit.cases):
            request = [case.digest, unit.column, verdict.policy]
            answer = self._keep_one("answer", request, refused or verdict.answers[i])
            self.answers[case.digest, unit.column, verdict.policy] = answer
        # Last: a batch whose cost is known is complete.
        self._note_cost(unit, verdict.policy, self._keep_one("cost", [_name(unit), verdict.policy], cost))

    def _keep_one(self, kind: str, request: list[str], answer: dict[str, Any]) -> dict[str, Any]:
        """Keep an answer, and return it; where a run was killed inside a batch, the file has some already."""
        if self.kept is None:
            return answer
        self.kept.add_partial(kind, request, answer)
        return self.kept.get(kind, request)

    def _take_known(self, unit: Unit) -> None:
        kept: SubjectAnswers | None = self.kept
        if kept is None:
            return
        for spec in unit.policies:
            cost = kept.get("cost", [_name(unit), spec])
            rows = [kept.get("answer", [case.digest, unit.column, spec]) for case in unit.cases]
            if cost is not None and all(row is not None for row in rows):
                self._note_cost(unit, spec, cost)
                for case, row in zip(unit.cases, rows, strict=True):
                    self.answers[case.digest, unit.column, spec] = row

    def _note_cost(self, unit: Unit, spec: str, cost: dict[str, Any]) -> None:
        case = unit.cases[0]
        self.costs.setdefault((case.task, case.length, spec), {})[_name(unit)] = cost

    def _is_known(self, unit: Unit, spec: str) -> bool:
        case = unit.cases[0]
        return _name(unit) in self.costs.get((case.task, case.length, spec), {})

    def scores(self, cell: Cell, column: str, spec: str) -> list[float] | str:
        """The score of each case, or why the policy refused one."""
        rows = [self.answers[case.digest, column, spec] for case in self.cells[cell]]
        refused = next((row["refused"] for row in rows if "refused" in row), None)
        return [row["score"] for row in rows] if refused is None else refused

    def ratio(self, cell: Cell, spec: str, what: str) -> float | None:
        """The median over batches of a policy's cost over the full cache's, which its own record of the batch has."""
        costs = self.costs.get((*cell, spec), {}).values()
        pairs = [(cost.get(what), cost.get(f"full_{what}")) for cost in costs]
        ratios = [own / full for own, full in pairs if own is not None and full]
        return statistics.median(ratios) if ratios else None

    def bytes_a_case(self, cell: Cell, spec: str) -> float | None:
        """Bytes that a case's cache holds after compression with the question unseen."""
        known = [
            cost["bytes"] / cost["cases"]
            for unit, cost in self.costs.get((*cell, spec), {}).items()
            if unit.startswith(UNSEEN) and "bytes" in cost
        ]
        return statistics.fmean(known) if known else None


def _name(unit: Unit) -> str:
    """A batch's name, which changes with its cases."""
    return f"{unit.column} {unit.cases[0].digest} {unit.cases[-1].digest} {len(unit.cases)}"


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
    parallel = joblib.Parallel(n_jobs=min(jobs, len(units)), return_as="generator_unordered")
    done: Iterable[tuple[int, list[Verdict]]] = parallel(
        joblib.delayed(_measure_elsewhere)(source, number, unit) for number, unit in enumerate(units)
    )
    for number, verdicts in done:
        for verdict in verdicts:
            yield units[number], verdict


def _measure_elsewhere(source: _Source, number: int, unit: Unit) -> tuple[int, list[Verdict]]:
    loaded = source.load()
    return number, list(measure(loaded, unit, _alike(loaded)))


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


def _put_rows(result: dict[str, Any], grid: _Grid, cell: Cell, config: JudgeConfig) -> None:
    """The rows of a task and a length: the full cache, then every policy at every budget."""
    subjects = {FULL: (FULL, 1.0), **_subjects(config)}
    own = {column: grid.scores(cell, column, FULL) for column in _columns(cell[0])}
    for spec, (policy, budget) in subjects.items():
        row: dict[str, Any] = {"task": cell[0], "length": cell[1], "policy": policy, "budget": budget, "spec": spec}
        for column in COLUMNS:
            row[column] = None if column not in own else _scores(grid.scores(cell, column, spec), own[column], cell[0])
        row |= {
            "bytes": grid.bytes_a_case(cell, spec),
            **{f"{what}_ratio": grid.ratio(cell, spec, what) for what in ("bytes", "prefill", "decode")},
        }
        result["rows"].append(row)
    result["tables"] = {"scores": judge_table(result)}


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
        "over_full": {"value": over, "low": low, "high": high},
        # A share that the full cache itself does not reach.
        "full_cannot": task != LOSS and statistics.fmean(full) < CANNOT,
    }
