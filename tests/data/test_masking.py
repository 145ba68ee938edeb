import numpy as np
import pytest

from attnlab.data import IGNORED, Masking, Specials, mask_tokens
from attnlab.data.batching import generator

SPECIALS = Specials(pad=0, unk=1, bos=2, eos=7, mask=4)
VOCAB = 97


def masked(tokens, seed=0, **settings):
    return mask_tokens(tokens, specials=SPECIALS, vocab_size=VOCAB, rng=generator(seed), masking=Masking(**settings))


def test_shares_are_fifteen_and_eighty_ten_ten():
    tokens = np.full((200, 500), 11)
    inputs, labels = masked(tokens)
    chosen = labels != IGNORED
    n = chosen.sum()
    # Five standard deviations of a binomial share.
    assert chosen.mean() == pytest.approx(0.15, abs=5 * np.sqrt(0.15 * 0.85 / tokens.size))
    assert (inputs[chosen] == 4).sum() / n == pytest.approx(0.8, abs=5 * np.sqrt(0.8 * 0.2 / n))
    same = 0.1 + 0.1 / (VOCAB - 5)
    assert (inputs[chosen] == 11).sum() / n == pytest.approx(same, abs=5 * np.sqrt(same / n))
    assert (inputs[~chosen] == 11).all()
    assert (labels[chosen] == 11).all()


def test_random_tokens_cover_the_ordinary_vocabulary_evenly_and_no_special():
    tokens = np.full((200, 500), 11)
    inputs, _ = masked(tokens, rate=1.0, masked=0.0, random=1.0)
    counts = np.bincount(inputs.ravel(), minlength=VOCAB)
    assert counts[SPECIALS.ids()].sum() == 0
    ordinary = np.delete(counts, SPECIALS.ids())
    mean = tokens.size / len(ordinary)
    assert np.abs(ordinary - mean).max() < 5 * np.sqrt(mean)


def test_special_tokens_and_padding_are_never_chosen():
    tokens = np.tile([2, 11, 1, 4, 7, 0, 0], (101, 1))
    inputs, labels = masked(tokens, rate=1.0, masked=1.0, random=0.0)
    assert (labels == np.where(tokens == 11, 11, IGNORED)).all()
    assert (inputs == np.where(tokens == 11, 4, tokens)).all()


def test_the_same_seed_hides_the_same_tokens_and_the_input_stays_as_it_was():
    tokens = np.arange(8, 71).reshape(3, 21)
    before = tokens.copy()
    first, second, other = masked(tokens), masked(tokens), masked(tokens, seed=1)
    np.testing.assert_array_equal(first, second)
    assert (first[1] != other[1]).any()
    np.testing.assert_array_equal(tokens, before)


def test_errors():
    with pytest.raises(ValueError, match="has no mask token"):
        mask_tokens(np.zeros((1, 1), int), specials=Specials(pad=0), vocab_size=5, rng=generator(0))
    with pytest.raises(ValueError, match="rate must be above 0 and at most 1, got 15"):
        Masking(rate=15)
    with pytest.raises(ValueError, match=r"shares of the chosen tokens, got 0.8 and 0.3"):
        Masking(random=0.3)
