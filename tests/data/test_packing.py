import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.data import Blocks, Specials, TokenStore

PAD, BOS, EOS = 0, 1, 2
SPECIALS = Specials(pad=PAD, bos=BOS, eos=EOS)


def store_of(*documents):
    tokens = np.array([t for document in documents for t in document], np.uint16)
    return TokenStore(tokens, np.cumsum([0] + [len(d) for d in documents]))


THREE = store_of([5, 6, 7], [8], [9, 10, 11, 12])


def test_enclosed_rows_by_hand():
    blocks = Blocks(THREE, SPECIALS, length=6, seed=None)
    tokens, documents = blocks.rows([0, 1])
    # The text is 5 6 7 </s> 8 </s> 9 10 11 12 </s>: two rows of 4, and three tokens too few for another.
    assert tokens.tolist() == [[BOS, 5, 6, 7, EOS, EOS], [BOS, 8, EOS, 9, 10, EOS]]
    assert documents.tolist() == [[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1]]
    assert len(blocks) == 2


def test_stream_rows_by_hand():
    tokens, documents = Blocks(THREE, SPECIALS, length=5, form="stream", seed=None).rows([1, 0])
    assert tokens.tolist() == [[EOS, 9, 10, 11, 12], [5, 6, 7, EOS, 8]]
    assert documents.tolist() == [[0, 1, 1, 1, 1], [0, 0, 0, 0, 1]]


def test_separate_rows_by_hand():
    tokens, documents = Blocks(THREE, SPECIALS, length=5, form="separate", seed=None).rows([0, 1, 2, 3])
    assert tokens.tolist() == [
        [BOS, 5, 6, 7, EOS],
        [BOS, 8, EOS, PAD, PAD],
        [BOS, 9, 10, 11, EOS],
        [BOS, 12, EOS, PAD, PAD],
    ]
    assert documents.tolist() == [[0] * 5, [0, 0, 0, -1, -1], [0] * 5, [0, 0, 0, -1, -1]]


def test_documents_without_tokens_take_no_row_of_their_own():
    store = store_of([], [5, 6], [], [7], [])
    tokens, _ = Blocks(store, SPECIALS, length=4, form="separate", seed=None).rows([0, 1])
    assert tokens.tolist() == [[BOS, 5, 6, EOS], [BOS, 7, EOS, PAD]]
    tokens, _ = Blocks(store, SPECIALS, length=4, form="stream", seed=None).rows([0, 1])
    assert tokens.tolist() == [[EOS, 5, 6, EOS], [EOS, 7, EOS, EOS]]


documents_of_any_length = st.lists(st.lists(st.integers(3, 999), max_size=17), min_size=1, max_size=11)


@settings(max_examples=60, deadline=None)
@given(documents_of_any_length, st.integers(3, 13), st.one_of(st.none(), st.integers(0, 5)))
def test_rows_hold_the_documents_in_the_drawn_order(documents, length, seed):
    store = store_of(*documents)
    for form in ("enclosed", "stream", "separate"):
        words, text = sum(map(len, documents)), sum(map(len, documents)) + len(documents)
        if words == 0 or (form != "separate" and text < (length if form == "stream" else length - 2)):
            with pytest.raises(ValueError, match="too few for one row"):
                Blocks(store, SPECIALS, length=length, form=form, seed=seed)
            continue
        blocks = Blocks(store, SPECIALS, length=length, form=form, seed=seed)
        order = [documents[i] for i in blocks._order]
        assert sorted(order) == sorted(documents)
        tokens, _ = blocks.rows(np.arange(len(blocks)))
        if form == "separate":
            kept = [[t for t in row[1:] if t != PAD][:-1] for row in tokens.tolist()]
            assert [t for row in kept for t in row] == [t for document in order for t in document]
        else:
            text = [t for document in order for t in (*document, EOS)]
            payload = tokens if form == "stream" else tokens[:, 1:-1]
            assert payload.ravel().tolist() == text[: payload.size]
            assert len(text) - payload.size < payload.shape[1]


@pytest.mark.parametrize("length", [128, 512, 4096])
def test_lengths_of_the_papers(length):
    rng = np.random.default_rng(0)
    store = store_of(*[rng.integers(3, 8192, size=n) for n in rng.integers(1, 2000, size=23)])
    blocks = Blocks(store, SPECIALS, length=length)
    tokens, documents = blocks.rows([0, len(blocks) - 1])
    assert tokens.shape == documents.shape == (2, length)
    assert (tokens[:, 0] == BOS).all()
    assert (tokens[:, -1] == EOS).all()
    assert len(blocks) == (len(store.tokens) + len(store)) // (length - 2)


def test_another_seed_is_another_order_and_the_same_seed_the_same():
    store = store_of(*[[i] for i in range(3, 104)])
    rows = [Blocks(store, SPECIALS, length=102, seed=seed).rows([0])[0].tolist() for seed in (0, 0, 1, None)]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]
    assert rows[0] != rows[3]


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="the store holds 8 tokens, too few for one row of 100"):
        Blocks(THREE, SPECIALS, length=100)
    with pytest.raises(ValueError, match="length must be at least 3"):
        Blocks(THREE, SPECIALS, length=2)
    with pytest.raises(ValueError, match="form must be 'enclosed', 'stream' or 'separate', got 'packed'"):
        Blocks(THREE, SPECIALS, length=5, form="packed")
    with pytest.raises(ValueError, match="form 'separate' needs a token for 'pad', which this tokeniser lacks"):
        Blocks(THREE, Specials(bos=1, eos=2), length=5, form="separate")
    with pytest.raises(IndexError, match="rows 0 to 1 exist, got 2 to 2"):
        Blocks(THREE, SPECIALS, length=6).rows([2])
