"""Claims of AG on arms that were trained alone and until their curves are flat: papers/results/guidance-arm.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnlab.pages.numbers import number
from papers.common.cells import Cell, Result, cell, rows_of
from papers.common.claims import Claim, claims_of, everywhere, less, more, unless
from papers.guidance import PAPER
from papers.guidance.one_arm_tables import FLAT

__all__ = ["CLAIMS"]

_claim = claims_of("ag-arm", PAPER)
RESULTS = "guidance-arm"
MODELS = {"post": "12 layers, post-norm as in the paper", "pre": "12 layers, pre-norm"}


def _still_falling(norm: str, language: str = "english") -> Callable[[Result], str | None]:
    """Why the unguided arms cannot decide yet: their curves still fall."""

    def reason(result: Result) -> str | None:
        mine = {"norm": norm, "language": language, "guided": False}
        rows = [r for r in rows_of(result, "convergence") if all(r[name] == value for name, value in mine.items())]
        falls = [row["fell_at_end"] for row in rows if row.get("fell_at_end") is not None]
        if not falls or max(falls) <= FLAT:
            return None
        return f"the unguided loss still falls by {number(max(falls))} nats in the last tenth of its updates"

    return reason


def _of_norm(norm: str, model: str) -> Iterator[Claim]:
    def ends(column: str, *, guided: bool) -> Cell:
        return cell("convergence", column, language="english", norm=norm, guided=guided)

    def accuracy(task: str, *, guided: bool) -> Cell:
        return cell("finetuned", "accuracy", language="english", norm=norm, task=task, guided=guided)

    flat = _still_falling(norm)
    yield _claim(
        f"sooner-{norm}",
        RESULTS,
        "Main text, Figure 5",
        f"The guided model reaches the unguided one's last loss in fewer updates ({model}).",
        "",
        unless(flat, less(ends("steps", guided=True), ends("steps", guided=False))),
    )
    yield _claim(
        f"lower-{norm}",
        RESULTS,
        "Main text",
        f"The guided model ends with the lower loss ({model}).",
        "",
        unless(flat, less(ends("loss", guided=True), ends("loss", guided=False))),
    )
    yield _claim(
        f"finetuned-{norm}",
        RESULTS,
        "Table 9",
        f"The guided model is more accurate when fine-tuned ({model}).",
        "",
        everywhere("finetuned", "task", lambda task: more(accuracy(task, guided=True), accuracy(task, guided=False))),
    )


def _little_text(language: str) -> Claim:
    def loss(*, guided: bool) -> Cell:
        return cell("convergence", "loss", language=language, norm="post", guided=guided)

    return _claim(
        f"lower-{language}",
        RESULTS,
        "Main text, settings of Table 11",
        f"On little text the guided model ends with the lower loss ({language.capitalize()}, {MODELS['post']}).",
        "",
        unless(_still_falling("post", language), less(loss(guided=True), loss(guided=False))),
    )


def _never_left(result: Result) -> str | None:
    """Why ELECTRA's arms cannot tell: an unguided one that stays on its plateau has no end to compare with."""
    plain = [row for row in rows_of(result, "arms") if not row["guided"]]
    stuck = [row for row in plain if row["left_at"] is None]
    if not stuck:
        return None
    return (
        f"{len(stuck)} of {len(plain)} unguided detectors never left the plateau in {number(stuck[0]['steps'])} updates"
    )


ELECTRA = claims_of("ag-electra", PAPER)(
    "sooner",
    "guidance-electra",
    "Figure 6",
    "Guided, ELECTRA's detector leaves its plateau after fewer updates (each arm alone).",
    "",
    unless(
        _never_left,
        less(cell("arms", "left_at", guided=True), cell("arms", "left_at", guided=False)),
        explains_missing=True,
    ),
)

CLAIMS = (
    ELECTRA,
    *(claim for norm, model in MODELS.items() for claim in _of_norm(norm, model)),
    *(_little_text(language) for language in ("oromo", "tagalog")),
)
