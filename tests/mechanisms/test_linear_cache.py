"""The constant past of kernels with a feature map: prefill and single steps give what the whole sequence gives."""

from __future__ import annotations

import pytest
import torch

import attnlab as al
from attnlab.models import Transformer, TransformerConfig
from tests.tolerance import assert_close

SPECS = ("rfa:features=257", "rfa:features=3,least=1.5", "t2r:features=19", "kernel:elu")


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("cuts", [(0, 4), (0, 1), (0, 9)])
def test_decoding_equals_the_whole(spec: str, cuts: tuple[int, int]) -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        kind="encoder-decoder", vocab=23, width=16, heads=2, layers=2, causal_attention=spec, cross_attention=spec
    )
    model = Transformer(config).eval()
    source, tokens = torch.randint(0, 23, (2, 7)), torch.randint(0, 23, (2, 9))
    source_seen, seen = torch.ones(2, 7, dtype=torch.bool), torch.ones(2, 9, dtype=torch.bool)
    source_seen[1, 5:], seen[0, :3] = False, False
    with torch.no_grad():
        encoded = model.encode(source, attention_mask=source_seen)
        whole = model.decode(tokens, encoded, attention_mask=seen).logits
        cache = model.make_cache(2, 16)
        parts = [
            model.decode(tokens[:, lo:hi], encoded, attention_mask=seen[:, lo:hi], cache=cache).logits
            for lo, hi in [cuts, *((t, t + 1) for t in range(cuts[1], 9))]
        ]
    assert_close(torch.cat(parts, 1)[seen], whole[seen])


@pytest.mark.parametrize("spec", SPECS)
def test_the_past_does_not_grow_and_its_rows_can_be_chosen(spec: str) -> None:
    mech = al.mechanism(spec)
    q, k, v = torch.randn(3, 2, 3, 11, 5).unbind()
    cache = mech.make_cache(2, 0)
    sizes = []
    for lo, hi in ((0, 7), (7, 11)):
        call = al.AttentionCall(q[:, :, lo:hi], k[:, :, lo:hi], v[:, :, lo:hi], causal=True)
        cache.attend(mech, call, key_visible=None)
        sizes.append(cache.state.shape)
    assert sizes[0] == sizes[1]
    cache.select(torch.tensor([1]))
    call = al.AttentionCall(q[1:, :, :1], k[1:, :, :1], v[1:, :, :1], causal=True)
    _, out = cache.attend(mech, call, key_visible=None)
    again = al.AttentionCall(q[1:, :, :1], torch.cat([k, k[:, :, :1]], 2)[1:], torch.cat([v, v[:, :, :1]], 2)[1:])
    assert_close(out, mech(again))
    with pytest.raises(ValueError, match="for a batch of 1"):
        cache.attend(mech, al.AttentionCall(q, k, v, causal=True), key_visible=None)


def test_a_kernel_without_features_keeps_its_keys() -> None:
    assert al.mechanism("kernel:poly,degree=2").make_cache(2, 0) is None
