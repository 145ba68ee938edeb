"""The laws about numbers: what random calls of every kind keep, and where NaN goes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, hide_unseen, repeat_groups, visible
from attnlab.conformance.calls import B, D, K, M, accepts, cross_call, padding, self_call
from attnlab.conformance.judging import NotApplicableError, require, taken
from attnlab.conformance.random_calls import random_calls
from attnlab.conformance.tolerance import RELATIVE, assert_close

__all__ = ["nan_reaches_the_output", "random_calls_keep_their_numbers"]

# What float32 may lose where a mechanism says that its sums cancel, times the tolerance.
CANCELLING = 100
# The key that is NaN in the calls of ``nan_reaches_the_output``.
SPOILT = 2


def random_calls_keep_their_numbers(mech: Mechanism, *, count: int = 30, seed: int = 0) -> None:
    """Any shape, size of scores, mask, dtype, grouping, offset and bias: numbers stay finite and W @ v is the output.

    The bound: for a dtype with tolerance t and precision eps, and scores up to s, each number of the output is within
    (t + eps s) (1 + |W| |v|) of W @ v. A gradient is finite wherever that of the same call in float64 fits the dtype.
    """
    ran = 0
    for description, call, largest in random_calls(seed, count):
        # Parameters are made for one width of keys and of x.
        own = copy.deepcopy(mech)
        if not accepts(own, call):
            continue
        ran += 1
        try:
            _keeps_its_numbers(own, call, largest)
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"{kind}{error} [{description}]") from error
    if not ran:
        raise NotApplicableError(f"it refuses all of the {count} random calls")


def _keeps_its_numbers(mech: Mechanism, call: AttentionCall, largest: float) -> None:
    q, k, v = (t.clone().requires_grad_() for t in (call.q, call.k, call.v))
    out, weights = mech(replace(call, q=q, k=k, v=v)), mech.weights(call)
    require(weights.shape == call.sizes, f"W is {tuple(weights.shape)}, not {call.sizes}")
    shape = (*call.sizes[:3], call.v.shape[-1])
    require(out.shape == shape, f"the output is {tuple(out.shape)}, not {shape}")
    require(out.dtype == call.q.dtype, f"the output is {out.dtype}")
    require(bool(torch.isfinite(weights).all()), "W is not finite")
    require(bool(torch.isfinite(out).all()), "the output is not finite")
    seen = visible(call)
    if seen is not None:
        seen = seen.expand(call.sizes)
        require(bool((weights[~seen] == 0).all()), "a key that a query may not see has weight")
        require(bool((out[~seen.any(-1)] == 0).all()), "a query that sees nothing has an output that is not zero")
    _is_product(mech, call, weights.detach().double(), out.detach().double(), largest)
    if out.requires_grad and "gradients" not in mech.exempt:
        _gradients_are_finite(mech, call, (q, k, v), out)


def _is_product(mech: Mechanism, call: AttentionCall, weights: Tensor, out: Tensor, largest: float) -> None:
    values = repeat_groups(hide_unseen(call).v, call.groups).double()
    cancelling = "cancelling sums" in mech.exempt and call.q.dtype != torch.float64
    tolerance = RELATIVE[call.q.dtype] * (CANCELLING if cancelling else 1) + torch.finfo(call.q.dtype).eps * largest
    off = (out - weights @ values).abs()
    if not (off <= tolerance * (1 + weights.abs() @ values.abs())).all():
        raise AssertionError(
            f"W @ v differs from the output by {float(off.max()):.1e}, where {tolerance:.1e} is allowed"
        )


def _gradients_are_finite(mech: Mechanism, call: AttentionCall, by: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
    # Numbers of either sign: the derivative of a plain sum by scores is often zero.
    signs = torch.linspace(-1, 1, max(1, out.numel()), dtype=out.dtype)[: out.numel()].view(out.shape)
    computed = torch.autograd.grad((out * signs).sum(), by, allow_unused=True)
    if all(grad is None or torch.isfinite(grad).all() for grad in computed):
        return
    floats = {name: getattr(call, name) for name in ("q", "k", "v", "x", "bias")}
    wide = replace(call, **{name: t.detach().double() for name, t in floats.items() if t is not None})
    exact_by = tuple(t.detach().double().requires_grad_() for t in by)
    exact_out = mech(replace(wide, q=exact_by[0], k=exact_by[1], v=exact_by[2]))
    exact = torch.autograd.grad((exact_out * signs.double()).sum(), exact_by, allow_unused=True)
    for name, grad, true in zip("qkv", computed, exact, strict=True):
        if grad is None or torch.isfinite(grad).all():
            continue
        # Sums over heads and queries pass through the dtype too.
        fits = true is not None and bool(true.abs().max() < torch.finfo(grad.dtype).max / 16)
        require(not fits, f"the gradient by {name} is not finite, while that in float64 fits {grad.dtype}")


def nan_reaches_the_output(mech: Mechanism) -> None:
    """NaN in what a query sees gives NaN in its output and its row of W, never zeros or a number made without it.

    That is asked of rows of W that move when the number moves: a key outside of a window is not read. A query that may
    not see the NaN keeps its output, or has NaN too.
    """
    for name, call in taken(mech, _spoilt_situations()):
        # Parameters are made for one number of heads.
        own = copy.deepcopy(mech)
        clean = own(call).detach(), own.weights(call).detach()
        for field in ("q", "k", "x", "bias"):
            if getattr(call, field) is not None:
                _follow_nan(own, call, field, clean, f"{name}, NaN in {field}")
        _follow_nan_in_values(own, call, f"{name}, NaN in v")


def _spoilt_situations() -> Iterator[tuple[str, AttentionCall]]:
    hidden = padding([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])
    # torch has another kernel for keys and values of one width.
    square = self_call(length=K, heads=2, groups=2, widths=(D, D, M))
    single = self_call(torch.float32, length=K, heads=6, groups=2)
    half = self_call(torch.bfloat16, length=K, heads=2, groups=2)
    yield "encoder", square
    yield "padded", replace(square, key_visible=hidden)
    yield "cross", cross_call(heads=2, groups=2)
    yield "biased", replace(square, bias=torch.randn(B, 2, K, K, dtype=torch.float64))
    yield "encoder in float32", single
    yield "padded causal in bfloat16", replace(half, causal=True, key_visible=hidden)


def _changed(call: AttentionCall, field: str, amount: float) -> AttentionCall:
    """One number of the first row and head changed: of query, key or input ``SPOILT``, or of their pair."""
    t = getattr(call, field).clone()
    t[(0, SPOILT, 0) if field == "x" else (0, 0, SPOILT, SPOILT)] += amount
    return replace(call, **{field: t})


def _follow_nan(mech: Mechanism, call: AttentionCall, field: str, clean: tuple[Tensor, Tensor], what: str) -> None:
    spoilt = _changed(call, field, math.nan)
    # Past the door, which refuses such a bias on a CPU.
    out, weights = mech.forward(spoilt).detach(), mech.reference(spoilt).detach()
    nan, nan_in_weights = out.isnan().any(-1), weights.isnan().any(-1)
    require(bool(nan[nan_in_weights].all()), f"{what}: an output is a number where its row of W is NaN")
    require(not bool(nan[1:].any()), f"{what}: it reached another row of the batch")
    if "hidden_keys_change_nothing" in mech.exempt:
        return
    depends = (mech.weights(_changed(call, field, 1.0)).detach() != clean[1]).any(-1)
    require(bool(nan[depends].all()), f"{what}: an output that depends on it is a number")
    require(bool(nan_in_weights[depends].all()), f"{what}: a row of W that depends on it holds numbers")
    assert_close(out[~nan], clean[0][~nan], what=f"{what}: an output changed to another number")


def _follow_nan_in_values(mech: Mechanism, call: AttentionCall, what: str) -> None:
    v = call.v.clone()
    v[0, 0, SPOILT] = math.nan
    spoilt = replace(call, v=v)
    try:
        out, weights = mech(spoilt), mech.weights(spoilt)
    except ValueError as error:
        require("NaN" in str(error), f"{what}: refused without saying so: {error}")
        return
    weight = weights[0, : call.groups, :, SPOILT]
    nan = out[0, : call.groups].isnan().any(-1)
    require(bool(nan[weight != 0].all()), f"{what}: an output is a number though its key has weight")
