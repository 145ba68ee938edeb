"""Claims of Gupta and Berant, Value-aware Approximate Attention (OVA), tested on papers/results/value-aware.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attnlab.pages.numbers import number
from papers.common.cells import Cell, Missing, Result, averages, cell, mean_of, rows_of
from papers.common.claims import (
    HELD,
    NOT_HELD,
    Bounds,
    Claim,
    Predicate,
    Verdict,
    all_of,
    close,
    compared,
    decide,
    everywhere,
    less,
    more,
)
from papers.common.folders import paper_table
from papers.value_aware import PAPER

__all__ = ["CLAIMS"]


EXACT, OVO_1, OVO, OVA_1, OVA = "softmax", "top-r:r=1", "top-r:r=d+1", "value-aware:r=1", "value-aware:r=d+1"
LSH_SMALL, LSH_LARGE, ORF = "lsh:r=64,rounds=4", "lsh:r=512,rounds=16", "orf:features=256"


# Half of the last digit of the paper's numbers, in points and as a share of a perplexity.
ROUNDING, ROUNDING_SHARE = 0.05, 0.002
# What the three kernels differ by at most in the paper, as a share of exp's perplexity.
_EXACT = {r["kernel"]: r["perplexity"] for r in paper_table("value-aware", "table_2") if r["mechanism"] == EXACT}
LITTLE = max(_EXACT.values()) / _EXACT["exp"] - 1 + ROUNDING_SHARE


LONG, SHORT = (cell("figure_3", "mlm_error", model=model) for model in ("long", "short"))


def _error(mechanism: str) -> Cell:
    return cell("table_1", "mlm_error", mechanism=mechanism)


def _perplexity(kernel: str, mechanism: str) -> Cell:
    return cell("table_2", "perplexity", kernel=kernel, mechanism=mechanism)


def _kernels(first: str, second: str) -> Predicate:
    return everywhere("table_2", "kernel", lambda kernel: less(_perplexity(kernel, first), _perplexity(kernel, second)))


def _losses_by_kernel() -> Predicate:
    """How many times the perplexity grows under OVO-(d+1): least for exp, most for the polynomial."""
    cells = {kernel: (_perplexity(kernel, OVO), _perplexity(kernel, "softmax")) for kernel in ("exp", "elu", "poly")}

    def run(result: Result) -> Verdict:
        grows = {kernel: mean_of(result, a) / mean_of(result, b) for kernel, (a, b) in cells.items()}
        ours = ", ".join(f"{kernel} {number(ratio)} times" for kernel, ratio in grows.items())
        # The smaller of the two steps from kernel to kernel.
        return decide(min(grows["elu"] - grows["exp"], grows["poly"] - grows["elu"]), ours, None)

    return Predicate(run, tuple(c for pair in cells.values() for c in pair))


def _slower_by_kernel() -> Predicate:
    """At every r in between, elu and poly have a larger distance to their own exact loss than exp has."""

    def run(result: Result) -> Verdict:
        losses = averages(result, "figure_2", "loss", "kernel", "r")
        lengths = sorted({r for _, r in losses})
        inner = [r for r in lengths[:-1] if all((kernel, r) in losses for kernel in ("exp", "elu", "poly"))]
        if not inner:
            raise Missing("table figure_2 has no r below the length for all three kernels")
        far = {k: [losses[k, r] - losses[k, lengths[-1]] for r in inner] for k in ("exp", "elu", "poly")}
        leads = {r: min(u, p) - e for r, e, u, p in zip(inner, far["exp"], far["elu"], far["poly"], strict=True)}
        slower = [r for r, lead in leads.items() if lead > 0]
        others = ", ".join(f"r = {r} by {number(lead)} nats" for r, lead in leads.items() if lead <= 0)
        reason = f"exp is not ahead at {others}" if others else "exp is nearest to its exact loss at every r"
        state = NOT_HELD if others else HELD
        return Verdict(state, f"at {len(slower)} of {len(inner)} values of r", reason=reason, seeds=1)

    return Predicate(run, (cell("figure_2", "loss"),))


def _example(third: float) -> list[float]:
    """Squared distances of v_i from the output for alpha = .25, .35, .4 and v = diag(1, 2, third)."""
    alpha, size = (0.25, 0.35, 0.4), (1.0, 2.0, third)
    output = [a * s for a, s in zip(alpha, size, strict=True)]
    return [sum(((s if i == j else 0) - output[j]) ** 2 for j in range(3)) for i, s in enumerate(size)]


def _worked_example() -> Predicate:
    def run(_: Result) -> Verdict:
        first, second, third = _example(3.0)
        grows = _example(3e3)[2] > 1e5 * third
        reverse = first < second < third
        ours = f"{first:.2f} and {third:.2f}"
        held = reverse and grows and ours == "2.49 and 3.79"
        return Verdict(HELD if held else NOT_HELD, ours, reason="computed from the text's weights and values")

    return Predicate(run)


def _claim(
    name: str,
    where: str,
    statement: str,
    paper_value: str,
    test: Predicate,
    *,
    results: str = "value-aware",
    headline: str = "",
    caveat: str = "",
) -> Claim:
    return Claim(f"ova-{name}", PAPER, where, statement, paper_value, results, test, headline, caveat)


def _over_tokens(higher: Cell, lower: Cell, margin: float = 0.0) -> Callable[[Result], Bounds | None]:
    """The 95 % interval of a difference of errors over predicted tokens: two proportions, taken as independent.

    Where both are of the same tokens it is wider than it need be.
    """

    def bounds(result: Result) -> Bounds | None:
        rows = [_row(result, wanted) for wanted in (higher, lower)]
        if any("predicted" not in row for row in rows):
            return None
        gap = rows[0]["mlm_error"] - rows[1]["mlm_error"] - margin
        variances = (max(0.0, row["mlm_error"] * (100 - row["mlm_error"])) / row["predicted"] for row in rows)
        half = 1.96 * math.sqrt(sum(variances))
        return gap - half, gap + half

    return bounds


def _worse(first: Cell, second: Cell, *, margin: float = 0.0) -> Predicate:
    """The first error is higher by more than ``margin`` points."""
    return compared(first, second, lambda a, b: a - b - margin, bounds=_over_tokens(first, second, margin))


def _farther(first: Cell, near: Cell, exact: Cell) -> Predicate:
    """The first error is farther from the second than that is from exact attention's."""

    def run(result: Result) -> Verdict:
        rows = [_row(result, wanted) for wanted in (first, near, exact)]
        a, b, c = (row["mlm_error"] for row in rows)
        gap = (a - b) - (b - c)
        bounds = None
        if all("predicted" in row for row in rows):
            # The second error counts twice.
            variances = (
                weight * max(0.0, row["mlm_error"] * (100 - row["mlm_error"])) / row["predicted"]
                for weight, row in zip((1, 4, 1), rows, strict=True)
            )
            half = 1.96 * math.sqrt(sum(variances))
            bounds = gap - half, gap + half
        return decide(gap, f"{number(a)} against {number(b)}, exact {number(c)}", bounds)

    return Predicate(run, (first, near, exact))


def _row(result: Result, wanted: Cell) -> dict[str, Any]:
    rows = rows_of(result, wanted.table)
    found = next((row for row in rows if all(row.get(key) == setting for key, setting in wanted.where)), None)
    if found is None:
        raise Missing(f"table {wanted.table} has no {', '.join(str(setting) for _, setting in wanted.where)}")
    return found


def _window_trails(r: int) -> Predicate:
    # Both are of the same few tokens, so that an interval of independent proportions would be far too wide.
    trails = more(
        cell("figure_1", "mlm_error", family="window", r=r), cell("figure_1", "mlm_error", family="top-r", r=r)
    )

    def run(result: Result) -> Verdict:
        # With as many keys as the text has, the largest weights are exact attention.
        if r >= result.get("config", {}).get("mlm_long", math.inf):
            raise Missing(f"{r} keys are all")
        return trails(result)

    return Predicate(run, trails.cells)


CLAIMS = (
    _claim(
        "worked-example",
        "Section 3",
        "The key with the least attention can be the best single one, and top-1's error is unbounded.",
        "2.49 and 3.79",
        _worked_example(),
        results="",
    ),
    _claim(
        "aware-is-exact",
        "Table 1",
        "Value-aware attention with d+1 keys loses nothing (MLM error).",
        "24.2 against 24.2",
        close(_error(OVA), _error(EXACT), within=ROUNDING),
        caveat="By construction: from d + 1 keys on the output is computed as exact attention is",
    ),
    _claim(
        "oblivious-is-worse",
        "Table 1",
        "The d+1 largest weights, renormalised, are worse than value-aware with as many keys.",
        "43.5 against 24.2",
        _worse(_error(OVO), _error(OVA)),
        headline="the largest weights are worse than as many value-aware keys",
    ),
    _claim(
        "gap-8-points",
        "Section 1, Table 1",
        "Ignoring the values costs 8 to 20 points of MLM error, at r = 1 and at r = d+1.",
        "8.0 and 19.3 points",
        all_of(
            _worse(_error(OVO_1), _error(OVA_1), margin=8 - ROUNDING),
            _worse(_error(OVO), _error(OVA), margin=8 - ROUNDING),
        ),
        headline="the largest weights are worse by 8 points or more",
    ),
    _claim(
        "one-key",
        "Table 1",
        "With a single key, value-aware beats the largest weight.",
        "88.6 against 96.6",
        _worse(_error(OVO_1), _error(OVA_1)),
    ),
    _claim(
        "window-trails",
        "Figure 1",
        "A sliding window of r keys trails the r largest weights (where these are not all keys).",
        "at every r",
        everywhere("figure_1", "r", _window_trails),
        caveat="No interval: both are errors on the same tokens, whose single answers were not kept. Taken as "
        "independent proportions, the difference at the largest r would include zero",
    ),
    _claim(
        "lsh-few-rounds",
        "Table 1",
        "LSH with 64 keys and 4 rounds is far from the top-r it emulates: farther than that is from exact attention.",
        "90.4 against 43.5",
        _farther(_error(LSH_SMALL), _error(OVO), _error(EXACT)),
    ),
    _claim(
        "lsh-many-rounds",
        "Table 1",
        "LSH comes near exact attention only with large chunks and many rounds (nearer than to LSH with few).",
        "26.1 against 24.2",
        _farther(_error(LSH_SMALL), _error(LSH_LARGE), _error(EXACT)),
    ),
    _claim(
        "orf-is-poor",
        "Table 1",
        "Orthogonal random features, 256 of them, are poor: farther from top-r than that is from exact attention.",
        "89.8 against 43.5",
        _farther(_error(ORF), _error(OVO), _error(EXACT)),
    ),
    _claim(
        "kernels-exact",
        "Table 2",
        "Value-aware with d+1 keys is exact for every kernel (perplexity).",
        "30.5, 34.2, 35.3, as exact",
        everywhere(
            "table_2", "kernel", lambda k: close(_perplexity(k, OVA), _perplexity(k, EXACT), relative=ROUNDING_SHARE)
        ),
        caveat="By construction: from d + 1 keys on the output is computed as exact attention is",
    ),
    _claim(
        "kernels-oblivious",
        "Table 2",
        "Top-(d+1) is worse than value-aware for every kernel.",
        "33.5, 310.2, 62.7 against 30.5, 34.2, 35.3",
        _kernels(OVA, OVO),
    ),
    _claim(
        "kernels-one-key",
        "Table 2",
        "With a single key, value-aware beats the largest weight for every kernel.",
        "280, 1005, 837 against 1031, 6700, 1771",
        _kernels(OVA_1, OVO_1),
    ),
    _claim(
        "skewed-kernels-lose-less",
        "Table 2",
        "The less skewed the kernel, the more top-(d+1) loses: exp least, then elu, polynomial most.",
        "exp 1.10, elu 1.78, poly 9.07 times",
        _losses_by_kernel(),
    ),
    _claim(
        "kernels-converge-slower",
        "Figure 2",
        "As r grows, elu and the polynomial approach their exact loss more slowly than exp.",
        "at every r below 512",
        _slower_by_kernel(),
    ),
    _claim(
        "kernels-alike-in-full",
        "Table 2, Figure 2",
        f"With all keys the three kernels differ little (the paper's by {100 * LITTLE:.0f} %).",
        "30.5, 34.2, 35.3",
        all_of(
            *(
                compared(
                    _perplexity(k, EXACT),
                    _perplexity("exp", EXACT),
                    lambda a, b: LITTLE * b - abs(a - b),
                    equal_holds=True,
                )
                for k in ("poly", "elu")
            )
        ),
    ),
    _claim(
        "longer-is-better",
        "Figure 3",
        "A model trained on longer sequences has the lower MLM error.",
        "24.2 against 26.6",
        compared(LONG, SHORT, lambda long, short: short - long, bounds=_over_tokens(SHORT, LONG)),
    ),
)
