"""Run the conformance laws on one mechanism, also outside of the test suite."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from attnlab.attention import Mechanism
from attnlab.conformance.judging import Law, NotApplicableError
from attnlab.conformance.laws import LAWS
from attnlab.conformance.number_laws import random_calls_keep_their_numbers
from attnlab.registry import mechanism
from attnlab.summaries import notebook_view

__all__ = ["CheckReport", "LawResult", "check"]

Outcome = Literal["passed", "failed", "exempt", "refused"]


@dataclass(frozen=True)
class LawResult:
    """How one law came out; ``reason`` says why it failed, is exempt, or refuses every call of the law."""

    law: str
    outcome: Outcome
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.outcome:<8}{self.law}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, repr=False)
class CheckReport:
    """The result of every law for one mechanism. ``print(report)`` lists all laws; its repr counts them."""

    mechanism: str
    results: tuple[LawResult, ...]

    @property
    def ok(self) -> bool:
        """Whether no law failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[LawResult, ...]:
        """The laws that do not hold."""
        return tuple(result for result in self.results if result.outcome == "failed")

    def raise_if_failed(self) -> None:
        """Raise an AssertionError that names every law that failed, and why."""
        if self.failed:
            raise AssertionError("\n".join([f"{self.mechanism} breaks laws of attention:", *map(str, self.failed)]))

    def __repr__(self) -> str:
        outcomes = [result.outcome for result in self.results]
        counts = [f"{outcomes.count(each)} {each}" for each in ("passed", "failed", "exempt", "refused")]
        names = ", ".join(result.law for result in self.failed)
        return f"<check of {self.mechanism}: {', '.join(counts)}{': ' + names if names else ''}>"

    def _repr_html_(self) -> str:
        rows = [{"law": result.law, "outcome": result.outcome, "reason": result.reason} for result in self.results]
        return notebook_view(repr(self).strip("<>"), rows)

    def __str__(self) -> str:
        return "\n".join([repr(self), *map(str, self.results)])


def check(mech: Mechanism | str, *, laws: Iterable[str] | None = None, random_calls: int = 30) -> CheckReport:
    """Whether a mechanism obeys the laws of attention: all of them, or the named ones.

    One of the laws is about ``random_calls`` seeded calls of every shape, mask and dtype; thousands find what is rare.
    The mechanism itself is not changed: each law gets a copy. Give one that has no parameters yet, since the laws call
    it with widths of their own.

    >>> check("uniform", laws=["hidden_keys_get_no_weight"])
    <check of Uniform(): 1 passed, 0 failed, 0 exempt, 0 refused>
    """
    names = _law_names(laws)
    if isinstance(random_calls, bool) or not isinstance(random_calls, int) or random_calls < 1:
        raise ValueError(f"random_calls must be an int of at least 1, got {random_calls!r}")
    mech = mechanism(mech)
    drawn = functools.partial(random_calls_keep_their_numbers, count=random_calls)
    asked = LAWS | {random_calls_keep_their_numbers.__name__: drawn}
    return CheckReport(repr(mech), tuple(_result(mech, name, asked[name]) for name in names))


def _law_names(laws: Iterable[str] | None) -> list[str]:
    if isinstance(laws, str):
        raise ValueError(f"laws is a list of names, got the string {laws!r}; write laws=[{laws!r}]")
    if laws is not None and not isinstance(laws, Iterable):
        raise ValueError(f"laws is a list of names, got {type(laws).__name__}; None means all")
    names = list(LAWS if laws is None else laws)
    if unknown := [name for name in names if name not in LAWS]:
        raise ValueError(f"no law named {unknown[0]!r}; the laws are {', '.join(LAWS)}")
    return names


def _result(mech: Mechanism, name: str, law: Law) -> LawResult:
    if name in mech.exempt:
        return LawResult(name, "exempt", mech.exempt[name])
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # A law may take long; nothing is wrong with that.
        warnings.filterwarnings("ignore", "value-aware.* searches for the best")
        torch.manual_seed(0)
        try:
            law(copy.deepcopy(mech))
        except NotApplicableError as refused:
            return LawResult(name, "refused", str(refused))
        except AssertionError as error:
            return LawResult(name, "failed", str(error))
        # A mechanism under development may raise anything, and the other laws still have something to say.
        except Exception as error:
            return LawResult(name, "failed", f"{type(error).__name__}: {error}")
    return LawResult(name, "passed")
