"""Claims of Deshpande and Narasimhan, Guiding Attention for Self-Supervised Learning (AG)."""

from __future__ import annotations

from attnlab.pages.numbers import number
from papers.common.claims import (
    HELD,
    NOT_HELD,
    Bounds,
    Cell,
    Claim,
    Predicate,
    Result,
    Verdict,
    at_most,
    cell,
    close,
    compared,
    everywhere,
    less,
    mean_of,
    more,
)
from papers.guidance import PAPER

__all__ = ["CLAIMS"]


def _loss(layers: int, *, guided: bool, column: str = "loss") -> Cell:
    return cell("convergence", column, layers=layers, guided=guided)


def _accuracy(task: str, training: str, *, guided: bool) -> Cell:
    return cell("finetuned", "accuracy", task=task, training=training, guided=guided)


def _drops_when_converged() -> Predicate:
    """The MLM loss starts dropping when the AG loss has converged: within one per cent of training of each other."""
    cells = (cell("ag_loss", "mlm_drop_share"), cell("ag_loss", "ag_converged_share"))

    def run(result: Result, _: Bounds | None) -> Verdict:
        drop, converged = (mean_of(result, c) for c in cells)
        ours = f"MLM loss at {number(100 * drop)} %, AG loss at {number(100 * converged)} % of training"
        return Verdict(HELD if abs(drop - converged) <= 0.01 else NOT_HELD, ours)

    return Predicate(run, cells)


def _claim(name: str, where: str, statement: str, paper_value: str, test: Predicate) -> Claim:
    return Claim(f"ag-{name}", PAPER, where, statement, paper_value, "guidance", test)


def _depth(layers: int) -> Claim:
    return _claim(
        f"{layers}-layers",
        "Main text, sizes of Table 10",
        f"With {layers} layers the guided masked LM ends with the lower loss.",
        "lower",
        less(_loss(layers, guided=True), _loss(layers, guided=False)),
    )


def _finetuned(training: str, paper_value: str, statement: str) -> Claim:
    return _claim(
        f"finetuned-{training}",
        "Table 9",
        statement,
        paper_value,
        everywhere(
            "finetuned",
            "task",
            lambda task: more(_accuracy(task, training, guided=True), _accuracy(task, training, guided=False)),
        ),
    )


CLAIMS = (
    _claim(
        "ag-loss-converges-at-once",
        "Appendix A.3, Figure 5",
        "The guidance loss converges within 0.2 % of pretraining.",
        "0.2 %",
        at_most(cell("ag_loss", "ag_converged_share"), 0.002),
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
    ),
    *(_depth(layers) for layers in (8, 12, 16)),
    _finetuned("short", "86.8 against 86.1 (QNLI), 4 of 4 tasks", "Fine-tuned, the guided model is more accurate."),
    _finetuned("long", "89.0 against 88.7 (QNLI), 4 of 4 tasks", "The lead lasts when both are trained longer."),
    _claim(
        "electra-plateau",
        "Figure 6",
        "ELECTRA's loss stays on a plateau for long; guided, it drops almost at once (half the updates or fewer).",
        "an extended plateau against almost none",
        everywhere(
            "electra",
            "of_steps",
            lambda updates: compared(
                cell("electra", "steps", of_steps=updates, guided=True),
                cell("electra", "steps", of_steps=updates, guided=False),
                lambda guided, plain: plain / 2 - guided,
            ),
        ),
    ),
    _claim(
        "translation-same-loss",
        "Figure 7",
        "In translation the guided model reaches the loss of the plain one (within 2 %).",
        "the same",
        close(cell("translation", "loss", model="AG"), cell("translation", "loss", model="BASE"), relative=0.02),
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
