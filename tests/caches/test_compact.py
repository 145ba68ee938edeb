"""Compaction: the fits against other solvers, what is exact, what the certificate bounds, and keys inside a model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import attnlab as al
from attnlab.attention import AttentionCall
from attnlab.caches import KeptKeys, KVPolicy, Place
from attnlab.linalg.compaction import LARGEST, SMALLEST, mass_weights, moved_values
from attnlab.mechanisms.softmax import Softmax
from attnlab.trace import LayerTrace
from tests.adapters.both_kinds import tokens_of
from tests.adapters.zoo import build
from tests.tolerance import assert_close

B, H, G, Q, K, D, E = 2, 6, 3, 37, 29, 5, 4


def recorded(q: int = Q, k: int = K, heads: int = H, seed: int = 3, **settings: Any) -> LayerTrace:
    draws = torch.Generator().manual_seed(seed)
    shapes = (B, heads, q, D), (B, G, k, D), (B, G, k, E)
    tensors = [torch.randn(shape, dtype=torch.double, generator=draws) for shape in shapes]
    call = AttentionCall(*tensors, **settings)
    return LayerTrace(call, Softmax(), Softmax()(call), None, "decoder", 0, "layer 0")


def outputs(layer: Any, q: Tensor, *later: Tensor) -> Tensor:
    call = layer.call(q, *later)
    out = Softmax()(call)
    assert_close(Softmax().weights(call) @ call.v.repeat_interleave(call.groups, 1), out)
    return out


def test_weights_are_those_of_non_negative_least_squares() -> None:
    from scipy.optimize import lsq_linear

    draws = torch.Generator().manual_seed(1)
    A = torch.rand(3, 40, 11, dtype=torch.double, generator=draws).pow(3)
    s = A[..., :7].sum(-1) - 0.3 * A[..., 9]
    w = mass_weights(A.mT @ A, (A.mT @ s.unsqueeze(-1)).squeeze(-1), torch.ones(3, 11).bool(), ridge=0.0, steps=4000)
    for mine, matrix, total in zip(w, A, s, strict=True):
        theirs = lsq_linear(matrix.numpy(), total.numpy(), bounds=(SMALLEST, LARGEST), tol=1e-12).x
        assert_close(mine, torch.from_numpy(theirs), dtype=torch.float32)
        assert float(mine.min()) == pytest.approx(SMALLEST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank_deficient_fits_and_missing_keys_stay_finite(dtype: torch.dtype) -> None:
    column = torch.rand(2, 50, 1, dtype=dtype)
    A = torch.cat([column, column, torch.zeros_like(column), column], -1)
    there = torch.tensor([[True, True, True, False], [True, True, True, True]])
    A = A * there.unsqueeze(1)
    w = mass_weights(A.mT @ A, (A.mT @ A.sum(-1, keepdim=True)).squeeze(-1), there)
    assert_close((A @ w.unsqueeze(-1)).squeeze(-1), A.sum(-1), dtype=torch.float16)
    # Neither a key that no query sees nor a place without a key moves.
    assert w[:, 2].tolist() == [1, 1]
    assert w[0, 3] == 1
    change = moved_values(A.mT @ A, A.mT @ torch.rand(2, 50, 3, dtype=dtype), there)
    assert change.isfinite().all()
    assert not change[0, 3].any()
    assert not change[:, 2].any()
    nothing = torch.zeros(2, 4, 4, dtype=dtype)
    assert (mass_weights(nothing, nothing[..., 0], there) == 1).all()
    assert (moved_values(nothing, nothing, there) == 0).all()


def test_values_are_those_of_ridge_regression() -> None:
    P, R = torch.rand(40, 7, dtype=torch.double), torch.rand(40, 3, dtype=torch.double)
    gram = P.mT @ P
    pull = 0.01 * gram.diagonal().mean()
    stacked = torch.cat([P, pull.sqrt() * torch.eye(7, dtype=torch.double)])
    expected = torch.linalg.lstsq(stacked, torch.cat([R, torch.zeros(7, 3, dtype=torch.double)])).solution
    assert_close(moved_values(gram, P.mT @ R, torch.ones(7).bool(), ridge=0.01), expected)


def test_one_query_is_reproduced_exactly_by_one_key_more_than_values_are_wide() -> None:
    layer = recorded(q=1, heads=G)
    made = al.compact(layer, keys=E + 1).layers[0]
    assert made.k.shape[2] <= E + 1
    assert_close(outputs(made, layer.call.q), layer.output, dtype=torch.float64)
    # The mass is exact too, so that it is exact beside any later keys, whose values were not known.
    later = torch.randn(B, G, 3, D, dtype=torch.double), torch.randn(B, G, 3, E, dtype=torch.double)
    k, v = torch.cat([layer.call.k, later[0]], 2), torch.cat([layer.call.v, later[1]], 2)
    assert_close(outputs(made, layer.call.q, *later), Softmax()(AttentionCall(layer.call.q, k, v)))
    # The values are those of the keys that stay.
    at = made.columns.clamp_min(0).unsqueeze(-1).expand(-1, -1, -1, E)
    assert torch.equal(made.v, layer.call.v.gather(2, at))


def test_padding_is_neither_a_key_nor_a_query() -> None:
    shown = torch.ones(B, K, dtype=torch.bool)
    shown[0, :9] = False
    padded = recorded(q=K, causal=True, key_visible=shown)
    made = al.compact(padded, keys=8).layers[0]
    call = padded.call
    alone = AttentionCall(*(t[:1, :, 9:] for t in (call.q, call.k, call.v)), causal=True)
    other = al.compact(LayerTrace(alone, Softmax(), Softmax()(alone), None, "decoder", 0, "alone"), keys=8).layers[0]
    assert torch.equal(made.columns[:1] - 9, other.columns)
    assert_close(made.v[:1], other.v)
    assert_close(made.bias[:1], other.bias)


def test_all_keys_are_reproduced_exactly() -> None:
    layer = recorded(causal=True, q=K)
    for keys in (K, K + 5):
        made = al.compact(layer, keys=keys).layers[0]
        assert_close(made.bias, torch.zeros_like(made.bias))
        assert_close(outputs(made, layer.call.q[:, :, -1:]), layer.output[:, :, -1:])


def test_fitted_keys_are_nearer_than_the_same_keys_unfitted_on_queries_that_were_not_fitted() -> None:
    layer, other = recorded(q=400), recorded(q=400, seed=3)
    made = al.compact(layer, keys=9)
    one = made.layers[0]
    unseen = torch.randn(B, H, 50, D, dtype=torch.double, generator=torch.Generator().manual_seed(8))
    exact = Softmax()(AttentionCall(unseen, layer.call.k, layer.call.v))
    at = one.columns.unsqueeze(-1)
    plain = AttentionCall(
        unseen, layer.call.k.gather(2, at.expand(-1, -1, -1, D)), other.call.v.gather(2, at.expand(-1, -1, -1, E))
    )
    fitted, unfitted = ((out - exact).norm() / exact.norm() for out in (outputs(one, unseen), Softmax()(plain)))
    assert fitted < 0.6 * unfitted
    # What the certificate measured on queries held out is what other queries of the same kind have.
    assert made.report()["error"] == pytest.approx(float(fitted), rel=0.2)
    assert made.report()["mass_error"] < 0.2


def test_no_later_keys_move_a_measured_query_beyond_the_bound() -> None:
    layer = recorded(q=64)
    made = al.compact(layer, keys=6).layers[0]
    assert made.certificate is not None
    limit = made.certificate.bound * layer.output.unflatten(1, (G, -1)).norm(dim=-1).amax((2, 3))
    longest = layer.call.v.norm(dim=-1).amax(-1)[:, :, None, None]
    draws = torch.Generator().manual_seed(5)
    for strength in (0.0, 1.0, 5.0):
        k = strength * torch.randn(B, G, 2, D, dtype=torch.double, generator=draws)
        v = torch.randn(B, G, 2, E, dtype=torch.double, generator=draws)
        v = v / v.norm(dim=-1, keepdim=True) * longest
        both = torch.cat([layer.call.k, k], 2), torch.cat([layer.call.v, v], 2)
        off = (outputs(made, layer.call.q, k, v) - Softmax()(AttentionCall(layer.call.q, *both))).norm(dim=-1)
        assert (off.unflatten(1, (G, -1)).amax((2, 3)) <= limit + 1e-9).all()
    assert float(limit.max()) < 3 * float(longest.max())


def test_the_report_is_plain_json_and_the_repr_says_what_was_measured() -> None:
    made = al.compact(recorded(q=64), keys=0.25)
    report = json.loads(json.dumps(made.report(), allow_nan=False))
    assert report["keys"] == int(0.25 * K)
    assert len(report["layers"][0]["error"]) == B
    assert len(report["layers"][0]["error"][0]) == G
    assert repr(made).startswith(f"Compaction(1 layers, {K} -> 7 keys a head; error 0.")
    # Too few queries to hold one out.
    few = al.compact(recorded(q=3), keys=5)
    assert few.report()["error"] is None
    assert "error not measured" in repr(few)


def test_a_cache_is_compacted_with_the_queries_of_a_trace() -> None:
    model, ids = build("llama").double(), tokens_of(40)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with al.record(model) as trace:
            model(ids[:, :24], past_key_values=cache)
        keys = DynamicCache()
        model(ids, past_key_values=keys)
    made = al.compact(keys, keys=10, queries=trace, layers="shared")
    assert (
        sum(int((layer.columns >= 0).sum()) for layer in made.layers)
        == 10 * ids.shape[0] * 3 * trace[0].call.k.shape[1]
    )
    for layer, record in zip(made.layers, trace, strict=True):
        whole = Softmax()(AttentionCall(record.call.q, *(t[:, :, :40] for t in (record.call.k, record.call.v))))
        off = (outputs(layer, record.call.q) - whole).norm() / whole.norm()
        assert off < 0.5
    with pytest.raises(ValueError, match="holds no queries"):
        al.compact(keys, keys=10)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"keys": 0}, "at least 1"),
        ({"keys": 1.5}, "at least 1"),
        ({"keys": 4, "queries": "repeat"}, "need the model"),
        ({"keys": 4, "layers": "pyramid"}, "even, shared"),
        ({"keys": 4, "ridge": 0.0}, "ridge must be above 0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        al.compact(recorded(), **settings)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("compact:budget=4,when=step", "fitted once"),
        ("compact:budget=4,queries=mine", "one of repeat, prompt, sampled"),
        ("h2o:budget=4,layers=shared", "needs when=prefill"),
        ("criticalkv:budget=64,layers=shared", "cannot take layers=shared"),
    ],
)
def test_wrong_specs_are_refused(spec: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        al.cache_policy(spec)


def test_windows_and_position_biases_are_refused() -> None:
    for family, why in (("mistral", "hidden from later tokens"), ("bloom", "position bias")):
        model = build(family)
        with (
            pytest.raises(ValueError, match=why),
            torch.no_grad(),
            al.evicting(model, "compact:budget=4,queries=prompt") as cache,
        ):
            model(tokens_of(9), past_key_values=cache)


@pytest.mark.parametrize("queries", ["repeat", "prompt", "sampled"])
def test_in_a_model_biases_follow_keys_and_certificates_are_there(queries: str) -> None:
    model, ids = build("llama").double(), tokens_of(32)
    with torch.no_grad(), al.evicting(model, f"compact:budget=12,queries={queries}") as cache:
        model(ids, past_key_values=cache)
        with al.record(model) as trace:
            model(ids[:, :2], past_key_values=cache)
    made = cache.certificates()
    assert len(made) == 3
    assert sum(int(one.keys.sum()) for one in made) == 12 * ids.shape[0] * 3 * trace[0].call.k.shape[1]
    for one, layer in zip(made, trace, strict=True):
        bias = layer.call.bias
        assert bias is not None
        # New tokens have none.
        assert not bias[..., -2:].any()
        assert bias[..., :-2].any()
        assert float(one.error.mean()) < 0.8
        assert_close(layer.weights() @ layer.call.v.repeat_interleave(layer.call.groups, 1), layer.output)


@pytest.mark.parametrize("policy", ["compact:queries=prompt,budget=12", "h2o:budget=12,when=prefill"])
def test_padding_after_the_cut_leaves_other_rows_as_they_are(policy: str) -> None:
    """What was gathered of the prompt's keys is narrower by then than the keys held."""
    model, ids = build("llama").double(), tokens_of(32)
    mask = torch.ones(2, 36, dtype=torch.long)
    mask[1, 32:34] = 0
    logits = []
    for rows in (slice(0, 1), slice(0, 2)):
        with torch.no_grad(), al.evicting(model, policy) as cache:
            model(ids[rows], past_key_values=cache)
            model(ids[rows, :4], past_key_values=cache, attention_mask=mask[rows])
            logits.append(model(ids[rows, :1], past_key_values=cache).logits[0])
    assert_close(*logits)


def test_layers_that_share_their_budget_keep_the_best_keys_of_all() -> None:
    model, ids = build("llama").double(), tokens_of(21)
    policy = "snapkv:window=2,kernel=3,budget=7,layers=shared,safeguard=0"
    with torch.no_grad(), al.record(model) as trace, al.evicting(model, policy) as cache:
        model(ids, past_key_values=cache)
    counts = torch.stack(cache.kept_by_head())
    groups = counts.shape[-1]
    assert counts.sum((0, 2)).tolist() == [7 * 3 * groups] * 2
    assert counts.max() > 7
    for row in range(2):
        kept, dropped = [], []
        for layer, of_layer in zip(cache.layers, trace, strict=True):
            votes = of_layer.weights()[row].unflatten(0, (groups, -1))[:, :, -2:].mean((1, 2))
            votes[:, -2:] = 0
            pooled = torch.nn.functional.avg_pool1d(votes, 3, 1, 1)[:, :-2]
            for score, columns in zip(pooled, layer.kept.columns[row], strict=True):
                stays = torch.zeros(21, dtype=torch.bool).scatter(0, columns[columns >= 0].long(), True)
                assert stays[-2:].all()
                kept.append(score[stays[:-2]])
                dropped.append(score[~stays[:-2]])
        assert torch.cat(kept).min() > torch.cat(dropped).max()


def test_the_policy_and_the_function_make_the_same_keys() -> None:
    layer = recorded(q=K, causal=True)
    kept = KeptKeys(KVPolicy(8, by="compact:queries=prompt"), 0)
    kept.extend(layer.call.k, layer.call.v)
    kept.cut(layer.call, Place())
    made = al.compact(layer, keys=8, layers="shared").layers[0]
    assert torch.equal(kept.columns, made.columns)
    for name, its in (("keys", made.k), ("values", made.v), ("bias", made.bias)):
        mine = kept.store.padded(name)
        there = (made.columns >= 0).reshape(*made.columns.shape, *[1] * (mine.dim() - 3))
        assert_close(mine * there, its * there)
