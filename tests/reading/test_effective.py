"""Effective attention against its definition: a pseudo-inverse per row, over the keys that the row sees."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.attention import AttentionCall, repeat_groups
from attnlab.mechanisms._at_once import project_at_once
from attnlab.mechanisms._projection import project
from attnlab.mechanisms.softmax import softmax
from attnlab.reading import effective_layers
from attnlab.reading._given import given
from attnlab.reading.effective import effective_attention, effective_from_output
from attnlab.reading.effective_layers import read_effective
from attnlab.trace import LayerTrace


def seen_by(shape, key_visible=None, causal=False, offset=0, mask=None) -> Tensor:
    seen = torch.ones(shape, dtype=torch.bool)
    if key_visible is not None:
        seen &= key_visible[:, None, None]
    if causal:
        seen &= torch.ones(shape[2:], dtype=torch.bool).tril(offset)
    return seen if mask is None else seen & mask


def definition(w: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """W_perp and rank by one SVD per row, in float64."""
    v = repeat_groups(v, w.shape[1] // v.shape[1]).double()
    out, rank = torch.zeros_like(w, dtype=torch.float64), torch.zeros(w.shape[:3], dtype=torch.long)
    for b, h, q in seen.any(-1).nonzero().tolist():
        keys = seen[b, h, q]
        part = v[b, h][keys]
        rtol = 2e-6 if w.dtype == torch.float32 else 1e-13
        out[b, h, q, keys] = w[b, h, q][keys].double() @ part @ torch.linalg.pinv(part, rtol=rtol)
        rank[b, h, q] = torch.linalg.matrix_rank(part, rtol=rtol)
    return out, rank


def padding(b: int, k: int) -> Tensor:
    """Left, right and inner padding in one batch."""
    seen = torch.ones(b, k, dtype=torch.bool)
    seen[0, : k // 3] = False
    seen[1, -k // 4 :] = False
    seen[1, k // 2] = False
    return seen


WINDOW = (torch.ones(1, 1, 43, 43).tril() * torch.ones(43, 43).triu(-12)).bool()
CASES = {
    "encoder": ((2, 4, 5, 37, 7), {}),
    "cross padded": ((2, 4, 5, 37, 7), {"key_visible": padding(2, 37)}),
    "no more keys than dimensions": ((2, 4, 5, 6, 7), {}),
    "one token": ((2, 4, 1, 1, 7), {}),
    "some items short": ((2, 4, 5, 37, 29), {"key_visible": padding(2, 37)}),
    "causal": ((1, 2, 149, 149, 11), {"causal": True}),
    "causal padded": ((2, 2, 149, 149, 11), {"causal": True, "key_visible": padding(2, 149)}),
    "causal decoding": ((2, 4, 3, 149, 11), {"causal": True, "offset": 146, "key_visible": padding(2, 149)}),
    "causal, keys ahead of all": ((1, 2, 19, 83, 5), {"causal": True, "offset": 2}),
    "causal, queries before all keys": ((1, 2, 83, 19, 5), {"causal": True, "offset": -3}),
    "window": ((2, 4, 43, 43, 7), {"mask": WINDOW}),
    "mask per head": ((2, 4, 5, 43, 7), {"mask": torch.arange(2 * 4 * 5 * 43).view(2, 4, 5, 43) % 3 > 0}),
    "mask and padding and causal": ((2, 4, 43, 43, 7), {"mask": WINDOW, "causal": True, "key_visible": padding(2, 43)}),
}
VALUES = {
    "plain": lambda v: v,
    "repeated tokens": lambda v: v[:, :, torch.arange(v.shape[2]) % 13 // torch.arange(1, v.shape[2] + 1).clamp(max=2)],
    "low rank": lambda v: v[..., :2] @ torch.randn(2, v.shape[-1]),
    "ill-conditioned": lambda v: v * 10.0 ** -torch.linspace(0, 4, v.shape[-1]),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_pseudo_inverse_of_what_each_query_sees(case: str, values: str) -> None:
    torch.manual_seed(0)
    (b, h, q, k, e), masks = CASES[case]
    v = VALUES[values](torch.randn(b, h // 2, k, e))
    seen = seen_by((b, h, q, k), **masks)
    w = softmax((2 * torch.randn(b, h, q, k)).masked_fill(~seen, -torch.inf))
    expected, rank = definition(w, v, seen)

    found = effective_attention(w, v, **masks)

    torch.testing.assert_close(found.weights.double(), expected, atol=2e-6, rtol=0)
    assert not found.weights[~seen].any()
    assert torch.equal(found.rank, rank)
    assert torch.equal(found.trivial, seen.sum(-1) <= rank)
    assert found.residual.max() < 1e-5
    share = 1 - expected.square().sum((-1, -2)) / w.double().square().sum((-1, -2))
    torch.testing.assert_close(found.removed.double(), share, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_values_are_enough(case: str) -> None:
    torch.manual_seed(0)
    (b, h, q, k, e), masks = CASES[case]
    v = torch.randn(b, h // 2, k, e)
    seen = seen_by((b, h, q, k), **masks)
    w = softmax(torch.randn(b, h, q, k).masked_fill(~seen, -torch.inf))
    whole = effective_attention(w, v, **masks)

    rows = effective_from_output(w @ repeat_groups(v, 2), v, **masks)

    # Rounding in the output is amplified by the condition number of the values.
    torch.testing.assert_close(rows.weights(), whole.weights, atol=3e-5, rtol=0)
    torch.testing.assert_close(torch.cat([part for _, part in rows.chunks(3)], 2), rows.weights())
    assert rows.residual(size=4).max() < 1e-5
    assert torch.equal(rows.rank, whole.rank)
    assert torch.equal(rows.trivial, whole.trivial)
    assert not rows.weights()[~seen].any()


def test_a_value_that_two_keys_share_is_shared_evenly() -> None:
    # Keys 0 and 1 have the same value: only the sum of their weights reaches the output.
    v = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]])
    found = effective_attention(torch.tensor([[[[0.6, 0.2, 0.2]]]]), v)
    torch.testing.assert_close(found.weights, torch.tensor([[[[0.4, 0.4, 0.2]]]]))
    assert found.rank.tolist() == [[[2]]]
    assert not found.trivial.any()
    # |(0.2, -0.2, 0)|^2 / |(0.6, 0.2, 0.2)|^2
    torch.testing.assert_close(found.removed, torch.tensor([[0.08 / 0.44]]))


@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"mask": torch.ones(1, 1, 9, 9, dtype=torch.bool)}])
@pytest.mark.parametrize("name", ["zero values", "identical rows", "weights that sum to 3", "negative weights"])
def test_odd_input_is_defined(name: str, masks: dict) -> None:
    torch.manual_seed(0)
    seen = seen_by((1, 2, 9, 9), **masks)
    w = softmax(torch.randn(1, 2, 9, 9).masked_fill(~seen, -torch.inf))
    v = torch.randn(1, 2, 9, 3)
    if name == "zero values":
        found = effective_attention(w, 0 * v, **masks)
        assert not found.weights.any()
        assert not found.rank.any()
        assert torch.equal(found.residual, torch.zeros(1, 2))
        assert torch.equal(found.removed, torch.ones(1, 2))
    elif name == "identical rows":
        found = effective_attention(w, v[:, :, :1].expand_as(v), **masks)
        even = seen / seen.sum(-1, keepdim=True)
        torch.testing.assert_close(found.weights, even)
        assert found.rank.unique().tolist() == [1]
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
        given(w, v.mT)
    with pytest.raises(ValueError, match="mask must be bool"):
        given(w, v, mask=torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="key_visible must be bool"):
        given(w, v, key_visible=torch.ones(2, 5))
    with pytest.raises(ValueError, match="offset=2 has no meaning"):
        effective_attention(w, v, offset=2)


@pytest.mark.parametrize("case", ["encoder", "cross padded", "some items short", "window"])
def test_gradients_match_finite_differences(case: str) -> None:
    torch.manual_seed(0)
    (_, _, q, k, e), masks = CASES[case]
    q, k, e = min(q, 3), min(k, 9), min(e, 3)
    cut = {name: t[..., :q, :k] if name == "mask" else t[:, -k:] for name, t in masks.items()}
    _gradcheck((2, 2, q, k, e), cut)


@pytest.mark.parametrize("masks", [{"causal": True}, {"causal": True, "offset": 4}])
def test_causal_gradients_match_finite_differences(masks: dict) -> None:
    torch.manual_seed(0)
    _gradcheck((1, 2, 8, 8 + masks.get("offset", 0), 3), masks)


def _gradcheck(shape, masks) -> None:
    b, h, q, k, e = shape
    seen = seen_by((b, h, q, k), **masks)
    w = (torch.rand(b, h, q, k, dtype=torch.float64) * seen).requires_grad_()
    v = torch.randn(b, 1, k, e, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w, v: effective_attention(w, v, **masks).weights, (w, v), atol=1e-6)


@pytest.mark.parametrize("equal", [[(2, 1)], [(1, 0), (4, 0)], [(70, 3)]])
def test_a_repeated_value_within_the_first_rank_keys_of_a_causal_map(equal: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    v = torch.randn(1, 2, 83, 7)
    for to, source in equal:
        v[:, :, to] = v[:, :, source]
    w = torch.rand(1, 2, 83, 83).tril()
    seen = torch.ones(1, 1, 83, 83, dtype=torch.bool).tril()
    found = effective_attention(w, v, causal=True)
    expected, rank = definition(w, v, seen.expand_as(w))
    assert torch.equal(found.rank.expand_as(rank), rank)
    torch.testing.assert_close(found.weights.double(), expected, atol=1e-5, rtol=0)
    without = effective_from_output(w @ v, v, causal=True).weights()
    torch.testing.assert_close(without.double(), expected, atol=1e-5, rtol=0)


def test_float64_keeps_its_digits_where_the_gram_matrix_would_lose_them() -> None:
    torch.manual_seed(0)
    v = torch.randn(1, 1, 29, 5, dtype=torch.float64) * 10.0 ** -torch.linspace(0, 9, 5, dtype=torch.float64)
    w = torch.rand(1, 1, 3, 29, dtype=torch.float64)
    found = effective_attention(w, v)
    expected, rank = definition(w, v, torch.ones_like(w, dtype=torch.bool))
    assert torch.equal(found.rank, rank)
    # A direction of relative size 1e-9 is known to seven digits.
    torch.testing.assert_close(found.weights, expected, atol=1e-6, rtol=0)


def test_half_precision_comes_back_as_it_came() -> None:
    torch.manual_seed(0)
    w, v = torch.rand(1, 2, 3, 17), torch.randn(1, 2, 17, 5)
    found = effective_attention(w.bfloat16(), v.bfloat16())
    assert found.weights.dtype == torch.bfloat16
    expected = effective_attention(w.bfloat16().float(), v.bfloat16().float())
    torch.testing.assert_close(found.weights.float(), expected.weights, atol=1e-2, rtol=0)


def _call(**masks) -> AttentionCall:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 23, 11), torch.randn(2, 2, 23, 11)
    return AttentionCall(q, k, torch.randn(2, 2, 23, 3), **masks)


@pytest.mark.parametrize("masks", [{}, {"causal": True, "key_visible": padding(2, 23)}])
def test_any_mechanism_with_the_same_output_has_the_same_effective_attention(masks: dict) -> None:
    call = _call(**masks)
    exact, sparse = al.mechanism("softmax"), al.mechanism("value-aware:r=4")
    maps = [effective_attention(m.weights(call), call.v, **masks).weights for m in (exact, sparse)]
    assert (exact.weights(call) - sparse.weights(call)).abs().max() > 0.1
    torch.testing.assert_close(maps[0], maps[1], atol=2e-5, rtol=0)


@pytest.mark.parametrize("spec", ["top-r:r=3", "kernel:elu", "window:4", "abc-random:slots=5", "abc-window:slots=6"])
@pytest.mark.parametrize("masks", [{}, {"causal": True, "key_visible": padding(2, 23)}])
def test_every_mechanism_s_weights_have_an_effective_part(spec: str, masks: dict) -> None:
    call, mech = _call(**masks), al.mechanism(spec)
    found = effective_attention(LayerTrace(call, mech, mech(call), None, "encoder", 0, "a"))
    assert found.residual.max() < 1e-5
    assert not found.weights[~seen_by(found.weights.shape, **masks)].any()
    # Another way to the same map: from the output alone.
    again = effective_from_output(mech(call), call.v, **masks).weights()
    torch.testing.assert_close(again, found.weights, atol=2e-4, rtol=0)


def test_a_quantised_model_works_and_one_on_meta_says_what_is_missing() -> None:
    from attnlab.hf import record

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(_bert(), {torch.nn.Linear}, dtype=torch.qint8)
    ids = torch.arange(17)[None]
    with torch.no_grad(), record(model) as trace, read_effective(model) as found:
        model(ids)
    assert found[1].residual.max() < 1e-5
    torch.testing.assert_close(effective_attention(trace[1]).weights, found[1].weights)
    with pytest.raises(ValueError, match="meta device"), read_effective(_bert().to("meta")):
        pass


def test_as_a_mechanism_it_has_softmax_s_output_and_the_effective_weights() -> None:
    call = _call(causal=True)
    soft, mech = al.mechanism("softmax"), al.mechanism("effective-softmax")
    torch.testing.assert_close(mech(call), soft(call))
    torch.testing.assert_close(mech.weights(call), effective_attention(soft.weights(call), call.v, causal=True).weights)


def _bert():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(hidden_size=6, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=50)
    return BertModel(config, add_pooling_layer=False).eval()


@torch.no_grad()
def test_a_real_model_s_logits_do_not_move_and_its_padding_gets_nothing() -> None:
    from attnlab.hf import record, swap

    model, ids = _bert(), torch.arange(2 * 17).view(2, 17)
    attended = torch.ones(2, 17, dtype=torch.long)
    attended[1, 11:] = 0
    before = model(ids, attention_mask=attended).last_hidden_state
    with record(model) as trace:
        model(ids, attention_mask=attended)
    with swap(model, "effective-softmax"):
        after = model(ids, attention_mask=attended).last_hidden_state
    torch.testing.assert_close(after, before)
    with read_effective(model) as found:
        during = model(ids, attention_mask=attended).last_hidden_state
    torch.testing.assert_close(during, before)
    for layer, kept in zip(trace, found, strict=True):
        effective = effective_attention(layer)
        torch.testing.assert_close(effective.weights, kept.weights)
        assert effective.residual.max() < 1e-5
        assert not effective.weights[1, :, :, 11:].any()
        assert effective.rank.unique().tolist() == [3]
        torch.testing.assert_close(effective_from_output(layer).weights(), effective.weights, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="brings its own values"):
        effective_attention(trace[0], layer.values)


def _padded_batch() -> dict[str, Tensor]:
    attended = torch.ones(3, 17, dtype=torch.long)
    attended[1, 11:] = 0
    # No more keys than a head is wide.
    attended[2, 2:] = 0
    return {"input_ids": torch.arange(3 * 17).view(3, 17) % 50, "attention_mask": attended}


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("at_once", [0, 1 << 26])
def test_layers_that_wait_and_are_projected_together_are_the_same(monkeypatch, padded: bool, at_once: int) -> None:
    model, batch = _bert(), _padded_batch()
    # Equal values in one input: its heads are in doubt, and are done with care.
    batch["input_ids"][0, :] = 7
    if not padded:
        batch.pop("attention_mask")
    with read_effective(model) as plain:
        first = model(**batch).last_hidden_state
    monkeypatch.setattr(effective_layers, "_can_wait", lambda g: True)
    monkeypatch.setattr(effective_layers, "AT_ONCE", at_once)
    with read_effective(model) as waiting:
        second = model(**batch).last_hidden_state
        assert len(waiting) == 2
    torch.testing.assert_close(first, second)
    for a, b in zip(plain, waiting, strict=True):
        torch.testing.assert_close(a.weights, b.weights)
        assert torch.equal(a.rank, b.rank)
        assert torch.equal(a.trivial, b.trivial)
        torch.testing.assert_close(a.removed, b.removed, atol=1e-6, rtol=1e-5)
        assert b.residual.max() < 1e-5
    waiting.clear()
    assert len(waiting) == 0


@torch.no_grad()
def test_an_input_with_no_visible_key_attends_to_nothing() -> None:
    model, batch = _bert(), _padded_batch()
    batch["attention_mask"][1] = 0
    with read_effective(model) as found:
        model(**batch)
    assert not found[0].weights[1].any()
    assert found[0].rank[1].max() == 0


@pytest.mark.parametrize("shape", [(3, 4, 5, 37, 7), (3, 4, 5, 6, 7), (3, 2, 5, 37, 29)])
@pytest.mark.parametrize("padded", [False, True])
def test_the_projection_at_once_is_the_careful_one(shape: tuple[int, ...], padded: bool) -> None:
    torch.manual_seed(0)
    b, g, r, k, e = shape
    w, v = torch.rand(b, g, r, k), torch.randn(b, g, k, e)
    v[0, 1, :, 0] = v[0, 1, :, 1]
    seen = None
    if padded:
        seen = torch.ones(b, 1, k, dtype=torch.bool)
        seen[0, :, : k // 3] = False
        seen[2] = False
        w, v = w.masked_fill(~seen[:, :, None], 0), v.masked_fill(~seen[..., None], 0)
    found, rank, trivial, doubtful = project_at_once(w, v, seen)
    careful, careful_rank, careful_trivial = project(w, v, seen)
    sure = ~doubtful
    # Only what is singular is in doubt: two equal columns matter where there are more keys than columns.
    shown = k - k // 3 if padded else k
    assert doubtful.nonzero().tolist() == ([[0, 1]] if shown > e else [])
    torch.testing.assert_close(found[sure], careful[sure])
    assert torch.equal(rank[sure], careful_rank[sure])
    assert torch.equal(trivial[sure], careful_trivial[sure])
    v[1, 0, k // 2, 0] = torch.nan
    assert project_at_once(w, v, seen)[3][1, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_a_gpu_finds_what_a_cpu_finds(padded: bool) -> None:
    model, batch = _bert(), _padded_batch()
    if not padded:
        batch.pop("attention_mask")
    with read_effective(model) as on_cpu:
        model(**batch)
    with read_effective(model.cuda()) as on_gpu:
        model(**{name: t.cuda() for name, t in batch.items()})
    for a, b in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(a.weights, b.weights.cpu(), atol=1e-4, rtol=1e-3)
        assert torch.equal(a.rank, b.rank.cpu())
        assert b.residual.max() < 1e-5
    torch.manual_seed(0)
    for case in ("encoder", "cross padded", "causal padded", "window"):
        (b, h, q, k, e), masks = CASES[case]
        w, v = torch.rand(b, h, q, k), torch.randn(b, 2, k, e)
        there = {name: t.cuda() if isinstance(t, Tensor) else t for name, t in masks.items()}
        here, far = effective_attention(w, v, **masks), effective_attention(w.cuda(), v.cuda(), **there)
        torch.testing.assert_close(here.weights, far.weights.cpu(), atol=1e-5, rtol=1e-4)
        assert torch.equal(here.rank, far.rank.cpu())


def test_memory_from_outputs_grows_with_the_length_not_its_square() -> None:
    from attnlab.measure import peak_bytes

    def peak(n: int) -> int:
        o, v = torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)
        return peak_bytes(lambda: effective_from_output(o, v, causal=True))

    assert peak(2048) < 2.3 * peak(1024)
    assert peak(2048) < 0.2 * 4 * 2 * 2048**2
