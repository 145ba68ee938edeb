"""The share of a row that effective attention removes, from outputs alone, is that of the dense maps."""

from __future__ import annotations

import pytest
import torch

import attnlab as al
from attnlab.attention import hide_unseen, repeat_groups
from attnlab.linalg.removed_share import removed_share_of_rows


@pytest.mark.parametrize("values", ["independent", "dependent"])
@pytest.mark.parametrize(
    "how",
    [
        {"causal": True},
        {"causal": True, "offset": 31},
        {"causal": True, "padded": True},
        {"padded": True},
        {},
    ],
    ids=["causal", "offset", "padded", "encoder padded", "encoder"],
)
def test_the_share_is_that_of_the_dense_maps(how: dict[str, bool | int], values: str) -> None:
    """With more queries than a block of prefixes; dependent values leave some rows to the slow path."""
    how = dict(how)
    n_q, e = 139, 16
    n_k = n_q + int(how.get("offset", 0))
    q, k, v = torch.randn(2, 6, n_q, e), torch.randn(2, 3, n_k, e), torch.randn(2, 3, n_k, e)
    if values == "dependent":
        v[:, 1, :, 8:] = v[:, 1, :, :8]
        v[:, 2, 3], v[:, 2, 5] = v[:, 2, 2], v[:, 2, 1]
    seen = torch.rand(2, n_k) > 0.4 if how.pop("padded", False) else None
    call = hide_unseen(al.AttentionCall(q, k, v, key_visible=seen, **how))
    w = al.Softmax().weights(call)
    effective = al.effective_attention(w, call.v, key_visible=seen, **how)
    squares = w.double().square().sum(-1)
    expected = (w.double() - effective.weights.double()).square().sum(-1) / squares.masked_fill(squares == 0, 1)
    share = removed_share_of_rows(
        w @ repeat_groups(call.v, call.groups), squares.float(), call.v, key_visible=seen, causal=call.causal,
        offset=call.offset,
    )  # fmt: skip
    torch.testing.assert_close(share.double(), expected, rtol=0, atol=1e-4)
    head = (share * squares).sum(-1) / squares.sum(-1)
    torch.testing.assert_close(head.float(), effective.removed, rtol=0, atol=1e-4)
