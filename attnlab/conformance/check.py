"""Run the conformance laws on one mechanism, also outside of the test suite."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from attnlab.attention import Mechanism
from attnlab.conformance.laws import LAWS, NotApplicableError
from attnlab.registry import mechanism

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

    def __str__(self) -> str:
        return "\n".join([repr(self), *map(str, self.results)])


def check(mech: Mechanism | str, *, laws: Iterable[str] | None = None) -> CheckReport:
    """Whether a mechanism obeys the laws of attention: all of them, or the named ones.

    The mechanism itself is not changed: each law gets a copy. Give one that has no parameters yet, since the laws call
    it with widths of their own.

    >>> check("uniform", laws=["hidden_keys_get_no_weight"])
    <check of Uniform(): 1 passed, 0 failed, 0 exempt, 0 refused>
    """
    names = list(LAWS if laws is None else laws)
    if unknown := [name for name in names if name not in LAWS]:
        raise ValueError(f"no law named {unknown[0]!r}; the laws are {', '.join(LAWS)}")
    mech = mechanism(mech)
    return CheckReport(repr(mech), tuple(_result(mech, name) for name in names))


def _result(mech: Mechanism, law: str) -> LawResult:
    if law in mech.exempt:
        return LawResult(law, "exempt", mech.exempt[law])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            LAWS[law](copy.deepcopy(mech))
        except NotApplicableError as refused:
            return LawResult(law, "refused", str(refused))
        except AssertionError as error:
            return LawResult(law, "failed", str(error))
        # A mechanism under development may raise anything, and the other laws still have something to say.
        except Exception as error:
            return LawResult(law, "failed", f"{type(error).__name__}: {error}")
    return LawResult(law, "passed")
