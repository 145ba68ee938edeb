"""The other readings, by numbers that can be checked by hand and by what they must agree with."""

from __future__ import annotations

import json
import math

import pytest
import torch

from attnlab.adapters import record
from attnlab.attention import repeat_groups
from attnlab.mechanisms.softmax import softmax
from attnlab.reading.alternative import alternative_attention
from attnlab.reading.effective import effective_attention
from attnlab.reading.gradient import gradient_times_attention, output_gradients
from attnlab.reading.heads import attention_distance, attention_entropy
from attnlab.reading.norm_based import norm_based
from attnlab.reading.registry import reading_names
from attnlab.reading.rollout import rollout
from attnlab.reading.segments import segment_contrast
from attnlab.reading.similarity import head_similarity
from attnlab.reading.table import read


def _bert(layers: int = 2):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=6, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=8, vocab_size=50
    )
    return BertModel(config, add_pooling_layer=False).eval()


IDS = torch.arange(2 * 11).view(2, 11)
ATTENDED = torch.ones(2, 11, dtype=torch.long)
ATTENDED[1, 7:] = 0


@pytest.fixture
def trace_and_output():
    model = _bert()
    with record(model) as trace:
        output = model(IDS, attention_mask=ATTENDED).last_hidden_state
    return model, trace, output


def test_norm_based_is_the_length_of_what_a_key_adds_after_the_output_projection(trace_and_output) -> None:
    _, trace, _ = trace_and_output
    layer = trace[1]
    w, v = layer.weights(), repeat_groups(layer.values, 1)
    for head in range(2):
        part = layer.projection[:, head * 3 : head * 3 + 3]
        added = w[:, head, :, :, None] * (v[:, head] @ part.mT)[:, None]
        torch.testing.assert_close(norm_based(layer)[:, head], added.norm(dim=-1), atol=1e-6, rtol=1e-4)
    # Two heads of value width 1: W_O scales them by 2 and by 5 = |(3, 4)|.
    w, v = torch.tensor([[[[1.0]], [[0.5]]]]), torch.tensor([[[[1.0]], [[2.0]]]])
    norms = norm_based(w, v, projection=torch.tensor([[2.0, 3.0], [0.0, 4.0]]))
    torch.testing.assert_close(norms, torch.tensor([[[[2.0]], [[5.0]]]]))
    with pytest.raises(ValueError, match="not its transpose"):
        norm_based(w, v, projection=torch.ones(2, 3))


def test_gradient_times_attention_is_the_derivative_by_the_weights() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 4, 5, 7)
    v, after = torch.randn(2, 2, 7, 3), torch.randn(3)
    w = softmax(scores).requires_grad_()
    out = w @ repeat_groups(v, 2)
    target = (out @ after).tanh().sum()
    (slope,) = torch.autograd.grad(target, out, retain_graph=True)
    (expected,) = torch.autograd.grad(target, w)
    torch.testing.assert_close(gradient_times_attention(w, v, output_gradient=slope), w * expected)


def test_gradients_reach_the_layers_of_a_recorded_model(trace_and_output) -> None:
    model, trace, output = trace_and_output
    slopes = output_gradients(trace, output[0, 0, 1] + output[1, 3, 2])
    # Only position 0 of input 0 is read, so in the last layer only that query and query 3 of input 1 matter.
    last = gradient_times_attention(trace[1], output_gradient=slopes[1])
    reached = last.abs().sum((1, 3)) > 0
    assert reached[0].nonzero().tolist() == [[0]]
    assert reached[1].nonzero().tolist() == [[3]]
    assert not last[1, :, :, 7:].any()
    assert slopes[0].abs().sum() > 0
    with torch.no_grad(), record(model) as silent:
        quiet = model(IDS).last_hidden_state
    with pytest.raises(ValueError, match=r"without torch\.no_grad"):
        output_gradients(silent, quiet.sum())


def test_rollout_follows_two_layers_by_hand() -> None:
    # Layer 1: everybody looks at token 0. Layer 2: token 0 looks at token 1, which looks at itself.
    first = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]])
    second = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])
    one, two = rollout([first, second])
    torch.testing.assert_close(one, torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]]))
    # Row 0: half of itself, (1, 0), and half of token 1, (0.5, 0.5).
    torch.testing.assert_close(two, torch.tensor([[[[0.75, 0.25], [0.5, 0.5]]]]))
    with pytest.raises(ValueError, match="self-attention over whole sequences"):
        rollout([torch.ones(1, 1, 2, 3)])


def test_rollout_of_a_padded_batch_leaves_padding_with_what_is_its_own(trace_and_output) -> None:
    _, trace, _ = trace_and_output
    for layer in rollout(trace):
        torch.testing.assert_close(layer.sum(-1), torch.ones(2, 1, 11))
        assert not layer[1, 0, :7, 7:].any()


def test_entropy_and_distance_by_hand() -> None:
    w = torch.tensor([[[[0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]]])
    torch.testing.assert_close(attention_entropy(w), torch.tensor([[[math.log(4), 0.0, 0.0]]]))
    torch.testing.assert_close(attention_distance(w), torch.tensor([[[1.5, 2.0, 0.0]]]))
    # Cached decoding: query 0 stands at key 2, and sees three of the four keys.
    row = w[:, :, :1] * 4 / 3
    torch.testing.assert_close(attention_distance(row, causal=True, offset=2), torch.tensor([[[1.0]]]))
    # Negative weights count by their size, so that effective attention has an entropy too.
    torch.testing.assert_close(attention_entropy(torch.tensor([[[[-0.5, 0.5]]]])), torch.tensor([[[math.log(2)]]]))


def test_similarity_leaves_padding_out() -> None:
    torch.manual_seed(0)
    a, b = torch.rand(2, 3, 5, 5), torch.rand(2, 3, 5, 5)
    seen = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    expected = torch.stack([
        (torch.cosine_similarity(a[0, h].flatten(), b[0, h].flatten(), 0)
         + torch.cosine_similarity(a[1, h, :3, :3].flatten(), b[1, h, :3, :3].flatten(), 0)) / 2
        for h in range(3)
    ])  # fmt: skip
    torch.testing.assert_close(head_similarity([a], [b], key_visible=seen), expected[None])
    spoiled = a.masked_fill(~seen[:, None, None], torch.nan)
    torch.testing.assert_close(head_similarity([spoiled], [b], key_visible=seen), expected[None])
    torch.testing.assert_close(head_similarity([a], [a]), torch.ones(1, 3))
    with pytest.raises(ValueError, match="as many layers"):
        head_similarity([a], [a, b])


@pytest.mark.parametrize("masks", [{}, {"causal": True}])
def test_an_alternative_is_another_distribution_with_the_same_output(masks: dict) -> None:
    torch.manual_seed(0)
    seen = torch.ones(2, 4, 17, 17).tril().bool() if masks else torch.ones(2, 4, 17, 17, dtype=torch.bool)
    w, v = softmax(torch.randn(2, 4, 17, 17).masked_fill(~seen, -torch.inf)), torch.randn(2, 2, 17, 3)
    other = alternative_attention(w, v, **masks)
    torch.testing.assert_close(other.weights @ repeat_groups(v, 2), w @ repeat_groups(v, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(other.weights.sum(-1), torch.ones(2, 4, 17))
    assert (other.weights >= 0).all()
    assert not other.weights[~seen].any()
    # Rows with more than e + 1 = 4 keys have one, and it lies on the simplex's border; the others have none.
    assert torch.equal(other.exists, seen.sum(-1) > 4)
    assert (other.distance[other.exists] > 1e-3).all()
    assert (other.distance[~other.exists] == 0).all()
    same = effective_attention(other.weights, v, **masks).weights
    torch.testing.assert_close(same, effective_attention(w, v, **masks).weights, atol=1e-5, rtol=0)


def test_no_alternative_to_weights_that_the_values_determine() -> None:
    other = alternative_attention(torch.tensor([[[[0.5, 0.25, 0.25]]]]), torch.eye(3)[None, None])
    assert not other.exists.any()
    with pytest.raises(ValueError, match="must not be negative"):
        alternative_attention(torch.tensor([[[[1.5, -0.5]]]]), torch.ones(1, 1, 2, 1))


@pytest.mark.parametrize("reading", reading_names())
def test_every_reading_makes_one_table(reading: str, trace_and_output, tmp_path) -> None:
    _, trace, output = trace_and_output
    table = read(trace, reading, target=output[0, 0, 1])
    rows = list(table.rows())
    heads = 1 if reading == "rollout" else 2
    pairs = 11 * 11 + 11 * 7 if table.maps["encoder", 0].dim() == 4 else 2 * 11
    assert len(rows) == 2 * heads * pairs
    row = rows[-1]
    at = (row["input"], row["head"], row["query"], *([row["key"]] if "key" in row else []))
    assert row["value"] == table.maps[row["kind"], row["layer"]][at].item()
    assert json.loads(table.to_json(tmp_path / "t.json").read_text())["rows"] == rows
    assert len(table.to_pandas()) == len(rows)


def test_an_unknown_reading_lists_the_known_ones(trace_and_output) -> None:
    with pytest.raises(ValueError, match="the readings are standard, distance, effective, effective norm"):
        read(trace_and_output[1], "guess")
    with pytest.raises(ValueError, match="explains one number"):
        read(trace_and_output[1], "gradient")


def test_squares_that_meet_where_the_segments_do_are_all_contrast() -> None:
    segments = torch.tensor([[-1, 0, 0, 0, 0, 0, -1, 1, 1, 1, 1, -1], [0] * 12])
    same = (segments[:, :, None] == segments[:, None]).float()[:, None].repeat(1, 3, 1, 1)
    # A square map, an even one, and one that is dark where no segment is and along the diagonal.
    same[:, 1] = 0.5
    same[:, 2] = 0.1 + torch.eye(12)
    same[:, 2, :, [0, 6, 11]] = 7.0
    contrast = segment_contrast(same, segments)
    torch.testing.assert_close(contrast[0], torch.tensor([1.0, 0.0, 0.0]))
    # One segment: nothing lies across.
    assert contrast[1].isnan().all()
