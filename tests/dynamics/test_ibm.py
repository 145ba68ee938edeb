"""IBM Model 1 in sparse arrays against the textbook loop, and against nltk where it is installed."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from attnlab.dynamics.corpus import NULL, Bitext, bitext, count_table
from attnlab.dynamics.ibm import fit_ibm, ibm_alpha, ibm_beta, translations

Pairs = list[tuple[list[int], list[int]]]


def corpus(seed: int = 0, *, distinct: bool = False) -> Pairs:
    """Noisy translations o = 2 i + 1, of odd lengths, with words that repeat unless they must be distinct."""
    rng = np.random.default_rng(seed)
    out: Pairs = []
    for _ in range(31):
        x = rng.integers(0, 11, rng.integers(1, 8)).tolist()
        y = [2 * i + 1 for i in x if rng.random() < 0.8] + rng.integers(0, 23, rng.integers(0, 3)).tolist()
        out.append((x, list(dict.fromkeys(y)) if distinct else y))
    return out


def sides(pairs: Pairs, *, null: bool = False) -> Bitext:
    return bitext([x for x, _ in pairs], [y for _, y in pairs], null=null)


def textbook(pairs: Pairs, steps: int, *, null: bool) -> dict[tuple[int, int], float]:
    """EM as in any textbook, from a table of ones."""
    trans: dict[tuple[int, int], float] = defaultdict(lambda: 1.0)
    for _ in range(steps):
        count: dict[tuple[int, int], float] = defaultdict(float)
        for x, y in pairs:
            x = [NULL, *x] if null else x
            for o in y:
                total = sum(trans[i, o] for i in x)
                for i in x:
                    count[i, o] += trans[i, o] / total
        of = defaultdict(float)
        for (i, _), c in count.items():
            of[i] += c
        trans = defaultdict(float, {(i, o): c / of[i] for (i, o), c in count.items()})
    return trans


def test_count_table_by_hand() -> None:
    """Figure 1's rule: 1/L for each co-occurrence, twice for a word that occurs twice."""
    table = count_table(bitext([[0, 1], [0, 0, 2]], [[5, 6], [5]]))
    expected = {(0, 5): 1 / 2 + 2 / 3, (0, 6): 1 / 2, (1, 5): 1 / 2, (1, 6): 1 / 2, (2, 5): 1 / 3}
    got = dict(zip(zip(table.source.tolist(), table.target.tolist(), strict=True), table.value, strict=True))
    assert got == pytest.approx(expected)
    assert table.dense(3, 7).sum() == pytest.approx(3)


def test_in_chunks_the_table_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    both = sides(corpus())
    whole, fitted = count_table(both), fit_ibm(both, steps=5)
    monkeypatch.setattr("attnlab.dynamics.corpus.LINKS", 7)
    chunked = count_table(both)
    np.testing.assert_array_equal(chunked.source, whole.source)
    np.testing.assert_array_equal(chunked.target, whole.target)
    np.testing.assert_allclose(chunked.value, whole.value, rtol=1e-12)
    np.testing.assert_allclose(fit_ibm(both, steps=5).trans.value, fitted.trans.value, rtol=1e-12)


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_em_is_the_textbook_loop(null: bool, steps: int) -> None:
    pairs = corpus()
    got = fit_ibm(sides(pairs, null=null), steps=steps, tolerance=0).trans
    expected = textbook(pairs, steps, null=null)
    assert len(got) == len(expected)
    for (i, o), value in expected.items():
        assert got.get(i, o) == pytest.approx(value, rel=1e-9)


def test_the_first_step_is_the_normalised_count_table() -> None:
    both = sides(corpus())
    np.testing.assert_allclose(fit_ibm(both, steps=1).trans.value, translations(count_table(both)).value, rtol=1e-12)


@pytest.mark.parametrize("null", [False, True])
def test_em_climbs_and_converges(null: bool) -> None:
    pairs = corpus()
    fitted = fit_ibm(sides(pairs, null=null), steps=1000, tolerance=1e-7)
    assert fitted.converged
    assert fitted.steps < 1000
    assert (np.diff(fitted.log_likelihood) > 0).all()
    # EM recovers the hidden dictionary: 2 i + 1 is the best output of every i.
    for i in range(11):
        assert fitted.trans.get(i, np.arange(23)).argmax() == 2 * i + 1


def test_em_is_nltks_with_null() -> None:
    """Output words distinct within a sentence: nltk adds the total of a repeated one once for each occurrence."""
    translate = pytest.importorskip("nltk.translate")
    pairs = corpus(distinct=True)
    aligned = [translate.AlignedSent([str(o) for o in y], [str(i) for i in x]) for x, y in pairs]
    theirs = translate.IBMModel1(aligned, 5).translation_table
    ours = fit_ibm(sides(pairs, null=True), steps=5, tolerance=0).trans
    for i, o, value in zip(ours.source.tolist(), ours.target.tolist(), ours.value, strict=True):
        assert theirs[str(o)][None if i == NULL else str(i)] == pytest.approx(value, rel=1e-9)


def test_beta_and_alpha_by_hand() -> None:
    both = bitext([[0, 1], [0]], [[5], [6]])
    trans = translations(count_table(both))
    beta, lengths = ibm_beta(trans, both)
    # C[0] = {5: 1/2, 6: 1}, C[1] = {5: 1/2}.
    torch.testing.assert_close(beta, torch.tensor([[1 / 3, 1.0], [2 / 3, 0.0]], dtype=torch.float64))
    assert lengths.tolist() == [2, 1]
    torch.testing.assert_close(ibm_alpha(trans, both)[0], torch.tensor([[1 / 4, 3 / 4], [1.0, 0.0]]).double())


def test_null_is_the_first_column() -> None:
    both = bitext([[4, 7]], [[5, 5, 6]], null=True)
    beta, lengths = ibm_beta(translations(count_table(both)), both)
    assert beta.shape == (3, 3)
    assert lengths.tolist() == [3, 3, 3]
    torch.testing.assert_close(beta[:, 0], torch.tensor([2 / 3, 2 / 3, 1 / 3], dtype=torch.float64))


def test_unseen_words_have_no_translation_and_a_uniform_alignment() -> None:
    trans = fit_ibm(bitext([[0, 1]], [[2, 3]])).trans
    for x, y in (([0, 9], 99), ([8, 9], 2)):
        new = bitext([x], [[y]])
        assert ibm_beta(trans, new)[0].tolist() == [[0.0, 0.0]]
        assert ibm_alpha(trans, new)[0].tolist() == [[0.5, 0.5]]
    # A known word beside an unseen one takes everything.
    assert ibm_alpha(trans, bitext([[9, 1]], [[3]]))[0].tolist() == [[0.0, 1.0]]


def test_empty_sentences_link_to_nothing() -> None:
    full = bitext([[0, 1], [2]], [[3], [4, 4]])
    holed = bitext([[], [0, 1], [5], [2], []], [[9], [3], [], [4, 4], []])
    a, b = fit_ibm(full), fit_ibm(holed)
    np.testing.assert_array_equal(a.trans.value, b.trans.value)
    beta, lengths = ibm_beta(b.trans, holed)
    assert lengths.tolist() == [0, 2, 1, 1]
    assert beta[0].tolist() == [0, 0]
    assert ibm_alpha(b.trans, holed)[0].sum(1).tolist() == [0, 1, 1, 1]
    for nothing in (bitext([], []), bitext([[]], [[]]), bitext([[1]], [[]])):
        fitted = fit_ibm(nothing)
        assert len(fitted.trans) == len(count_table(nothing)) == 0
        assert fitted.trans.get([1], [2]).tolist() == [0.0]
        assert ibm_alpha(fitted.trans, nothing)[0].shape[0] == 0
    # With NULL even an empty source has something to align to.
    assert count_table(bitext([[]], [[7]], null=True)).get(NULL, 7) == 1


def test_bad_corpora_are_named() -> None:
    with pytest.raises(ValueError, match="source has 3 sentences and target 2: sentence 3 is on the source side only"):
        bitext([[1], [2], [3]], [[1], [2]])
    with pytest.raises(ValueError, match="target sentence 2 must be a row of ids 0, 1"):
        bitext([[1], [2]], [[1], [-1]])
    with pytest.raises(ValueError, match=r"source sentence 1 must be .* got float64"):
        bitext([[float("nan")]], [[1]])
    with pytest.raises(ValueError, match="at least one step, got 0"):
        fit_ibm(bitext([[1]], [[1]]), steps=0)
