"""Effective attention of input that is odd, hidden or wrong."""

from __future__ import annotations

import pytest
import torch

from attnlab.mechanisms.softmax import softmax
from attnlab.reading._input import ReadingInput
from attnlab.reading.effective import effective_attention, effective_from_output
from tests.reading.effective_cases import padding, seen_by


@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"mask": torch.ones(1, 1, 9, 9, dtype=torch.bool)}])
@pytest.mark.parametrize("name", ["zero values", "identical rows", "weights that sum to 3", "negative weights"])
def test_odd_input_is_defined(name: str, masks: dict) -> None:
    torch.manual_seed(0)
    seen = seen_by((1, 2, 9, 9), **masks)
    w = softmax(torch.randn(1, 2, 9, 9).masked_fill(~seen, -torch.inf))
    v = torch.randn(1, 2, 9, 3)
    if name == "zero values":
        effective = effective_attention(w, 0 * v, **masks)
        assert not effective.weights.any()
        assert not effective.rank.any()
        assert torch.equal(effective.residual, torch.zeros(1, 2))
        assert torch.equal(effective.removed, torch.ones(1, 2))
    elif name == "identical rows":
        effective = effective_attention(w, v[:, :, :1].expand_as(v), **masks)
        even = seen / seen.sum(-1, keepdim=True)
        torch.testing.assert_close(effective.weights, even)
        assert effective.rank.unique().tolist() == [1]
    else:
        factor = {"weights that sum to 3": 3.0, "negative weights": -1.0}[name]
        expected = factor * effective_attention(w, v, **masks).weights
        torch.testing.assert_close(effective_attention(factor * w, v, **masks).weights, expected)


@pytest.mark.parametrize(
    "masks",
    [
        {"key_visible": padding(2, 31)},
        {"key_visible": padding(2, 31), "causal": True},
        {"key_visible": padding(2, 31), "mask": torch.ones(1, 1, 31, 31, dtype=torch.bool)},
    ],
)
def test_nothing_at_a_hidden_key_matters(masks: dict) -> None:
    torch.manual_seed(0)
    seen = seen_by((2, 3, 31, 31), **masks)
    w = softmax(torch.randn(2, 3, 31, 31).masked_fill(~seen, -torch.inf))
    v = torch.randn(2, 3, 31, 5)
    hidden = ~masks["key_visible"]
    clean = effective_attention(w, v, **masks)
    spoiled_v = v.masked_fill(hidden[:, None, :, None], torch.nan)
    spoiled = effective_attention(w.masked_fill(hidden[:, None, None], torch.nan), spoiled_v, **masks)
    assert torch.equal(clean.weights, spoiled.weights)
    assert torch.equal(clean.residual, spoiled.residual)
    rows = effective_from_output(w @ v, spoiled_v, **masks)
    assert torch.isfinite(rows.weights()).all()
    assert rows.residual().max() < 1e-5


def test_a_visible_nan_is_an_error_that_says_so() -> None:
    v = torch.randn(1, 1, 7, 3)
    v[0, 0, 2, 1] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity at a visible key"):
        effective_attention(torch.full((1, 1, 7, 7), 1 / 7), v)


def test_meta_tensors_and_wrong_shapes_are_errors_that_say_so() -> None:
    w, v = torch.zeros(2, 4, 3, 5), torch.zeros(2, 4, 5, 3)
    with pytest.raises(ValueError, match="meta device"):
        effective_attention(w.to("meta"), v.to("meta"))
    with pytest.raises(ValueError, match="without values"):
        effective_attention(w)
    # Under pytest the signatures' shapes are checked first, so the checks that users meet are called themselves.
    with pytest.raises(ValueError, match="do not fit"):
        ReadingInput.of(w, v.mT)
    with pytest.raises(ValueError, match="mask must be bool"):
        ReadingInput.of(w, v, mask=torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="key_visible must be bool"):
        ReadingInput.of(w, v, key_visible=torch.ones(2, 5))
    with pytest.raises(ValueError, match="offset=2 has no meaning"):
        effective_attention(w, v, offset=2)
