"""The laws every mechanism obeys. A law is a function of a mechanism that raises; its name is the key of ``exempt``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnlab import AttentionCall, Mechanism
from attnlab.attention import hide_unseen, repeat_groups, visible
from tests.conformance.calls import B, D, E, H, K, accepts, cross_call, padding, self_call, situations
from tests.tolerance import assert_close


def accepted(mech: Mechanism, dtype: torch.dtype = torch.float64) -> Iterator[tuple[str, AttentionCall]]:
    """The situations this mechanism takes; taking none would make every law empty."""
    taken = [(name, call) for name, call in situations(dtype).items() if accepts(mech, call)]
    assert taken, f"{mech!r} refuses every situation"
    yield from taken


def product(mech: Mechanism, call: AttentionCall) -> Tensor:
    """W @ v from the reference."""
    return mech.weights(call) @ repeat_groups(hide_unseen(call).v, call.groups)


def output_is_weights_times_values(mech: Mechanism) -> None:
    for name, call in accepted(mech):
        b, h, n_q, n_k = call.sizes
        weights, out = mech.weights(call), mech(call)
        assert weights.shape == (b, h, n_q, n_k), name
        assert out.shape == (b, h, n_q, call.v.shape[-1]), name
        assert_close(out, product(mech, call), what=name)


def hidden_keys_get_no_weight(mech: Mechanism) -> None:
    for name, call in accepted(mech):
        seen = visible(call)
        if seen is not None:
            weights = mech.weights(call)
            assert (weights[~seen.expand_as(weights)] == 0).all(), name


def hidden_keys_change_nothing(mech: Mechanism) -> None:
    """Each query's output stays put when what it may not see changes by any finite amount."""
    for name, call in accepted(mech):
        seen = visible(call)
        if seen is None:
            continue
        b, h, n_q, n_k = call.sizes
        seen = seen.expand(b, h, n_q, n_k)
        before = mech(call)
        for j in range(n_k):
            for amount in (3.0, 1e308):
                k, v = call.k.clone(), call.v.clone()
                k[:, :, j] += amount
                v[:, :, j] -= amount
                after = mech(replace(call, k=k, v=v))
                blind = ~seen[..., j]
                assert_close(after[blind], before[blind], what=f"{name}, key {j} moved by {amount}")


def keys_hidden_from_all_may_be_nan(mech: Mechanism) -> None:
    hidden = padding([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0]])
    base = self_call(length=K)
    for call in (replace(base, key_visible=hidden), replace(base, key_visible=hidden, causal=True)):
        if not accepts(mech, call):
            continue
        expected = mech(call)
        for poison in (math.nan, math.inf):
            k, v = (t.masked_fill(~hidden[:, None, :, None], poison) for t in (call.k, call.v))
            x = base.x.masked_fill(~hidden[..., None], poison)
            poisoned = replace(call, k=k.requires_grad_(), v=v.requires_grad_(), x=x)
            out = mech(poisoned)
            assert_close(out, expected, what=f"hidden keys set to {poison}")
            assert torch.isfinite(mech.weights(poisoned)).all()
            if "gradients" not in mech.exempt:
                for grad in torch.autograd.grad(out.sum(), (k, v)):
                    assert torch.isfinite(grad).all(), f"gradient with hidden keys set to {poison}"


def padded_batch_equals_each_row_alone(mech: Mechanism) -> None:
    """Padding left, right and in the middle, in any mix: real positions come out as in the unpadded row."""
    rows = padding([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0]])
    base, cross = self_call(length=K), cross_call()
    for call in (
        replace(base, key_visible=rows),
        replace(base, key_visible=rows, causal=True),
        replace(cross, key_visible=rows),
    ):
        if not accepts(mech, call):
            continue
        together = mech(call)
        for i in range(B):
            real = rows[i]
            own_queries = real if call.sizes[2] == K else slice(None)
            alone = AttentionCall(
                call.q[i : i + 1, :, own_queries],
                call.k[i : i + 1, :, real],
                call.v[i : i + 1, :, real],
                x=call.x[i : i + 1, real],
                causal=call.causal,
            )
            assert_close(together[i : i + 1, :, own_queries], mech(alone), what=f"row {i}, causal={call.causal}")


def causal_outputs_ignore_the_future(mech: Mechanism) -> None:
    call = replace(self_call(length=K), causal=True)
    if not accepts(mech, call):
        return
    whole = mech(call)
    for n in range(1, K):
        head = replace(call, q=call.q[:, :, :n], k=call.k[:, :, :n], v=call.v[:, :, :n], x=call.x[:, :n])
        assert_close(mech(head), whole[:, :, :n], what=f"prefix of {n}")


def prefill_then_steps_equals_whole(mech: Mechanism) -> None:
    """With a cache of keys and values, a prefill and then one token at a time give the whole forward's outputs."""
    call = replace(self_call(length=K), causal=True)
    for visible_keys in (None, padding([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])):
        call = replace(call, key_visible=visible_keys)
        step = replace(call, q=call.q[:, :, -1:], offset=K - 1)
        if not (accepts(mech, call) and accepts(mech, step)):
            continue
        whole = mech(call)
        for prefill in (1, 3):
            for start, stop in [(0, prefill)] + [(t, t + 1) for t in range(prefill, K)]:
                part = replace(
                    call,
                    q=call.q[:, :, start:stop],
                    k=call.k[:, :, :stop],
                    v=call.v[:, :, :stop],
                    x=call.x[:, :stop],
                    key_visible=None if visible_keys is None else visible_keys[:, :stop],
                    offset=start,
                )
                assert_close(mech(part), whole[:, :, start:stop], what=f"prefill {prefill}, tokens {start} to {stop}")


def rows_that_see_nothing_are_zero(mech: Mechanism) -> None:
    for name, call in accepted(mech):
        seen = visible(call)
        if seen is None:
            continue
        blind = ~seen.any(-1).expand(call.sizes[:3])
        assert (mech(call)[blind] == 0).all(), name
        assert (mech.weights(call)[blind] == 0).all(), name


def every_precision_works(mech: Mechanism) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for name, call in accepted(mech, dtype):
            out = mech(call)
            assert out.dtype == dtype, name
            assert torch.isfinite(out).all(), name
            if "half precision" in mech.exempt and dtype == torch.bfloat16:
                continue
            exact = replace(
                call,
                **{n: getattr(call, n).double() for n in ("q", "k", "v", "x", "bias") if getattr(call, n) is not None},
            )
            assert_close(out, mech(exact), what=f"{name} in {dtype}")


def gradients(mech: Mechanism) -> None:
    small = {"queries": 3, "keys": 5, "heads": 2}
    base, square = cross_call(**small), self_call(length=5, heads=2)
    for call in (base, replace(square, causal=True, key_visible=padding([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]))):
        if not accepts(mech, call):
            continue
        q, k, v = (t.detach().requires_grad_() for t in (call.q, call.k, call.v))

        def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = call) -> Tensor:
            return mech(replace(call, q=q, k=k, v=v))

        attend(q, k, v)
        torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)


def grouped_queries_equal_repeated_keys(mech: Mechanism) -> None:
    base = replace(self_call(length=K, heads=6, groups=2), key_visible=padding([[1] * K, [1] * 5 + [0] * 2]))
    for call in (base, replace(base, causal=True)):
        if not accepts(mech, call):
            continue
        repeated = replace(call, k=repeat_groups(call.k, 2), v=repeat_groups(call.v, 2))
        assert_close(mech(call), mech(repeated), what=f"causal={call.causal}")


def refusals_say_why(mech: Mechanism) -> None:
    """Whatever ``cannot`` lists is refused with its reason, by the output and by the weights alike."""
    square = self_call(length=K)
    asking = {
        "causal": replace(square, causal=True),
        "mask": replace(square, mask=torch.ones(1, 1, K, K, dtype=torch.bool)),
        "bias": replace(square, bias=torch.zeros(1, 1, K, K, dtype=torch.float64)),
        "cross": cross_call(),
        "offset": replace(square, q=square.q[:, :, -1:], causal=True, offset=K - 1),
        "padding": replace(square, key_visible=torch.ones(B, K, dtype=torch.bool)),
        "no-x": replace(square, x=None),
    }
    for what, why in mech.cannot().items():
        for attempt in (mech, mech.weights):
            with pytest.raises(ValueError, match=re.escape(why)):
                attempt(asking[what])


def nothing_to_attend_to(mech: Mechanism) -> None:
    """No keys at all: zeros, as for a row that sees nothing."""
    empty = torch.zeros(B, H, 0, D, dtype=torch.float64)
    call = AttentionCall(
        torch.randn(B, H, 3, D, dtype=torch.float64),
        empty,
        torch.zeros(B, H, 0, E, dtype=torch.float64),
        x=torch.zeros(B, 0, 17, dtype=torch.float64),
    )
    if accepts(mech, call):
        assert mech.weights(call).shape == (B, H, 3, 0)
        assert (mech(call) == 0).all()
        assert mech(call).shape == (B, H, 3, E)


LAWS: dict[str, Callable[[Mechanism], None]] = {
    law.__name__: law
    for law in (
        output_is_weights_times_values,
        hidden_keys_get_no_weight,
        hidden_keys_change_nothing,
        keys_hidden_from_all_may_be_nan,
        padded_batch_equals_each_row_alone,
        causal_outputs_ignore_the_future,
        prefill_then_steps_equals_whole,
        rows_that_see_nothing_are_zero,
        every_precision_works,
        gradients,
        grouped_queries_equal_repeated_keys,
        refusals_say_why,
        nothing_to_attend_to,
    )
}

# Parts of a law that a mechanism may be exempt from without being exempt from the rest.
PARTS = {"half precision"}
