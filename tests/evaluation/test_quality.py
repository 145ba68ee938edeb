from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnlab.adapters import load_model
from attnlab.data import IGNORED
from attnlab.evaluation.quality import Windows, _masked, cut_windows
from tests.adapters.test_load import save


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


@pytest.mark.parametrize(
    ("text", "said"), [("a b x b a " * 9, ""), ("a x y b z " * 9, "60% of the text's tokens are unknown")]
)
def test_a_text_that_the_tokenizer_does_not_know_is_doubtful(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    cut_windows(load_model(save("llama", tmp_path)), text, length=8)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("warning") == bool(said)


def test_a_part_of_the_windows_is_cut_alike_in_inputs_and_labels() -> None:
    ids = torch.arange(35).view(5, 7)
    mask = torch.ones_like(ids)
    mask[4, 3:] = 0
    windows = Windows(ids, mask, ids + 100, int(mask.sum()))
    every_other = windows.part(slice(0, None, 2), length=4)
    assert every_other.input_ids.tolist() == [[0, 1, 2, 3], [14, 15, 16, 17], [28, 29, 30, 31]]
    assert every_other.labels.tolist() == (every_other.input_ids + 100).tolist()
    assert (every_other.tokens, int(every_other.attention_mask.sum())) == (11, 11)
    assert windows.part(slice(3)).tokens == 21
    assert len(windows.part(slice(5, None)).input_ids) == 0
