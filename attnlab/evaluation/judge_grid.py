"""The grid of ``judge``: policies, budgets, tasks and lengths, the cases of each, and all answers so far."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnlab.adapters import LoadedModel
from attnlab.caches.kv_policy import cache_policy
from attnlab.evaluation.answers import AnswerFile, SubjectAnswers, fingerprint
from attnlab.evaluation.judge_cases import JUDGE_TASKS, JudgeCase, Tokens, has_question, judge_cases
from attnlab.evaluation.judge_run import COLUMNS, FULL, UNSEEN, Unit, Verdict
from attnlab.evaluation.tasks import LOSS, TaskSettings
from attnlab.fields import check_fields, check_int, expect
from attnlab.registry import FILE_SPEC

__all__ = ["DEFAULT_TASKS", "Cell", "Grid", "JudgeConfig", "columns_of", "make_cells", "policy_at", "subjects_of_grid"]

DEFAULT_TASKS = ("needle", "variables", "common-words", LOSS)
CASES = TaskSettings(passages=None, lengths=(1024,))
MOST_CASES = 10_000
# More keys than any context has: a budget of 1 would be one key.
ALL_KEYS = 1 << 30
# A task at a length.
Cell = tuple[str, int]


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


def make_cells(config: JudgeConfig, loaded: LoadedModel) -> dict[Cell, list[JudgeCase]]:
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


def columns_of(task: str) -> tuple[str, ...]:
    """Whether a task's question is unseen before compression, or also seen."""
    return COLUMNS if has_question(task) else (UNSEEN,)


def subjects_of_grid(config: JudgeConfig) -> dict[str, tuple[str, float]]:
    """{spec: (policy, budget)}; the same number of keys stands together, so that caches of one shape do."""
    return {policy_at(policy, budget): (policy, budget) for budget in config.budgets for policy in config.policies}


class Grid:
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
        specs = (FULL, *subjects_of_grid(self.config))
        first = cell[0] == self.config.tasks[0]
        return [
            Unit(tuple(cases[at : at + size]), column, specs, timed=first and at == 0 and column == UNSEEN)
            for column in columns_of(cell[0])
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
