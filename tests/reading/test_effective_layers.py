"""Effective attention of whole models: recorded, read during an evaluation, many layers at once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from attnlab.linalg._projection_gpu import attend_heads, project_on_gpu
from attnlab.linalg.projection import project
from attnlab.reading import _stacked
from attnlab.reading.effective import effective_attention, effective_from_output
from attnlab.reading.effective_layers import read_effective
from tests.reading.effective_cases import CASES

BOTH_PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def test_a_quantised_model_works_and_one_on_meta_says_what_is_missing() -> None:
    from attnlab.adapters import record

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(_bert(), {torch.nn.Linear}, dtype=torch.qint8)
    ids = torch.arange(17)[None]
    with torch.no_grad(), record(model) as trace, read_effective(model) as maps:
        model(ids)
    assert maps[1].residual.max() < 1e-5
    torch.testing.assert_close(effective_attention(trace[1]).weights, maps[1].weights)
    with pytest.raises(ValueError, match="meta device"), read_effective(_bert().to("meta")):
        pass


def _bert():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(hidden_size=6, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=50)
    return BertModel(config, add_pooling_layer=False).eval()


@torch.no_grad()
def test_a_real_model_s_logits_do_not_move_and_its_padding_gets_nothing() -> None:
    from attnlab.adapters import record, swap

    model, ids = _bert(), torch.arange(2 * 17).view(2, 17)
    attended = torch.ones(2, 17, dtype=torch.long)
    attended[1, 11:] = 0
    before = model(ids, attention_mask=attended).last_hidden_state
    with record(model) as trace:
        model(ids, attention_mask=attended)
    with swap(model, "effective-softmax"):
        after = model(ids, attention_mask=attended).last_hidden_state
    torch.testing.assert_close(after, before)
    with read_effective(model) as maps:
        during = model(ids, attention_mask=attended).last_hidden_state
    torch.testing.assert_close(during, before)
    for layer, kept in zip(trace, maps, strict=True):
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
def test_layers_that_kernels_project_beside_the_model_are_the_same(monkeypatch, padded: bool) -> None:
    pytest.importorskip("triton")
    model, batch = _bert(), _padded_batch()
    # Equal values in one input: its heads are doubtful, and are computed by the slower method.
    batch["input_ids"][0, :] = 7
    if not padded:
        batch.pop("attention_mask")
    with read_effective(model) as plain:
        first = model(**batch).last_hidden_state
    monkeypatch.setattr(_stacked, "supports_gpu_projection", lambda w, v: True)
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
@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_attends_into_stacks_as_it_would_by_itself(monkeypatch, own: str, padded: bool) -> None:
    model, batch = _bert(), _padded_batch()
    model.set_attn_implementation(own)
    if not padded:
        batch.pop("attention_mask")
    monkeypatch.setattr(_stacked, "supports_gpu_projection", lambda w, v: True)
    monkeypatch.setattr(_stacked.Stack, "project", lambda stack: None)
    before = model(**batch).last_hidden_state
    with read_effective(model) as maps:
        torch.testing.assert_close(model(**batch).last_hidden_state, before)
        assert [stack.filled for stack in maps._stacks] == [2]
        output, weights = maps._stacks[0].last()
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        torch.testing.assert_close(weights @ maps._stacks[0].v[1].view(3, 2, 17, 3), output.transpose(1, 2))
        if padded:
            assert not weights[1, :, :, 11:].any()
    # In another context beside it, a layer is given a call as ever.
    from attnlab.adapters import record

    with read_effective(model, layers=1) as maps, record(model) as trace:
        torch.testing.assert_close(model(**batch).last_hidden_state, before)
    torch.testing.assert_close(effective_attention(trace[1]).weights, maps[0].weights)
    torch.testing.assert_close(model(**batch).last_hidden_state, before)


@torch.no_grad()
def test_an_encoder_s_layers_and_the_crossing_ones_are_stacks_of_their_own(monkeypatch) -> None:
    pytest.importorskip("triton")
    from transformers import BartConfig, BartModel

    sizes = {"d_model": 6, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 50, "max_position_embeddings": 32}
    heads = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model, batch = BartModel(BartConfig(**sizes, **heads)).eval(), _padded_batch()
    batch["decoder_input_ids"] = batch["input_ids"][:, :5]
    batch["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    before = model(**batch).last_hidden_state
    monkeypatch.setattr(_stacked, "supports_gpu_projection", lambda w, v: True)
    monkeypatch.setattr(_stacked.Stack, "project", lambda stack: None)
    with read_effective(model) as maps:
        torch.testing.assert_close(model(**batch).last_hidden_state, before)
        # The decoder's own layers are causal, and are done by themselves.
        assert [(stack.size, stack.filled) for stack in maps._stacks] == [(2, 2), (3, 3)]
        assert len(maps) == 2 + 3 + 3


@torch.no_grad()
def test_an_input_with_no_visible_key_attends_to_nothing() -> None:
    model, batch = _bert(), _padded_batch()
    batch["attention_mask"][1] = 0
    with read_effective(model) as maps:
        model(**batch)
    assert not maps[0].weights[1].any()
    assert maps[0].rank[1].max() == 0


@pytest.mark.parametrize("shape", [(3, 2, 5, 37, 7), (3, 2, 5, 6, 7), (3, 2, 5, 37, 29)])
@pytest.mark.parametrize("padded", [False, True])
def test_the_projection_on_a_gpu_is_the_careful_one(shape: tuple[int, ...], padded: bool) -> None:
    pytest.importorskip("triton")
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
    maps, rank, trivial, doubtful = project_on_gpu(w, v, seen)
    careful, careful_rank, careful_trivial = project(w, v, seen)
    sure = ~doubtful
    # Only what is singular is in doubt: two equal columns matter where there are more keys than columns.
    shown = k - k // 3 if padded else k
    assert doubtful.nonzero().tolist() == ([[0, 1]] if shown > e else [])
    torch.testing.assert_close(maps[sure], careful[sure])
    assert torch.equal(rank[sure], careful_rank[sure])
    assert torch.equal(trivial[sure], careful_trivial[sure])
    # One head is enough: kernels are slow where they are interpreted.
    broken = v[1:2, :1].clone()
    broken[0, 0, k // 2, 0] = torch.nan
    assert project_on_gpu(w[1:2, :1], broken, None if seen is None else seen[1:2])[3][0, 0]


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 3, 5, 7, 11), (2, 3, 37, 130, 16), (1, 2, 1, 1, 3)])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_that_keeps_w_is_softmax_attention(shape: tuple[int, ...], padded: bool) -> None:
    pytest.importorskip("triton")
    attend_as_softmax_does(shape, torch.float32, "cpu", padded)


@pytest.mark.gpu
@torch.no_grad()
@BOTH_PRECISIONS
@pytest.mark.parametrize("shape", [(8, 12, 128, 128, 64), (2, 3, 37, 130, 16)])
def test_attention_that_keeps_w_is_softmax_attention_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for padded in (False, True):
        attend_as_softmax_does(shape, dtype, "cuda", padded)


def attend_as_softmax_does(shape: tuple[int, ...], dtype: torch.dtype, device: str, padded: bool) -> None:
    torch.manual_seed(0)
    b, h, n_q, n_k, e = shape
    q, k, v = (torch.randn(b, n, h, e, device=device, dtype=dtype).transpose(1, 2) for n in (n_q, n_k, n_k))
    s, seen = 0.3 * q.float() @ k.float().mT, None
    if padded:
        seen = torch.arange(n_k, device=device) < torch.linspace(0, n_k, b, device=device)[:, None]
        s = s.masked_fill(~seen[:, None, None], -torch.inf)
        k, v = (t.masked_fill(~seen[:, None, :, None], torch.nan) for t in (k, v))
    w, values = (torch.full((b * h, n, m), torch.nan, device=device, dtype=dtype) for n, m in ((n_q, n_k), (n_k, e)))
    output = torch.full((b, n_q, h, e), torch.nan, device=device, dtype=dtype)
    attend_heads(q, k, v, None if seen is None else seen.int(), 0.3, w, values, output)
    # An input without a visible key attends to nothing.
    expected = torch.softmax(s, -1).nan_to_num(0)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(w.view(b, h, n_q, n_k).float(), expected, **near)
    torch.testing.assert_close(output.transpose(1, 2).float(), expected @ v.nan_to_num(0).float(), **near)
    assert torch.equal(values.view(b, h, n_k, e), v.nan_to_num(0))


@pytest.mark.gpu
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
        on_device = {name: t.cuda() if isinstance(t, Tensor) else t for name, t in masks.items()}
        on_cpu_map, on_gpu_map = (
            effective_attention(w, v, **masks),
            effective_attention(w.cuda(), v.cuda(), **on_device),
        )
        torch.testing.assert_close(on_cpu_map.weights, on_gpu_map.weights.cpu(), atol=1e-5, rtol=1e-4)
        assert torch.equal(on_cpu_map.rank, on_gpu_map.rank.cpu())


@pytest.mark.gpu
@torch.no_grad()
@BOTH_PRECISIONS
@pytest.mark.parametrize(
    "shape", [(8, 12, 12, 128, 128, 64), (3, 4, 2, 5, 37, 7), (2, 4, 1, 165, 300, 48), (1, 2, 2, 1, 1, 1)]
)
def test_kernels_on_a_gpu_are_exact_and_read_nothing_hidden(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    b, h, g, q, k, e = shape
    w = torch.softmax(2 * torch.randn(b, h, q, k, device="cuda"), -1).to(dtype)
    v = (torch.randn(b, k, g, e, device="cuda") * torch.logspace(0, 1.5, e, device="cuda")).transpose(1, 2).to(dtype)
    for share in (None, 0.1, 1.0):
        seen, masks = None, {}
        if share is not None:
            seen = torch.rand(b, k, device="cuda") < torch.linspace(share, 1, b, device="cuda")[:, None]
            masks = {"key_visible": seen}
            w, v = (t.masked_fill(~at, torch.nan) for t, at in ((w, seen[:, None, None]), (v, seen[:, None, :, None])))
        maps = effective_attention(w, v, **masks)
        exact = effective_attention(w.double(), v.double(), **masks)
        # Half precision keeps eight bits of the map.
        near = {"atol": 2e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 1e-2}
        torch.testing.assert_close(maps.weights.double(), exact.weights, **near)
        assert torch.equal(maps.rank, exact.rank)
        assert torch.equal(maps.trivial, exact.trivial)
        assert seen is None or not maps.weights.transpose(1, 3)[~seen].any()
        if dtype == torch.float32:
            assert maps.residual.max() < 1e-5
        w, v = w.nan_to_num(0), v.nan_to_num(0)
