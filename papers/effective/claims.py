"""Claims of Sun and Marasovic, Effective Attention Sheds Light On Interpretability."""

from __future__ import annotations

from collections.abc import Callable

from attnlab.pages.numbers import number
from papers.common.cells import Cell, Missing, Result, averages, cell, mean_of
from papers.common.claims import (
    Claim,
    Predicate,
    Verdict,
    all_of,
    at_least,
    at_most,
    close,
    decide,
    everywhere,
    less,
    more,
)
from papers.effective import PAPER

__all__ = ["CLAIMS"]


def _pattern(task: str, attention: str, pattern: str) -> Cell:
    return cell("table_2", pattern, task=task, attention=attention)


def _weight(task: str, attention: str, token: str, table: str = "token_types") -> Cell:
    return cell(table, "weight", task=task, attention=attention, token=token)


def _patterns(pattern: str, form: Callable[[Cell, Cell], Predicate], *, share: float = 1.0) -> Predicate:
    """Effective against standard attention in every task, or in a share of them."""
    return everywhere(
        "table_2",
        "task",
        lambda task: form(_pattern(task, "effective", pattern), _pattern(task, "standard", pattern)),
        share=share,
    )


def _shrinks(token: str, *, table: str = "token_types", share: float) -> Predicate:
    return everywhere(
        table,
        "task",
        lambda task: less(_weight(task, "effective", token, table), _weight(task, "standard", token, table)),
        share=share,
    )


def _steadier(table: str) -> Predicate:
    """In every task [CLS] keeps a larger share of its weight than [SEP] does."""

    def one(task: str) -> Predicate:
        cells = [_weight(task, kind, token, table) for token in ("cls", "sep") for kind in ("effective", "standard")]

        def run(result: Result) -> Verdict:
            ours, whole, sep, sep_whole = (mean_of(result, c) for c in cells)
            kept, sep_kept = ours / whole, sep / sep_whole
            return decide(kept - sep_kept, f"{number(kept)} against {number(sep_kept)}", None)

        return Predicate(run, tuple(cells))

    return everywhere(table, "task", one)


def _last_two_layers(attention: str) -> Predicate:
    """In most tasks the two layers whose maps changed most (least similar) are the last two."""

    def one(task: str) -> Predicate:
        cells = (cell("finetuning", "similarity", attention=attention, task=task),)

        def run(result: Result) -> Verdict:
            every = averages(result, "finetuning", "similarity", "attention", "task", "layer")
            similarity = {layer: s for (kind, t, layer), s in every.items() if (kind, t) == (attention, task)}
            if not similarity:
                raise Missing(f"table finetuning has no {attention} attention of {task}")
            *rest, before, last = sorted(similarity)
            gap = min((similarity[layer] for layer in rest), default=1.0) - max(similarity[before], similarity[last])
            most = sorted(similarity, key=similarity.__getitem__)[:2]
            return decide(gap, f"{attention}: layers {' and '.join(map(str, sorted(most)))}", None)

        return Predicate(run, cells)

    return everywhere("finetuning", "task", one, share=0.6)


def _linguistic() -> Predicate:
    """In most tasks nouns, pronouns and verbs together take a larger share of what six token types get."""
    words, rest = ("noun", "pronoun", "verb"), ("sep", "cls", "punctuation")

    def one(task: str) -> Predicate:
        cells = {k: [_weight(task, k, token) for token in (*words, *rest)] for k in ("effective", "standard")}

        def run(result: Result) -> Verdict:
            shares = {}
            for kind, wanted in cells.items():
                values = [abs(mean_of(result, c)) for c in wanted]
                shares[kind] = sum(values[:3]) / sum(values)
            ours = f"{number(shares['effective'])} against {number(shares['standard'])}"
            return decide(shares["effective"] - shares["standard"], ours, None)

        return Predicate(run, tuple(c for wanted in cells.values() for c in wanted))

    return everywhere("token_types", "task", one, share=0.6)


# Of the claims of Table 2.
BY_CLASSIFIER = "The patterns are those of a classifier that learned from maps which a language model labelled"


def _claim(name: str, where: str, statement: str, paper_value: str, test: Predicate, *, headline: str = "") -> Claim:
    caveat = BY_CLASSIFIER if where == "Table 2" else ""
    return Claim(f"effective-{name}", PAPER, where, statement, paper_value, "effective", test, headline, caveat)


CLAIMS = (
    _claim(
        "identity",
        "Equation 1",
        "Effective attention gives the same output as standard attention.",
        "exact",
        everywhere("identity", "text", lambda text: at_most(cell("identity", "residual", text=text), 1e-5)),
    ),
    _claim(
        "other-distributions",
        "Appendix A",
        "Other distributions over the keys give the same output.",
        "infinitely many",
        everywhere(
            "alternative",
            "text",
            lambda text: all_of(
                at_most(cell("alternative", "residual", text=text), 1e-5),
                at_least(cell("alternative", "distance", text=text), 1e-3),
            ),
        ),
    ),
    _claim(
        "short-inputs",
        "Section 2, Appendix A",
        "With no more keys than the values have dimensions the two cannot differ.",
        "no nullspace if n <= d",
        everywhere("short_inputs", "length", lambda n: at_most(cell("short_inputs", "difference", length=n), 1e-4)),
    ),
    _claim(
        "vertical-drops",
        "Table 2",
        "Vertical patterns are fewer in effective attention.",
        "27.9 to 11.5 % (RTE), in 5 of 5 tasks",
        _patterns("vertical", less),
        headline="fewer vertical patterns",
    ),
    _claim(
        "vertical-diagonal-drops",
        "Table 2",
        "Vertical + diagonal patterns are fewer in effective attention.",
        "15.2 to 2.8 % (RTE), in 4 of 5 tasks",
        _patterns("vertical_diagonal", less, share=0.75),
    ),
    _claim(
        "block-rises",
        "Table 2",
        "Block patterns are more in effective attention.",
        "4.5 to 32.6 % (RTE), in 4 of 5 tasks",
        _patterns("block", more, share=0.75),
        headline="more block patterns",
    ),
    _claim(
        "diagonal-rises",
        "Table 2",
        "Diagonal patterns are more in effective attention.",
        "7.4 to 12.8 % (RTE), in 5 of 5 tasks",
        _patterns("diagonal", more),
    ),
    _claim(
        "heterogeneous-stays",
        "Table 2",
        "The share of heterogeneous patterns does not change notably (5 points).",
        "45.1 to 40.3 % (RTE), in 4 of 5 tasks",
        _patterns("heterogeneous", lambda a, b: close(a, b, within=5.0), share=0.75),
    ),
    _claim(
        "sep-loses",
        "Figure 1",
        "[SEP] loses weight when [CLS] is processed in the last layer.",
        "in 4 of 5 tasks",
        _shrinks("sep", share=0.75),
        headline="[SEP] loses weight",
    ),
    _claim(
        "punctuation-loses",
        "Figure 1",
        "Punctuation loses weight when [CLS] is processed in the last layer.",
        "in 4 of 5 tasks",
        _shrinks("punctuation", share=0.75),
    ),
    _claim(
        "cls-stays", "Figure 1", "[CLS] keeps its weight, unlike [SEP].", "in 5 of 5 tasks", _steadier("token_types")
    ),
    _claim(
        "words-gain",
        "Figure 1",
        "The weight moves to nouns, pronouns and verbs.",
        "in 4 of 5 tasks",
        _linguistic(),
        headline="the weight moves to words",
    ),
    _claim(
        "cls-stays-everywhere",
        "Figures 5, 6",
        "Other tokens attend to [CLS] as before and to [SEP] less.",
        "in 5 of 5 tasks",
        all_of(_steadier("to_token"), _shrinks("sep", table="to_token", share=0.75)),
    ),
    _claim(
        "last-layers-change",
        "Figure 3",
        "Fine-tuning changes the last two layers most, in standard and effective attention alike.",
        "in 5 of 5 tasks",
        all_of(_last_two_layers("standard"), _last_two_layers("effective")),
    ),
    _claim(
        "costs-twice",
        "Table 3",
        "Evaluation with effective attention by a full SVD takes about twice the time.",
        "2.0 times",
        all_of(
            at_least(cell("timing", "ratio", way="full-svd"), 1.5),
            at_most(cell("timing", "ratio", way="full-svd"), 3.0),
        ),
    ),
)
