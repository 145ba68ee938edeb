"""Compiled blocks against the same blocks as they are written, for the attention of every row of Table 2."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlab.models import CausalLM, Transformer
from papers.abc import lm
from papers.abc.dense_attention import dense_attention
from papers.common.compiling import compiled_parts
from papers.value_aware.training import uncompiled

CONFIG = replace(
    lm.AbcLmConfig(),
    width=16,
    layers=2,
    deep_layers=2,
    length=17,
    contexts=(0,),
    deep_context=5,
    layer_dropout=0.0,
)


def gradients(model: Transformer) -> list[Tensor]:
    """The loss of some tokens, and its gradient for every parameter."""
    tokens = torch.randint(0, 23, (3, 17), generator=torch.Generator().manual_seed(0))
    total = CausalLM()(model, model(tokens), {"input_ids": tokens}, 0).total
    return [total, *torch.autograd.grad(total, list(model.parameters()))]


def check(table: str, variant: lm.Variant) -> None:
    """Raise unless compiling changes neither, and leaves nothing behind."""
    model = lm.build(CONFIG, table, variant, vocab=23, seed=0)
    assert model.decoder is not None
    # torch's own: its graph of elu's gradient has other strides than elu, which only its compiler proper mends.
    backend = "eager" if variant.model == "ELU" else "aot_eager"
    with dense_attention(model):
        expected = gradients(model)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with compiled_parts([model], backend=backend):
            for compiled, wanted in zip(gradients(model), expected, strict=True):
                torch.testing.assert_close(compiled, wanted)
            # Two layers that are alike, unless each draws its own slots, and the loss.
            graphs = 3 if variant.model == "ABC_RD" else 2
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + graphs
            with uncompiled():
                assert torch.equal(gradients(model)[0], expected[0])
    assert "nll" not in vars(model.head)
    assert all(block._compiled_call_impl is None for block in model.decoder.blocks)


if __name__ == "__main__":
    for table, rows in lm.TABLES.items():
        for variant in rows:
            torch.compiler.reset()
            check(table, variant)
