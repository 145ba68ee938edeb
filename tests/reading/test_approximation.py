from __future__ import annotations

import json

import pytest
import torch

import attnlab as al
from attnlab.reading.approximation import approximation_error
from attnlab.reading.effective import effective_attention
from attnlab.trace import LayerTrace
from tests.mechanisms.test_top_r import call_with_alpha
from tests.tolerance import assert_close


def layer(call: al.AttentionCall, projection: torch.Tensor | None = None, kind: str = "encoder") -> LayerTrace:
    mech = al.Softmax()
    return LayerTrace(call, mech, mech(call), projection, kind, 0, "layer")


def random_call(n_q: int = 7, n_k: int = 7, **settings: object) -> al.AttentionCall:
    q, k, v = (torch.randn(2, h, n, 5, dtype=torch.float64) for h, n in ((6, n_q), (3, n_k), (3, n_k)))
    return al.AttentionCall(q, k, v, **settings)


def test_values_by_hand() -> None:
    call = call_with_alpha([0.8, 0.2], [[1.0, 0.0], [0.0, 1.0]])
    # W = (.8, .2), W^ = (1, 0): off by (-.2, .2), so |off| / |W| = sqrt(.08 / .68), and the same through orthonormal v.
    errors = approximation_error(layer(call, 3 * torch.eye(2, dtype=torch.float64)), "top-r:r=1")
    expected = (0.08 / 0.68) ** 0.5
    summary = errors.summary()
    for name in ("scores", "output", "projected", "effective", "layer_projected"):
        assert summary[name] == pytest.approx(expected), name
    assert summary["ranking_differs"] == 0
    stretched = call_with_alpha([0.25, 0.35, 0.4], [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0]])
    assert approximation_error(layer(stretched), "softmax").summary()["ranking_differs"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"causal": True},
        {"key_visible": torch.tensor([[1, 1, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)},
        {"mask": torch.ones(1, 1, 7, 7, dtype=torch.bool).tril(2)},
    ],
)
def test_agrees_with_dense_weights_and_effective_attention(settings: dict[str, object]) -> None:
    call = random_call(**settings)
    mech = al.mechanism("top-r:r=2")
    W, approx = al.Softmax().weights(call), mech.weights(call)
    v = call.v
    counted = torch.ones(2, 7, dtype=torch.bool) if call.key_visible is None else call.key_visible
    if call.key_visible is not None:
        v = v.masked_fill(~call.key_visible[:, None, :, None], 0)
    errors = approximation_error(layer(call), mech).layers[0]
    keep = counted[:, None, :, None]
    v6 = v.repeat_interleave(2, 1)

    def relative(off: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return ((off * keep).square().sum((0, 2, 3)) / (whole * keep).square().sum((0, 2, 3))).sqrt()

    assert_close(errors.scores, relative(W - approx, W))
    assert_close(errors.output, relative((W - approx) @ v6, W @ v6))
    if call.mask is None:
        masks = {"key_visible": call.key_visible, "causal": call.causal}
        exact, other = (effective_attention(w, call.v, **masks).weights for w in (W, approx))
        torch.testing.assert_close(errors.effective, relative(exact - other, exact), rtol=1e-5, atol=1e-7)


def test_value_aware_d_plus_1_is_exact_in_output_and_effective_attention_not_in_scores() -> None:
    errors = approximation_error(layer(random_call(23, 23)), "value-aware:r=d+1").summary()
    assert errors["scores"] > 0.1
    assert errors["output"] < 1e-9
    assert errors["effective"] < 1e-6


def test_value_aware_beats_oblivious_on_the_output_in_every_head() -> None:
    one = layer(random_call(23, 23))
    aware, oblivious = (approximation_error(one, f"{name}:r=2").layers[0].output for name in ("value-aware", "top-r"))
    assert (aware <= oblivious).all()


def test_padding_positions_are_not_counted() -> None:
    visible = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    call = random_call(key_visible=visible)
    moved = call.q.clone()
    moved[0, :, 5:] = 100.0
    other = al.AttentionCall(moved, call.k, call.v, key_visible=visible)
    first, second = (approximation_error(layer(c), "top-r:r=2") for c in (call, other))
    assert_close(first.layers[0].scores, second.layers[0].scores)
    assert first.layers[0].queries == 12


@pytest.mark.parametrize("spec", ["window:r=4", "lsh:r=4,rounds=2", "kernel:elu", "orf:features=16"])
def test_any_mechanism_can_be_judged_and_rows_are_json(spec: str) -> None:
    layers = [layer(random_call(), torch.randn(17, 30, dtype=torch.float64)) for _ in range(2)]
    errors = approximation_error(layers, spec)
    rows = json.loads(json.dumps(errors.rows(), allow_nan=False))
    assert len(rows) == 12
    assert rows[0]["mechanism"] == spec
    assert str(errors).startswith(spec)


def test_cross_attention_counts_every_query() -> None:
    errors = approximation_error(layer(random_call(5, 7), kind="cross"), "top-r:r=2").layers[0]
    assert errors.queries == 10
    assert errors.projected is None
