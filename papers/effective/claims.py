"""Claims of Sun and Marasovic, Effective Attention Sheds Light On Interpretability."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from attnlab.pages.numbers import number
from papers.common.cells import Cell, Missing, Result, averages, cell, mean_of
from papers.common.claims import (
    Claim,
    Predicate,
    Verdict,
    about,
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
from papers.effective.config import PRETRAINED

__all__ = ["CLAIMS"]

# In as many tasks as in the paper, 4 of 5, where it is not all.
AS_MANY = 0.8
# Points; what changes by less the paper calls not notable: 4.8 at most in four tasks, and 11 in the fifth.
NOTABLE = 5.0
# Relative to the output's norm; of float32, with the sums of a head's keys.
EXACT = 1e-5
WORDS, NO_WORDS = ("noun", "pronoun", "verb"), ("sep", "cls", "punctuation")


@dataclass(frozen=True)
class Maps:
    """Which maps a claim is judged on: a results file, the end of its tables' names, and a computation of them."""

    results: str = "effective"
    suffix: str = ""
    # "effective" is exact; "authors" is the computation of the paper's code, with padding inside V.
    attention: str = "effective"

    def pattern(self, task: str, pattern: str, *, standard: bool = False) -> Cell:
        """The share of maps with a pattern."""
        return cell(f"table_2{self.suffix}", pattern, task=task, attention=self._named(standard))

    def weight(self, task: str, token: str, table: str = "token_types", *, standard: bool = False) -> Cell:
        """The weight that a type of token gets."""
        return cell(f"{table}{self.suffix}", "weight", task=task, attention=self._named(standard), token=token)

    def _named(self, standard: bool) -> str:
        return "standard" if standard else self.attention

    def identity(self) -> Predicate:
        """The output is that of standard attention, in every task."""
        column = "residual" if self.attention == "effective" else "authors_residual"
        return everywhere("identity", "text", lambda text: at_most(cell("identity", column, text=text), EXACT))

    def patterns(self, pattern: str, form: Callable[[Cell, Cell], Predicate], *, share: float = 1.0) -> Predicate:
        """Effective against standard attention in every task, or in a share of them."""
        return everywhere(
            f"table_2{self.suffix}",
            "task",
            lambda task: form(self.pattern(task, pattern), self.pattern(task, pattern, standard=True)),
            share=share,
        )

    def shrinks(self, token: str, *, table: str = "token_types", share: float) -> Predicate:
        """A type of token gets less weight in a share of the tasks."""
        return everywhere(
            f"{table}{self.suffix}",
            "task",
            lambda task: less(self.weight(task, token, table), self.weight(task, token, table, standard=True)),
            share=share,
        )

    def steadier(self, table: str) -> Predicate:
        """In every task [CLS] keeps a larger share of its weight than [SEP] does."""

        def one(task: str) -> Predicate:
            cells = [
                self.weight(task, t, table, standard=standard) for t in ("cls", "sep") for standard in (False, True)
            ]

            def run(result: Result) -> Verdict:
                ours, whole, sep, sep_whole = (mean_of(result, c) for c in cells)
                kept, sep_kept = ours / whole, sep / sep_whole
                return decide(kept - sep_kept, f"{number(kept)} against {number(sep_kept)}", None)

            return Predicate(run, tuple(cells))

        return everywhere(f"{table}{self.suffix}", "task", one)

    def words_gain(self) -> Predicate:
        """Nouns, pronouns and verbs together take a larger share of what six token types get."""

        def one(task: str) -> Predicate:
            cells = {s: [self.weight(task, t, standard=s) for t in (*WORDS, *NO_WORDS)] for s in (False, True)}

            def run(result: Result) -> Verdict:
                shares = {}
                for standard, wanted in cells.items():
                    values = [abs(mean_of(result, c)) for c in wanted]
                    shares[standard] = sum(values[: len(WORDS)]) / sum(values)
                return decide(
                    shares[False] - shares[True], f"{number(shares[False])} against {number(shares[True])}", None
                )

            return Predicate(run, tuple(c for wanted in cells.values() for c in wanted))

        return everywhere(f"token_types{self.suffix}", "task", one, share=AS_MANY)


def _last_two_layers(attention: str) -> Predicate:
    """In every task the two layers whose maps changed most (least similar) are the last two."""

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

    return everywhere("finetuning", "task", one)


# Of the claims of Table 2.
BY_CLASSIFIER = "The patterns are those of a classifier that learned from maps which a language model labelled"


def _claim(name: str, where: str, statement: str, paper_value: str, test: Predicate, *, headline: str = "") -> Claim:
    caveat = BY_CLASSIFIER if where == "Table 2" else ""
    return Claim(f"effective-{name}", PAPER, where, statement, paper_value, "effective", test, headline, caveat)


def _on_maps(maps: Maps) -> Iterator[Claim]:
    """The claims on what effective attention looks like, judged on these maps."""
    for claim in (*_on_patterns(maps), *_on_tokens(maps)):
        yield replace(claim, results=maps.results)


def _on_patterns(maps: Maps) -> Iterator[Claim]:
    yield _claim(
        "vertical-drops",
        "Table 2",
        "Vertical patterns are fewer in effective attention.",
        "27.9 to 11.5 % (RTE), in 5 of 5 tasks",
        maps.patterns("vertical", less),
        headline="fewer vertical patterns",
    )
    yield _claim(
        "vertical-diagonal-drops",
        "Table 2",
        "Vertical + diagonal patterns are fewer in effective attention.",
        "15.2 to 2.8 % (RTE), in 4 of 5 tasks",
        maps.patterns("vertical_diagonal", less, share=AS_MANY),
    )
    yield _claim(
        "block-rises",
        "Table 2",
        "Block patterns are more in effective attention.",
        "4.5 to 32.6 % (RTE), in 4 of 5 tasks",
        maps.patterns("block", more, share=AS_MANY),
        headline="more block patterns",
    )
    yield _claim(
        "diagonal-rises",
        "Table 2",
        "Diagonal patterns are more in effective attention.",
        "7.4 to 12.8 % (RTE), in 5 of 5 tasks",
        maps.patterns("diagonal", more),
    )
    yield _claim(
        "heterogeneous-stays",
        "Table 2",
        "The share of heterogeneous patterns does not change notably (5 points).",
        "45.1 to 40.3 % (RTE), in 4 of 5 tasks",
        maps.patterns("heterogeneous", lambda a, b: close(a, b, within=NOTABLE), share=AS_MANY),
    )


def _on_tokens(maps: Maps) -> Iterator[Claim]:
    yield _claim(
        "sep-loses",
        "Figure 1",
        "[SEP] loses weight when [CLS] is processed in the last layer.",
        "in 4 of 5 tasks",
        maps.shrinks("sep", share=AS_MANY),
        headline="[SEP] loses weight",
    )
    yield _claim(
        "punctuation-loses",
        "Figure 1",
        "Punctuation loses weight when [CLS] is processed in the last layer.",
        "in 4 of 5 tasks",
        maps.shrinks("punctuation", share=AS_MANY),
    )
    yield _claim(
        "cls-stays",
        "Figure 1",
        "[CLS] keeps its weight, unlike [SEP].",
        "in 5 of 5 tasks",
        maps.steadier("token_types"),
    )
    yield _claim(
        "words-gain",
        "Figure 1",
        "The weight moves to nouns, pronouns and verbs.",
        "in 4 of 5 tasks",
        maps.words_gain(),
        headline="the weight moves to words",
    )
    yield _claim(
        "cls-stays-everywhere",
        "Figures 5, 6",
        "Other tokens attend to [CLS] as before and to [SEP] less.",
        "in 5 of 5 tasks",
        all_of(maps.steadier("to_token"), maps.shrinks("sep", table="to_token", share=AS_MANY)),
    )


PADDED = "With padding inside V, as the paper's code computes it"
HEADS_64 = "On an encoder with heads of 64, as it was pretrained"
FEW_INPUTS = "Few inputs of each task and no interval over them: a difference of a point decides nothing"
# The same claims on other maps: {the end of their names: (the maps, how a statement begins)}.
OTHER_MAPS = {
    "padded": (Maps(attention="authors"), PADDED),
    "heads-64": (Maps(PRETRAINED, "_pretrained"), HEADS_64),
    "heads-64-padded": (Maps(PRETRAINED, "_pretrained", "authors"), f"{HEADS_64}, {PADDED[0].lower()}{PADDED[1:]}"),
}


def _variants() -> Iterator[Claim]:
    for end, (maps, setting) in OTHER_MAPS.items():
        few = FEW_INPUTS if maps.results == PRETRAINED else ""
        for claim in (*_on_maps(maps), _identity(maps)):
            # The identity holds on every input.
            caveats = [claim.caveat, few if claim.where != "Equation 1" else ""]
            yield replace(
                claim,
                name=f"{claim.name}-{end}",
                statement=f"{setting}: {claim.statement}",
                paper_value="",
                headline="",
                caveat=". ".join(filter(None, caveats)),
            )


def _identity(maps: Maps) -> Claim:
    statement = "Effective attention gives the same output as standard attention."
    return replace(_claim("identity", "Equation 1", statement, "exact", maps.identity()), results=maps.results)


CLAIMS = (
    _identity(Maps()),
    _claim(
        "other-distributions",
        "Appendix A",
        "Other distributions over the keys give the same output.",
        "infinitely many",
        everywhere(
            "alternative",
            "text",
            lambda text: all_of(
                at_most(cell("alternative", "residual", text=text), EXACT),
                at_least(cell("alternative", "distance", text=text), 100 * EXACT),
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
    *_on_maps(Maps()),
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
        about(cell("timing", "ratio", way="full-svd"), 2.0),
    ),
    *_variants(),
)
