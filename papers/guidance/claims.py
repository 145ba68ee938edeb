"""Claims of Deshpande and Narasimhan, Guiding Attention for Self-Supervised Learning (AG)."""

from __future__ import annotations

import math
from statistics import fmean

from attnlab.pages.numbers import number
from papers.common.cells import Cell, Result, cell, mean_of, rows_of, select
from papers.common.claims import (
    Bounds,
    Claim,
    Predicate,
    Verdict,
    at_most,
    close,
    compared,
    decide,
    everywhere,
    less,
    more,
    seed_bounds,
    unless,
)
from papers.guidance import PAPER

__all__ = ["CLAIMS"]


def _loss(layers: int, *, guided: bool, column: str = "loss") -> Cell:
    return cell("convergence", column, layers=layers, guided=guided)


def _accuracy(task: str, training: str, *, guided: bool) -> Cell:
    return cell("finetuned", "accuracy", task=task, training=training, guided=guided)


# Examples of the development sets.
EXAMPLES = {"SST-2": 872, "MRPC": 408, "RTE": 277}


def _more_accurate(task: str, training: str) -> Predicate:
    """The guided model is more accurate; of single runs the interval is over examples, taken as independent."""
    first, second = (_accuracy(task, training, guided=guided) for guided in (True, False))

    def bounds(result: Result) -> Bounds | None:
        by_seed = [select(result, one) for one in (first, second)]
        if task not in EXAMPLES or any(len(values) > 1 for values in by_seed):
            return None
        guided, plain = (fmean(values.values()) for values in by_seed)
        half = 1.96 * math.sqrt(sum(share * (100 - share) for share in (guided, plain)) / EXAMPLES[task])
        return guided - plain - half, guided - plain + half

    return compared(first, second, lambda guided, plain: guided - plain, bounds=bounds)


# The share of pretraining in which the guidance loss converges, and the fewest updates in which a loss can: before that
# the learning rate has hardly begun to warm up.
SOON, FEWEST = 0.002, 10
# "At once": a curve over all of training, such as Figure 5's, is read to about a hundredth of its axis.
AT_ONCE = 0.01
# "The same" loss: seeds of one translator differ by more than this share.
SAME = 0.02


def _too_few_updates(result: Result) -> str | None:
    """Why no run of this length could converge in time."""
    steps = [row["steps"] for row in rows_of(result, "ag_loss") if row.get("steps")]
    if not steps or SOON * max(steps) >= FEWEST:
        return None
    return (
        f"{100 * SOON:.1f} % of {number(max(steps))} updates are {SOON * max(steps):.1f}: no loss converges in fewer "
        f"than {FEWEST}, so that no run of this length could show it"
    )


def _on_the_plateau(result: Result) -> str | None:
    """Why ELECTRA's runs cannot tell: a guided loss that ends no lower than the unguided one has not dropped either."""
    losses: dict[tuple[int, bool], list[float]] = {}
    for row in rows_of(result, "electra"):
        losses.setdefault((row["of_steps"], row["guided"]), []).append(row["loss"])
    ends = {place: fmean(values) for place, values in losses.items()}
    stuck = [n for n, guided in ends if guided and (n, False) in ends and ends[n, True] >= ends[n, False]]
    if not stuck:
        return None
    shown = "; ".join(f"{number(ends[n, True])} against {number(ends[n, False])} after {number(n)}" for n in stuck)
    return f"the guided loss ends no lower than the unguided one ({shown} updates): neither has left its plateau"


def _drops_when_converged() -> Predicate:
    """The MLM loss starts dropping when the AG loss has converged: within one per cent of training of each other."""
    cells = (cell("ag_loss", "mlm_drop_share"), cell("ag_loss", "ag_converged_share"))

    def run(result: Result) -> Verdict:
        drop, converged = (mean_of(result, c) for c in cells)
        by_seed = [select(result, c) for c in cells]
        margins = [AT_ONCE - abs(by_seed[0][seed] - by_seed[1][seed]) for seed in by_seed[0] if seed in by_seed[1]]
        ours = f"MLM loss at {number(100 * drop)} %, AG loss at {number(100 * converged)} % of training"
        gap = AT_ONCE - abs(drop - converged)
        return decide(gap, ours, seed_bounds(margins), seeds=len(margins), equal_holds=True)

    return Predicate(run, cells)


def _claim(name: str, where: str, statement: str, paper_value: str, test: Predicate, *, headline: str = "") -> Claim:
    return Claim(f"ag-{name}", PAPER, where, statement, paper_value, "guidance", test, headline)


def _depth(layers: int) -> Claim:
    return _claim(
        f"{layers}-layers",
        "Main text, sizes of Table 10",
        f"With {layers} layers the guided masked LM ends with the lower loss.",
        "lower",
        less(_loss(layers, guided=True), _loss(layers, guided=False)),
    )


def _finetuned(training: str, paper_value: str, statement: str, *, headline: str = "") -> Claim:
    return _claim(
        f"finetuned-{training}",
        "Table 9",
        statement,
        paper_value,
        everywhere("finetuned", "task", lambda task: _more_accurate(task, training)),
        headline=headline,
    )


CLAIMS = (
    _claim(
        "ag-loss-converges-at-once",
        "Appendix A.3, Figure 5",
        "The guidance loss converges within 0.2 % of pretraining.",
        "0.2 %",
        unless(_too_few_updates, at_most(cell("ag_loss", "ag_converged_share"), SOON)),
    ),
    _claim(
        "mlm-drops-then",
        "Appendix A.3, Figure 5",
        "The MLM loss starts dropping as soon as the guidance loss has converged.",
        "at once",
        _drops_when_converged(),
    ),
    _claim(
        "converges-sooner",
        "Appendix A.3",
        "The guided model needs fewer steps to the unguided model's last loss.",
        "fewer",
        less(_loss(12, guided=True, column="steps"), _loss(12, guided=False, column="steps")),
        headline="sooner to the same loss",
    ),
    *(_depth(layers) for layers in (8, 12, 16)),
    _finetuned(
        "short",
        "86.8 against 86.1 (QNLI), 4 of 4 tasks",
        "Fine-tuned, the guided model is more accurate.",
        headline="more accurate when fine-tuned",
    ),
    _finetuned("long", "89.0 against 88.7 (QNLI), 4 of 4 tasks", "The lead lasts when both are trained longer."),
    _claim(
        "electra-plateau",
        "Figure 6",
        "ELECTRA's loss stays on a plateau for long; guided, it drops almost at once (half the updates or fewer).",
        "an extended plateau against almost none",
        unless(
            _on_the_plateau,
            everywhere(
                "electra",
                "of_steps",
                lambda updates: compared(
                    cell("electra", "steps", of_steps=updates, guided=True),
                    cell("electra", "steps", of_steps=updates, guided=False),
                    # More of the unguided training is saved than needed.
                    lambda guided, plain: plain / 2 - guided,
                ),
            ),
        ),
    ),
    _claim(
        "translation-same-loss",
        "Figure 7",
        "In translation the guided model reaches the loss of the plain one (within 2 %).",
        "the same",
        close(cell("translation", "loss", model="AG"), cell("translation", "loss", model="BASE"), relative=SAME),
    ),
    _claim(
        "gaussian-higher-loss",
        "Figure 7",
        "Hard-coded Gaussian attention ends with a higher loss.",
        "slightly higher",
        more(cell("translation", "loss", model="Gaussian"), cell("translation", "loss", model="BASE")),
    ),
    _claim(
        "low-resource",
        "Main text, settings of Table 11",
        "Guidance helps on little text (Filipino, Oromo).",
        "lower",
        everywhere(
            "low_resource",
            "language",
            lambda language: less(
                cell("low_resource", "loss", language=language, guided=True),
                cell("low_resource", "loss", language=language, guided=False),
            ),
        ),
    ),
)
