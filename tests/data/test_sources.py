import numpy as np
import pytest
import torch

from attnlab.data import IGNORED, Blocks, CausalSource, MlmSource, Specials, TokenStore, bundled_text

SPECIALS = Specials(pad=0, unk=1, bos=2, eos=3, mask=4)
STORE = TokenStore(np.arange(5, 1014, dtype=np.uint16), np.array([0, 100, 103, 600, 1009]))
BLOCKS = Blocks(STORE, SPECIALS, length=19)


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_mlm_batches_are_a_function_of_seed_and_step():
    source = MlmSource(BLOCKS, batch_size=7, vocab_size=1014, seed=5)
    again = MlmSource(Blocks(STORE, SPECIALS, length=19), batch_size=7, vocab_size=1014, seed=5)
    for step in (3, 0, 41):
        same(source.batch(step), again.batch(step))
    assert not torch.equal(source.batch(0)["input_ids"], source.batch(1)["input_ids"])
    other = MlmSource(BLOCKS, batch_size=7, vocab_size=1014, seed=6)
    assert not torch.equal(source.batch(0)["labels"], other.batch(0)["labels"])


def test_mlm_labels_restore_the_text():
    source = MlmSource(BLOCKS, batch_size=5, vocab_size=1014, shuffle=False)
    batch = source.batch(2)
    assert batch["input_ids"].shape == (5, 19)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    tokens, _ = BLOCKS.rows(np.arange(10, 15))
    restored = torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])
    assert torch.equal(restored, torch.from_numpy(tokens))
    assert (batch["labels"][:, [0, -1]] == IGNORED).all()


def test_an_evaluation_sees_every_row_once():
    source = CausalSource(BLOCKS, batch_size=7, shuffle=False)
    rows = torch.cat([source.batch(step)["input_ids"] for step in range(source.steps_per_epoch)])
    assert torch.equal(rows, torch.from_numpy(BLOCKS.rows(np.arange(len(BLOCKS)))[0]))
    with pytest.raises(IndexError):
        source.batch(source.steps_per_epoch)


def test_padding_is_masked_and_no_label():
    blocks = Blocks(STORE, SPECIALS, length=19, form="separate", seed=None)
    batch = CausalSource(blocks, batch_size=len(blocks), shuffle=False, documents=True).batch(0)
    padding = batch["input_ids"] == 0
    assert padding.any()
    assert torch.equal(batch["attention_mask"] == 0, padding)
    assert torch.equal(batch["labels"] == IGNORED, padding)
    assert torch.equal(batch["documents"] == -1, padding)
    assert "attention_mask" not in CausalSource(BLOCKS, batch_size=2).batch(0)


def test_a_single_pass_ends():
    whole = CausalSource(BLOCKS, batch_size=len(BLOCKS), shuffle=False)
    assert len(whole.batch(0)["input_ids"]) == len(BLOCKS)
    with pytest.raises(IndexError, match="step 1 of a single pass"):
        whole.batch(1)


def test_the_bundled_text_is_small_and_whole():
    text = bundled_text()
    assert 5_000 < len(text) < 20_000
    assert "wherefore art thou Romeo?" in text
    assert bundled_text("moby-dick").startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    with pytest.raises(ValueError, match="there are: shakespeare, moby-dick"):
        bundled_text("bible")
