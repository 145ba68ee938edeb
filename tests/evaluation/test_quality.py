from __future__ import annotations

from types import SimpleNamespace

import torch

from attnlab.data import IGNORED
from attnlab.evaluation.quality import _masked


class Tokenizer(SimpleNamespace):
    def __len__(self) -> int:
        return 97


TOKENIZER = Tokenizer(mask_token_id=4, all_special_ids=[0, 1, 2, 3, 4])


def test_of_fifteen_percent_eight_tenths_are_masked_and_a_tenth_each_replaced_and_kept() -> None:
    ids = torch.randint(5, 97, (40, 500))
    of_text = torch.ones_like(ids, dtype=torch.bool)
    of_text[:, 0] = False
    inputs, labels = _masked(ids, of_text, TOKENIZER, seed=0)
    chosen = labels != IGNORED
    assert not chosen[:, 0].any()
    assert (labels[chosen] == ids[chosen]).all()
    assert (inputs[~chosen] == ids[~chosen]).all()
    share = chosen.float().sum() / of_text.sum()
    masked = (inputs[chosen] == 4).float().mean()
    kept = (inputs[chosen] == ids[chosen]).float().mean()
    assert abs(share - 0.15) < 0.01
    assert abs(masked - 0.8) < 0.03
    assert abs(kept - 0.1) < 0.02
    assert (inputs[chosen] >= 4).all()


def test_a_short_text_has_one_mask_at_least() -> None:
    ids = torch.tensor([[7, 8]])
    for seed in range(9):
        inputs, labels = _masked(ids, torch.tensor([[False, True]]), TOKENIZER, seed)
        assert inputs.tolist() == [[7, 4]]
        assert labels.tolist() == [[IGNORED, 8]]
