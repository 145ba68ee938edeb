from pathlib import Path

import numpy as np
import pytest
import torch

from attnlab.data import (
    IGNORED,
    Malformed,
    Pairs,
    ParallelSource,
    WordTokeniser,
    encode_pairs,
    read_parallel,
    train_sentencepiece,
)

SHARED = Path(__file__).parents[3] / "shared" / "data"


def two(tmp_path, left, right):
    (tmp_path / "a.en").write_text(left)
    (tmp_path / "a.de").write_text(right)
    return tmp_path / "a.en", tmp_path / "a.de"


def test_two_files_and_one_tsv_are_the_same(tmp_path):
    expected = Pairs(["a dog", "two cats"], ["ein Hund", "zwei Katzen"])
    assert read_parallel(*two(tmp_path, "a dog\ntwo cats\n", "ein Hund\nzwei Katzen")) == expected
    (tmp_path / "a.tsv").write_text("a dog\tein Hund\tid 1\ntwo cats\tzwei Katzen\tid 2\n")
    assert read_parallel(tmp_path / "a.tsv") == expected
    assert read_parallel(tmp_path / "a.tsv", columns=(1, 0)) == Pairs(*reversed(expected))


def test_sides_of_different_length_name_the_first_line_without_a_partner(tmp_path):
    short, long = two(tmp_path, "a dog\n", "ein Hund\nzwei Katzen\ndrei\n")
    message = r"a\.en ends after 1 lines, but .*a\.de goes on with line 2: 'zwei Katzen'"
    with pytest.raises(ValueError, match=message):
        read_parallel(short, long)
    with pytest.raises(ValueError, match=message):
        read_parallel(long, short, malformed=Malformed("skip"))


def test_pairs_with_an_empty_side_are_malformed(tmp_path):
    paths = two(tmp_path, "a dog\n\ncats\n", "ein Hund\nnichts\n \n")
    with pytest.raises(ValueError, match="line 2: the source side is empty"):
        read_parallel(*paths)
    bad = Malformed("skip")
    assert read_parallel(*paths, malformed=bad) == Pairs(["a dog"], ["ein Hund"])
    assert [(line, why) for _, line, why in bad.lines] == [
        (2, "the source side is empty"),
        (3, "the target side is empty"),
    ]


def test_tsv_lines_with_too_few_fields_are_malformed(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("one\teins\ntwo\n")
    with pytest.raises(ValueError, match="line 2: expected at least 2 fields between tabs, got 1"):
        read_parallel(path)


def test_a_batch_by_hand():
    words = WordTokeniser(words=("a", "b", "c"))
    x, y = encode_pairs(Pairs(["a b", "c"], ["b", "c a b"]), words, max_length=2)
    source = ParallelSource(x, y, pad=0, bos=2, eos=3, batch_size=2, shuffle=False)
    batch = source.batch(0)
    assert batch["input_ids"].tolist() == [[4, 5, 3], [6, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["decoder_input_ids"].tolist() == [[2, 5, 0], [2, 6, 4]]
    assert batch["labels"].tolist() == [[5, 3, IGNORED], [6, 4, 3]]


def test_every_pair_stays_a_pair_and_batches_depend_on_seed_and_step_alone():
    rng = np.random.default_rng(0)
    x = [np.full(n, i) for i, n in enumerate(rng.integers(1, 30, size=101), start=4)]
    y = [np.append(ids, ids[:1]) for ids in x]
    settings = {"pad": 0, "bos": 2, "eos": 3, "batch_size": 7, "seed": 1}
    source = ParallelSource(x, y, **settings)
    for step in range(source.steps_per_epoch + 3):
        batch = source.batch(step)
        assert torch.equal(batch["input_ids"][:, 0], batch["labels"][:, 0])
        again = ParallelSource(x, y, **settings).batch(step)
        assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_max_tokens_bounds_the_padded_batch():
    rng = np.random.default_rng(0)
    x = [np.full(n, 5) for n in rng.integers(1, 30, size=101)]
    source = ParallelSource(x, x[::-1], pad=0, bos=2, eos=3, max_tokens=100)
    for step in range(source.steps_per_epoch):
        batch = source.batch(step)
        assert max(batch["input_ids"].numel(), batch["labels"].numel()) <= 100


def test_sides_out_of_step():
    with pytest.raises(ValueError, match="1 sources but 2 targets"):
        ParallelSource([np.ones(1)], [np.ones(1)] * 2, pad=0, bos=1, eos=2, batch_size=1)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared")
def test_multi30k_with_a_shared_vocabulary_of_8000():
    folder = SHARED / "multi30k"
    pairs = read_parallel(folder / "train.en.gz", folder / "train.de.gz")
    assert len(pairs.source) == len(pairs.target) == 29_000
    tokeniser = train_sentencepiece([*pairs.source, *pairs.target], vocab_size=8000)
    assert tokeniser.vocab_size == 8000
    x, y = encode_pairs(pairs, tokeniser)
    # Table 9: median lengths 14 and 14.
    assert np.median([len(ids) for ids in x]) == pytest.approx(14, abs=1)
    assert np.median([len(ids) for ids in y]) == pytest.approx(14, abs=2)
