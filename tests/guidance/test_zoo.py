"""Guidance on every family of models that ``swap`` supports: the loss of the recorded maps, and no trace left."""

from __future__ import annotations

import pytest
import torch

import attnlab as al
from attnlab.adapters import adapter_of
from attnlab.guidance import Guidance, guidance_loss, guide
from tests.adapters import zoo as hf_zoo
from tests.tolerance import assert_close


@pytest.mark.parametrize("name", hf_zoo.ALL)
def test_every_family_is_guided_and_left_plain(name: str) -> None:
    model = hf_zoo.build(name)
    given = hf_zoo.inputs(model, hf_zoo.padding("right"))
    before = hf_zoo.real_logits(model, given)
    both = "decoder_input_ids" in given
    for kind in ("encoder", "decoder", "cross") if both else (None,):
        guidance = Guidance(heads={"prev": 1, "first": 2}, kind=kind, reduction="row")
        with guide(model, guidance) as term:
            output = model(**given)
            loss = term(model, output, given, 0)
            # The model says what it says without guidance.
            assert_close(output.logits.detach().flatten(0, 1)[:3], model(**given).logits.detach().flatten(0, 1)[:3])
        with al.record(model) as trace:
            model(**given)
        ids, mask = given["input_ids"], given["attention_mask"]
        texts = {"input_ids": ids, "attention_mask": mask}
        if kind in ("decoder", "cross"):
            queries = given["decoder_input_ids"]
            texts = {**texts, "queries": queries} if kind == "cross" else {"input_ids": queries, "attention_mask": None}
        wanted = guidance_loss(trace, guidance, **texts)
        assert_close(loss.total, wanted.total)
        assert loss.count == wanted.count
        first = next(site for site in adapter_of(model).sites() if kind in (None, site.kind))
        weights = [p for p in first.module.parameters() if p.dim() == 2]
        slopes = torch.autograd.grad(loss.total, weights, allow_unused=True)
        assert any(slope is not None and slope.abs().max() > 0 for slope in slopes)
    assert_close(hf_zoo.real_logits(model, given), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
