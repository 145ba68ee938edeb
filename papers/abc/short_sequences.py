"""Attention while translators of sentences are trained: forms of few launches, for inputs known to be sound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnlab.attention import AttentionCall
from attnlab.mechanisms.softmax import Softmax
from attnlab.models import Transformer
from attnlab.models.attention import attentions, put_mechanism
from attnlab.shapes import Float
from papers.abc.dense_attention import DenseSlots, dense_attention

__all__ = ["ShortSoftmax", "short_attention"]


class ShortSoftmax(Softmax):
    """Softmax attention for finite keys and for queries that see at least one: nothing is hidden but by the scores."""

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """SDPA; a call that is causal has no padding, or has it at the end, where no token looks."""
        seen = None if call.causal or call.key_visible is None else call.key_visible[:, None, None, :]
        return scaled_dot_product_attention(
            call.q, call.k, call.v, attn_mask=seen, is_causal=call.causal, scale=call.softmax_scale
        )


@contextmanager
def short_attention(model: Transformer) -> Iterator[None]:
    """Inside, causal slots run in the dense form and softmax attention in the short one; the model stays as it is."""
    with dense_attention(model):
        for layer in attentions(model):
            if isinstance(layer.mechanism, DenseSlots) and layer.kind != "decoder":
                put_mechanism(layer, layer.mechanism.inner)
            elif isinstance(layer.mechanism, Softmax):
                put_mechanism(layer, ShortSoftmax())
        yield
