"""The truth that readings are measured against, and the correlations that measure them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy import stats

import attnlab as al
from attnlab.attention import AttentionCall
from attnlab.reading.correlation import average_ranks, bootstrap_interval, row_correlations
from attnlab.reading.faithfulness import (
    AGAINST,
    compared_readings,
    faithfulness,
    head_output_change,
    prediction_change,
)
from attnlab.trace import LayerTrace


def _layer(mech: str, projection: bool, **masks) -> LayerTrace:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 7, 3), torch.randn(2, 2, 7, 3), torch.randn(2, 2, 7, 5)
    call = AttentionCall(q, k, v, **masks)
    m = al.mechanism(mech)
    w_o = torch.randn(11, 20) if projection else None
    return LayerTrace(call, m, m(call), w_o, "encoder", 0, "a")


PADDED = torch.tensor([[True] * 7, [False] + [True] * 5 + [False]])


@pytest.mark.parametrize("mech", ["softmax", "kernel:elu"])
@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"causal": True, "key_visible": PADDED}])
@pytest.mark.parametrize("projection", [True, False])
def test_the_change_is_what_hiding_the_key_does(mech: str, masks: dict, projection: bool) -> None:
    layer = _layer(mech, projection, **masks)
    change = head_output_change(layer)
    for j in range(7):
        shown = layer.call.key_visible.clone() if "key_visible" in masks else torch.ones(2, 7, dtype=torch.bool)
        shown[:, j] = False
        moved = layer.mechanism(replace(layer.call, key_visible=shown)) - layer.output
        if projection:
            parts = layer.projection.unflatten(1, (4, 5))
            moved = torch.einsum("bhqe,mhe->bhqm", moved, parts)
        torch.testing.assert_close(change[..., j], moved.norm(dim=-1), atol=2e-5, rtol=1e-3)


def test_ranks_and_correlations_are_scipy_s() -> None:
    torch.manual_seed(0)
    x, y = torch.randint(0, 5, (13, 11)).double(), torch.randn(13, 11, dtype=torch.float64)
    seen = torch.rand(13, 11) > 0.3
    ranks = average_ranks(x, seen)
    spearman, pearson = [], []
    for i in range(13):
        a, b = x[i][seen[i]].numpy(), y[i][seen[i]].numpy()
        assert ranks[i][seen[i]].tolist() == (stats.rankdata(a) - 1).tolist()
        spearman.append(stats.spearmanr(a, b).statistic)
        pearson.append(stats.pearsonr(a, b).statistic)
    change = row_correlations(x, y, seen)
    assert change == pytest.approx((sum(spearman) / 13, sum(pearson) / 13))


def test_the_interval_narrows_with_more_values_and_holds_the_mean() -> None:
    torch.manual_seed(0)
    few, many = torch.randn(10).tolist(), torch.randn(1000).tolist()
    for values in (few, many):
        mean, low, high = bootstrap_interval(values)
        assert low < mean < high
    assert (
        bootstrap_interval(many)[2] - bootstrap_interval(many)[1]
        < bootstrap_interval(few)[2] - bootstrap_interval(few)[1]
    )
    assert bootstrap_interval([float("nan")]) == (None, None, None)


def _classifier():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        vocab_size=50,
        initializer_range=0.7,
    )
    return BertForSequenceClassification(config).eval()


def _texts(n: int) -> list[dict]:
    texts = []
    for i in range(n):
        ids = torch.randint(1, 50, (1, 13), generator=torch.Generator().manual_seed(i))
        attended = torch.ones(1, 13, dtype=torch.long)
        attended[:, 13 - i :] = 0
        texts.append({"input_ids": ids, "attention_mask": attended})
    return texts


def test_the_prediction_s_change_is_that_of_a_model_that_cannot_see_the_key() -> None:
    model, inputs = _classifier(), _texts(1)[0]
    change = prediction_change(model, inputs, layer=("encoder", 1), prediction=lambda o: o.logits, keys=[2, 5])

    class Blind(al.Mechanism):
        def forward(self, call):
            shown = torch.ones(1, 13, dtype=torch.bool)
            shown[:, 5] = False
            return al.Softmax()(replace(call, key_visible=shown))

    with torch.no_grad():
        before = model(**inputs).logits
        with al.swap(model, Blind(), layers=1):
            after = model(**inputs).logits
    torch.testing.assert_close(change[1], (after - before).norm().double(), atol=1e-5, rtol=1e-3)
    assert change[0] != change[1]


def test_a_zeroed_weight_leaves_the_others_as_they_are() -> None:
    model, inputs = _classifier(), _texts(1)[0]
    change = prediction_change(
        model, inputs, layer=("encoder", 1), prediction=lambda o: o.logits, keys=[5], renormalise=False
    )

    class Zeroed(al.Mechanism):
        def reference(self, call):
            w = al.Softmax().weights(call).clone()
            w[..., 5] = 0
            return w

    with torch.no_grad():
        before = model(**inputs).logits
        with al.swap(model, Zeroed(), layers=1):
            after = model(**inputs).logits
    torch.testing.assert_close(change[0], (after - before).norm().double(), atol=1e-5, rtol=1e-3)


def test_to_first_order_the_gradient_is_right_about_a_zeroed_key() -> None:
    # A layer that hardly moves the prediction is where the first order is all there is.
    model = _classifier()
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.output.dense.weight.mul_(1e-3)
    rows = faithfulness(model, _texts(3), resamples=10).rows()
    by = {(r["layer"], r["against"], r["reading"]): r["pearson"] for r in rows}
    assert by[1, "prediction, zeroed", "gradient summed"] > 0.999
    assert by[1, "prediction, zeroed", "gradient summed"] > by[1, "prediction, zeroed", "gradient"]


def test_every_reading_gets_a_correlation_with_an_interval_per_layer() -> None:
    model = _classifier()
    result = faithfulness(model, _texts(4), resamples=50)
    rows = result.rows()
    assert len(rows) == 2 * len(AGAINST) * len(compared_readings())
    for row in rows:
        assert -1 <= row["spearman_low"] <= row["spearman"] <= row["spearman_high"] <= 1
        assert row["inputs"] == 4
    mean = {r["reading"]: r["spearman"] for r in rows if r["against"] == "head output" and r["layer"] == 0}
    assert mean["norm"] > 0.5
    assert abs(mean["random"]) < 0.2
    assert faithfulness(model, _texts(4), resamples=50).rows() == rows


def test_an_encoder_decoder_has_layers_of_three_kinds() -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 50, "max_position_embeddings": 32}
    heads = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartForConditionalGeneration(BartConfig(**sizes, **heads)).eval()
    text = {"input_ids": torch.arange(5, 16)[None], "decoder_input_ids": torch.arange(5, 12)[None]}
    rows = faithfulness(model, [text], keys=5, resamples=5).rows()
    asked = {(row["kind"], row["reading"]) for row in rows}
    # Between the two there is no residual for a rollout to follow.
    every = {(kind, reading) for kind in ("encoder", "decoder", "cross") for reading in compared_readings()}
    assert asked == every - {("cross", "rollout")}
    assert all(-1 <= row["spearman"] <= 1 for row in rows)


def test_a_reading_that_states_the_truth_correlates_perfectly() -> None:
    truth = head_output_change(_layer("softmax", True))
    assert row_correlations(truth, truth, torch.ones_like(truth, dtype=torch.bool)) == pytest.approx((1.0, 1.0))


def test_wrong_use_is_an_error_that_says_so() -> None:
    model = _classifier()
    with pytest.raises(ValueError, match="no text"):
        faithfulness(model, [])
    with pytest.raises(ValueError, match="one by one"):
        faithfulness(model, [{"input_ids": torch.ones(2, 3, dtype=torch.long)}])
    with pytest.raises(ValueError, match="no reading named 'guess'; the readings are standard, "):
        faithfulness(model, _texts(1), readings=["guess"])
    with pytest.raises(ValueError, match="one number per query"):
        faithfulness(model, _texts(1), readings=["entropy"])
