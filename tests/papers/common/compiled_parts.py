"""Compiled blocks against the same blocks as they are written: the attention of every row of Table 2, guided heads."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from attnlab.guidance import guide
from attnlab.loss import IGNORED
from attnlab.models import CausalLM, MaskedLM, Transformer
from attnlab.patterns import SpecialTokens
from papers.abc import lm
from papers.abc.dense_attention import dense_attention
from papers.common.compiling import compiled_parts
from papers.guidance.one_arm import OneArm
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


def check_guided(layers: int, *, guided: bool) -> None:
    """Raise unless a masked model, guided or not, learns the same compiled, of graphs that all its layers share."""
    arm = OneArm(guided=guided, lr=1e-3, width=16, layers=layers, length=32)
    model = arm.model(vocab=101)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 100, (3, 32), generator=draw)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) > 0.2, IGNORED)

    def learned() -> list[Tensor]:
        total = MaskedLM()(model, model(ids), {"labels": labels}, 0).total
        if term is not None:
            total = total + term.total()
        return [total, *torch.autograd.grad(total, list(model.parameters()), allow_unused=True, materialize_grads=True)]

    with ExitStack() as stack:
        pull, term = arm.guidance(), None
        if pull is not None:
            term = stack.enter_context(guide(model, pull, tokens=SpecialTokens((7,), (1, 2))))
        expected = learned()
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with compiled_parts([model], losses=False, backend="aot_eager"):
            for compiled, wanted in zip(learned(), expected, strict=True):
                torch.testing.assert_close(compiled, wanted)
        # Around guided attention, which stays outside of graphs: what is before it, its output, and the rest.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + (3 if guided else 1)


if __name__ == "__main__":
    for kind in (False, True):
        torch.compiler.reset()
        check_guided(5, guided=kind)
    for table, rows in lm.TABLES.items():
        for variant in rows:
            torch.compiler.reset()
            check(table, variant)
