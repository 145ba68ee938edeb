"""Laws about what a query may not see: padding, the future, masks and biases, however they arrive."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, visible
from attnlab.conformance.calls import B, H, K, padding, self_call, situations, stacked
from attnlab.conformance.judging import require, taken
from attnlab.conformance.tolerance import assert_close

__all__ = [
    "a_bias_moves_the_weights",
    "a_mask_hides_however_it_arrives",
    "hidden_keys_change_nothing",
    "hidden_keys_get_no_weight",
    "keys_hidden_from_all_may_be_nan",
    "rows_that_see_nothing_are_zero",
]


def situations_with_hidden_keys(mech: Mechanism) -> list[tuple[str, AttentionCall, Tensor]]:
    """The situations in which some key is hidden from some query, with ``visible`` in full."""
    hiding = [(name, call) for name, call in situations().items() if visible(call) is not None]
    hidden = []
    for name, call in taken(mech, hiding):
        seen = visible(call)
        assert seen is not None
        hidden.append((name, call, seen.expand(call.sizes)))
    return hidden


def hidden_keys_get_no_weight(mech: Mechanism) -> None:
    """W is zero wherever a query may not see a key."""
    for name, call, seen in situations_with_hidden_keys(mech):
        weights = mech.weights(call).detach()
        for b, h, i, j in ((weights != 0) & ~seen).nonzero()[:1].tolist():
            weight, why = float(weights[b, h, i, j]), _why_hidden(call, b, h, i, j)
            raise AssertionError(f"{name}: query {i} gives weight {weight:.2g} to key {j}, which it may not see: {why}")


def _why_hidden(call: AttentionCall, b: int, h: int, i: int, j: int) -> str:
    """What of the call hides key j from query i, in words."""
    if call.key_visible is not None and not call.key_visible[b, j]:
        return "key_visible hides that key from all queries"
    if call.causal and j > i + call.offset:
        return f"it comes later, and causal=True (with offset={call.offset}) hides keys after {i + call.offset}"
    if call.mask is not None and not call.mask.expand(call.sizes)[b, h, i, j]:
        return "mask hides the pair"
    return "bias hides the pair by a large negative number"


def a_bias_moves_the_weights(mech: Mechanism) -> None:
    """A bias that is taken is added to the scores; a mechanism that has no scores refuses it (``cannot``)."""
    call = self_call(length=K)
    bias = torch.randn(1, H, K, K, dtype=torch.float64)
    for name, biased in taken(mech, [("encoder", replace(call, bias=bias))]):
        changed = bool((mech.weights(biased) != mech.weights(call)).any())
        require(changed, f"{name}: W is the same with and without a bias; add call.bias to the scores, or refuse it")


def a_mask_hides_however_it_arrives(mech: Mechanism) -> None:
    """A mask that was added to the bias, by any number that masks are written with, hides what a boolean mask hides."""
    base = self_call(length=K)
    mask = torch.rand(1, H, K, K) > 0.4
    # Every query sees a key; -1e4 in a whole row would be a constant, which softmax does not see.
    mask = mask | torch.eye(K, dtype=torch.bool)
    calls = {
        "encoder": replace(base, mask=mask),
        "causal": replace(base, mask=mask, causal=True),
        "padded": replace(base, mask=mask, key_visible=padding([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0]])),
        "a row that sees nothing": replace(base, mask=mask & (torch.arange(K) != 3)[:, None]),
    }
    positions = torch.randn(1, H, K, K, dtype=torch.float64)
    taken(mech, [("biased", replace(base, bias=positions))])
    for name, call in taken(mech, calls.items()):
        bias = torch.zeros_like(positions) if name == "encoder" else positions
        assert call.mask is not None
        expected, seen = mech(replace(call, bias=bias)), visible(call)
        assert seen is not None
        numbers = (-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4)[: 3 if "nothing" in name else 4]
        # One copy of the call for each number.
        arrived = stacked([replace(call, mask=None, bias=bias + torch.where(call.mask, 0.0, n)) for n in numbers])
        out, weights = mech(arrived).split(B), mech.weights(arrived).split(B)
        for i, number in enumerate(numbers):
            what = f"{name}, masked by {number} in the bias"
            assert_close(out[i], expected, what=what)
            require(bool((weights[i].masked_fill(seen, 0) == 0).all()), f"{what}: a hidden key has weight")


def hidden_keys_change_nothing(mech: Mechanism) -> None:
    """The output of a query does not move when a key and value that it may not see change by any finite amount."""
    for name, call, seen in situations_with_hidden_keys(mech):
        before, n_k = mech(call), call.sizes[3]
        for amount in (3.0, 1e308):
            # One copy of the call for each key that moves.
            each = torch.eye(n_k, dtype=torch.float64)[:, None, None, :, None]
            moved = [replace(call, k=call.k + amount * one, v=call.v - amount * one) for one in each]
            for j, after in enumerate(mech(stacked(moved)).split(call.sizes[0])):
                blind = ~seen[..., j]
                what = f"{name}: outputs of queries that may not see key {j}, before and after it moves by {amount:g}"
                assert_close(after[blind], before[blind], what=what)


def keys_hidden_from_all_may_be_nan(mech: Mechanism) -> None:
    """A key, value or x that no query sees may be NaN or infinite: outputs, W and gradients do not show it."""
    hidden = padding([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0]])
    base = replace(self_call(length=K), key_visible=hidden)
    for name, call in taken(mech, [("encoder", base), ("causal", replace(base, causal=True))]):
        expected = mech(call)
        assert call.x is not None
        for poison in (math.nan, math.inf):
            k, v = (t.masked_fill(~hidden[:, None, :, None], poison) for t in (call.k, call.v))
            x = call.x.masked_fill(~hidden[..., None], poison)
            poisoned = replace(call, k=k.requires_grad_(), v=v.requires_grad_(), x=x)
            out, what = mech(poisoned), f"{name}, hidden keys set to {poison}"
            assert_close(out, expected, what=what)
            require(bool(torch.isfinite(mech.weights(poisoned)).all()), f"{what}: W is not finite")
            if "gradients" not in mech.exempt:
                for grad in torch.autograd.grad(out.sum(), (k, v)):
                    require(bool(torch.isfinite(grad).all()), f"{what}: the gradient is not finite")


def rows_that_see_nothing_are_zero(mech: Mechanism) -> None:
    """A query without a visible key has zero weights and a zero output."""
    for name, call, seen in situations_with_hidden_keys(mech):
        blind = ~seen.any(-1)
        require(bool((mech(call)[blind] == 0).all()), f"{name}: an output is not zero")
        require(bool((mech.weights(call)[blind] == 0).all()), f"{name}: a weight is not zero")
