"""The laws that every mechanism obeys.

A law is a function of a mechanism that raises an AssertionError where it does not hold, and ``NotApplicableError``
where the mechanism refuses every call that the law is about. Its name is the key of ``Mechanism.exempt``.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, hide_unseen, repeat_groups
from attnlab.chunks import small_chunks
from attnlab.conformance.calls import (
    B,
    D,
    E,
    H,
    K,
    M,
    cross_call,
    long_situations,
    padding,
    self_call,
    situations,
    stacked,
)
from attnlab.conformance.hiding_laws import (
    a_bias_moves_the_weights,
    a_mask_hides_however_it_arrives,
    hidden_keys_change_nothing,
    hidden_keys_get_no_weight,
    keys_hidden_from_all_may_be_nan,
    rows_that_see_nothing_are_zero,
)
from attnlab.conformance.judging import Law, NotApplicableError, product, require, taken
from attnlab.conformance.number_laws import nan_reaches_the_output, random_calls_keep_their_numbers
from attnlab.conformance.tolerance import assert_close

__all__ = ["LAWS", "PARTS"]

# Queries or tokens in a chunk where the law about long sequences makes chunks small.
CHUNK = 23

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)

# Parts of a law that a mechanism may be exempt from without being exempt from the rest.
PARTS = {"half precision", "cancelling sums"}


def accepted_situations(mech: Mechanism, dtype: torch.dtype = torch.float64) -> list[tuple[str, AttentionCall]]:
    """The situations that this mechanism takes; a mechanism that takes none obeys no law."""
    try:
        return taken(mech, situations(dtype).items())
    except NotApplicableError as refused:
        raise AssertionError(f"{mech!r} refuses every situation: {refused}") from None


def output_is_weights_times_values(mech: Mechanism) -> None:
    for name, call in accepted_situations(mech):
        weights, out = mech.weights(call), mech(call)
        require(weights.shape == call.sizes, f"{name}: W is {tuple(weights.shape)}, not {call.sizes}")
        shape = (*call.sizes[:3], call.v.shape[-1])
        require(out.shape == shape, f"{name}: the output is {tuple(out.shape)}, not {shape}")
        require(out.dtype == call.q.dtype, f"{name}: the output is {out.dtype}, not {call.q.dtype}")
        assert_close(out, weights @ repeat_groups(hide_unseen(call).v, call.groups), what=name)


def long_sequences_equal_the_reference(mech: Mechanism) -> None:
    """Where a sequence is longer than every chunk, the output is still W @ v of the whole call."""
    for name, call in taken(mech, long_situations().items()):
        expected = product(mech, call)
        b, h, _, n_k = call.sizes
        with small_chunks(elements=CHUNK * b * h * n_k, tokens=CHUNK):
            assert_close(mech(call), expected, what=f"{name}, {CHUNK} at once")


def large_scores_keep_the_output(mech: Mechanism) -> None:
    """Scores that differ by 100 or 1,000, in float32: W @ v is the output up to the rounding of such scores."""
    for deviation in (100, 1000):
        base = self_call(torch.float32, length=K)
        factor = deviation**0.5 * D**-0.25
        large = replace(base, q=factor * base.q, k=factor * base.k, scale=1.0)
        for name, call in taken(mech, [("encoder", large), ("causal", replace(large, causal=True))]):
            # A score of 1,000 is known to 6e-5 in float32, and so are its exponential and its share.
            off = float((mech(call) - product(mech, call)).detach().abs().max())
            require(off <= 1e-6 * deviation, f"{name}, scores that differ by {deviation}: W @ v is off by {off:.1e}")


def padded_batch_equals_each_row_alone(mech: Mechanism) -> None:
    """Padding left, right and in the middle, in any mix: real positions come out as in the unpadded row."""
    rows = padding([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0]])
    base = replace(self_call(length=K), key_visible=rows)
    calls = {
        "encoder": base,
        "causal": replace(base, causal=True),
        "cross": replace(cross_call(), key_visible=rows),
    }
    for name, call in taken(mech, calls.items()):
        together = mech(call)
        assert call.x is not None
        for i, real in enumerate(rows):
            own_queries = real if name != "cross" else slice(None)
            alone = AttentionCall(
                call.q[i : i + 1, :, own_queries],
                call.k[i : i + 1, :, real],
                call.v[i : i + 1, :, real],
                x=call.x[i : i + 1, real],
                causal=call.causal,
            )
            assert_close(
                together[i : i + 1, :, own_queries], mech(alone), what=f"{name}: row {i} alone and with padding"
            )


def causal_outputs_ignore_the_future(mech: Mechanism) -> None:
    ((_, call),) = taken(mech, [("causal", replace(self_call(length=K), causal=True))])
    whole = mech(call)
    for n in range(1, K):
        what = f"with causal=True, the outputs of the first {n} of {K} tokens depend on the tokens after them"
        assert_close(mech(_tokens(call, 0, n)), whole[:, :, :n], what=what)


def prefill_then_steps_equals_whole(mech: Mechanism) -> None:
    """With a cache of keys and values, a prefill and then one token at a time give the whole forward's outputs."""
    call = replace(self_call(length=K), causal=True)
    padded = replace(call, key_visible=padding([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]))
    taken(mech, [("a step", _tokens(call, K - 1, K))])
    for name, whole in taken(mech, [("causal", call), ("padded causal", padded)]):
        expected = mech(whole)
        for prefill in (1, 3):
            for start, stop in [(0, prefill)] + [(t, t + 1) for t in range(prefill, K)]:
                out = mech(_tokens(whole, start, stop))
                what = f"{name}: tokens {start} to {stop - 1} alone, with offset={start}, and in the whole sequence"
                assert_close(out, expected[:, :, start:stop], what=what)


def _tokens(call: AttentionCall, start: int, stop: int) -> AttentionCall:
    """A causal call's queries from ``start`` to ``stop`` over the keys before ``stop``."""
    assert call.x is not None
    return replace(
        call,
        q=call.q[:, :, start:stop],
        k=call.k[:, :, :stop],
        v=call.v[:, :, :stop],
        x=call.x[:, :stop],
        key_visible=None if call.key_visible is None else call.key_visible[:, :stop],
        offset=start,
    )


def every_precision_works(mech: Mechanism) -> None:
    """Each precision comes out as float64 does, in its own dtype; the other laws are about float64."""
    by_precision = [accepted_situations(mech, dtype) for dtype in PRECISIONS]
    for same_situation in zip(*by_precision, strict=True):
        name, calls = same_situation[0][0], [call for _, call in same_situation]
        exact = mech(stacked([_doubled(call) for call in calls])).chunk(len(calls))
        for call, expected in zip(calls, exact, strict=True):
            out, what = mech(call), f"{name} in {call.q.dtype}"
            require(out.dtype == call.q.dtype, f"{what}: the output is {out.dtype}")
            require(bool(torch.isfinite(out).all()), f"{what}: the output is not finite")
            if not ("half precision" in mech.exempt and call.q.dtype != torch.float32):
                assert_close(out, expected, what=what)


def _doubled(call: AttentionCall) -> AttentionCall:
    """The same call in float64."""
    floats = {field: getattr(call, field) for field in ("q", "k", "v", "x", "bias")}
    return replace(call, **{field: t.double() for field, t in floats.items() if t is not None})


def gradients(mech: Mechanism) -> None:
    """The derivatives by queries, keys and values are those of finite differences."""
    square = replace(self_call(length=5, heads=2), key_visible=padding([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]))
    calls = {"cross": cross_call(queries=3, keys=5, heads=2), "padded causal": replace(square, causal=True)}
    for _, call in taken(mech, calls.items()):
        q, k, v = (t.detach().requires_grad_() for t in (call.q, call.k, call.v))

        def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = call) -> Tensor:
            return mech(replace(call, q=q, k=k, v=v))

        # Parameters are made at the first call.
        attend(q, k, v)
        torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)


def grouped_queries_equal_repeated_keys(mech: Mechanism) -> None:
    base = replace(self_call(length=K, heads=6, groups=2), key_visible=padding([[1] * K, [1] * 5 + [0] * 2]))
    for name, call in taken(mech, [("encoder", base), ("causal", replace(base, causal=True))]):
        repeated = replace(call, k=repeat_groups(call.k, 2), v=repeat_groups(call.v, 2))
        assert_close(mech(call), mech(repeated), what=name)


def refusals_say_why(mech: Mechanism) -> None:
    """What ``cannot`` lists is refused with its reason, by the output and by the weights alike."""
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
        require(what in asking, f"cannot() names {what!r}; what can be refused: {', '.join(asking)}")
        for attempt in (mech, mech.weights):
            try:
                attempt(asking[what])
            except ValueError as error:
                require(why in str(error), f"{what} is refused without its reason: {error}")
            else:
                raise AssertionError(f"cannot() names {what!r}, but such a call is not refused")


def exemptions_name_laws_and_give_reasons(mech: Mechanism) -> None:
    known = LAWS.keys() | PARTS
    for law, reason in mech.exempt.items():
        require(law in known, f"exempt from {law!r}, which is no law; the laws are {', '.join(sorted(known))}")
        require(len(reason) > 20, f"no reason why it is exempt from {law}, only {reason!r}")


def memory_is_handed_on(mech: Mechanism) -> None:
    """What ``memory_after`` returns is taken as ``call.memory``, and it returns something if ``reads_memory``."""
    ((_, call),) = taken(mech, [("encoder", self_call())])
    memory = mech.memory_after(call)
    require((memory is not None) == mech.reads_memory, f"memory_after disagrees with reads_memory={mech.reads_memory}")
    if memory is not None:
        following = replace(call, memory=memory)
        assert_close(mech(following), product(mech, following), what="with the memory of a layer before")
        require(not torch.equal(mech(following), mech(call)), "the memory of the layer before changes nothing")


def cache_equals_whole(mech: Mechanism) -> None:
    """Where ``make_cache`` gives a memory, a prefill and then one token at a time give the whole forward's outputs."""
    ((_, call),) = taken(mech, [("causal", replace(self_call(length=K), causal=True))])
    whole, cache = mech(call), mech.make_cache(B, K)
    if cache is None:
        raise NotApplicableError("make_cache gives none: it keeps every key and value")
    for start, stop in [(0, 3)] + [(t, t + 1) for t in range(3, K)]:
        part = _tokens(call, start, stop)
        assert part.x is not None
        new = replace(part, k=part.k[:, :, start:], v=part.v[:, :, start:], x=part.x[:, start:], offset=0)
        _, out = cache.attend(mech, new, key_visible=None)
        assert_close(out, whole[:, :, start:stop], what=f"tokens {start} to {stop}")


def nothing_to_attend_to(mech: Mechanism) -> None:
    """No keys at all: zeros, as for a row that sees nothing."""
    call = AttentionCall(
        torch.randn(B, H, 3, D, dtype=torch.float64),
        torch.zeros(B, H, 0, D, dtype=torch.float64),
        torch.zeros(B, H, 0, E, dtype=torch.float64),
        x=torch.zeros(B, 0, M, dtype=torch.float64),
    )
    taken(mech, [("no keys", call)])
    require(mech.weights(call).shape == (B, H, 3, 0), f"W is {tuple(mech.weights(call).shape)}, not {(B, H, 3, 0)}")
    out = mech(call)
    require(out.shape == (B, H, 3, E), f"the output is {tuple(out.shape)}, not {(B, H, 3, E)}")
    require(bool((out == 0).all()), "the output is not zero")


def sizes_of_zero_are_sizes(mech: Mechanism) -> None:
    """An empty batch, no queries, keys or values without width: an output and a W of that shape."""
    calls = {
        "an empty batch": self_call(batch=0),
        "an empty causal batch": replace(self_call(batch=0), causal=True),
        "no queries": cross_call(queries=0),
        "keys without width": self_call(widths=(0, E, M)),
        "values without width": self_call(widths=(D, 0, M)),
    }
    for name, call in taken(mech, calls.items()):
        # Parameters are made for one width of keys and of x.
        out, weights = (attend(call) for attend in (copy.deepcopy(mech), copy.deepcopy(mech).weights))
        require(weights.shape == call.sizes, f"{name}: W is {tuple(weights.shape)}, not {call.sizes}")
        shape = (*call.sizes[:3], call.v.shape[-1])
        require(out.shape == shape, f"{name}: the output is {tuple(out.shape)}, not {shape}")
        require(bool(torch.isfinite(out).all()), f"{name}: the output is not finite")


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        output_is_weights_times_values,
        long_sequences_equal_the_reference,
        large_scores_keep_the_output,
        hidden_keys_get_no_weight,
        a_bias_moves_the_weights,
        a_mask_hides_however_it_arrives,
        hidden_keys_change_nothing,
        keys_hidden_from_all_may_be_nan,
        padded_batch_equals_each_row_alone,
        causal_outputs_ignore_the_future,
        prefill_then_steps_equals_whole,
        cache_equals_whole,
        rows_that_see_nothing_are_zero,
        every_precision_works,
        gradients,
        grouped_queries_equal_repeated_keys,
        memory_is_handed_on,
        refusals_say_why,
        exemptions_name_laws_and_give_reasons,
        nothing_to_attend_to,
        sizes_of_zero_are_sizes,
        nan_reaches_the_output,
        random_calls_keep_their_numbers,
    )
}
