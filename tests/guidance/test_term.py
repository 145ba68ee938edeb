"""The term that layers feed while they attend, against L_AG from recorded maps; what is refused, and what is defined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers as tf
from torch import nn

import attnlab as al
from attnlab.guidance import (
    Guidance,
    LogitBias,
    bias_heads,
    guidance_by_head,
    guidance_loss,
    guide,
    pattern_bias,
)
from attnlab.guidance import term as term_module
from attnlab.models import Transformer, TransformerConfig
from attnlab.patterns import SpecialTokens, dense, pattern_targets, special_tokens
from tests.guidance.trained import TOKENS, bert, texts
from tests.tolerance import assert_close

GUIDANCE = Guidance(heads={"next": 1, "delim": 1, "period": 1}, reduction="row")


def batch(count: int = 8) -> dict[str, torch.Tensor]:
    rows = texts(count)
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask")}


def ours(**how: object) -> Transformer:
    torch.manual_seed(1)
    return Transformer(
        TransformerConfig(**{"kind": "encoder", "vocab": 31, "width": 32, "heads": 4, "layers": 2, **how})
    )


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 31,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
}


def llama() -> nn.Module:
    torch.manual_seed(1)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES))


def mistral() -> nn.Module:
    """Its window is shorter than the texts, so that its mask is a matrix."""
    torch.manual_seed(1)
    return tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=4))


@pytest.mark.parametrize(
    "make",
    [ours, lambda: ours(self_attention="kernel:elu"), bert, llama],
    ids=["ours", "ours, not softmax", "bert", "llama"],
)
def test_the_term_is_the_loss_of_the_recorded_maps(make: Callable[[], nn.Module]) -> None:
    given = batch()
    # A causal model cannot follow next.
    guidance = replace(GUIDANCE, heads={"prev": 1, "delim": 1, "period": 1}) if make is llama else GUIDANCE
    slopes = []
    for way in ("while attending", "recorded"):
        model = make().eval()
        if way == "recorded":
            with al.record(model) as trace:
                model(**given)
            loss = guidance_loss(trace, guidance, **given, tokens=TOKENS)
        else:
            with guide(model, guidance, tokens=TOKENS) as term:
                loss = term(model, model(**given), given, 0)
            heads = term.by_head()
        loss.total.backward()
        slopes.append((loss, [p.grad for p in model.parameters()]))
    (a, guided), (b, wanted) = slopes
    assert_close(a.total, b.total)
    assert a.count == b.count
    for x, y in zip(guided, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert_close(x, y)
    by_head = guidance_by_head(trace, guidance, **given, tokens=TOKENS)
    assert by_head[:, 3].isnan().all()
    for layer in range(2):
        assert_close(heads[layer], by_head[layer, :3])


TURNS = Guidance(fraction=0.5, reduction="row")


@pytest.mark.parametrize("make", [lambda: ours(layers=3), lambda: bert(num_hidden_layers=3)], ids=["ours", "bert"])
def test_layers_that_take_turns_guide_every_pattern(make: Callable[[], nn.Module]) -> None:
    """Two of four heads are guided in three layers: next and prev, first and period, delim and next."""
    model, given = make().eval(), batch()
    with al.record(model) as trace:
        model(**given)
    wanted = guidance_loss(trace, TURNS, **given, tokens=TOKENS)
    by_head = guidance_by_head(trace, TURNS, **given, tokens=TOKENS)
    with guide(model, TURNS, tokens=TOKENS) as term:
        loss = term(model, model(**given), given, 0)
    assert_close(loss.total, wanted.total)
    for layer in range(3):
        assert_close(term.by_head()[layer], by_head[layer, :2])
        # The same heads, one pattern at a time.
        names = [["next", "prev"], ["first", "period"], ["delim", "next"]][layer]
        alone = Guidance(heads=dict.fromkeys(names, 1), layers=(layer,))
        assert_close(by_head[layer, :2], guidance_by_head(trace, alone, **given, tokens=TOKENS)[0, :2])
        assert by_head[layer, 2:].isnan().all()


def test_a_model_too_small_for_the_patterns_is_refused() -> None:
    model, given = bert(num_hidden_layers=2), batch()
    with guide(model, TURNS, tokens=TOKENS), pytest.raises(ValueError, match="guides 2 of the 4 heads in each of 2"):
        model(**given)


def test_the_models_output_is_the_same() -> None:
    model, given = bert().eval(), batch()
    plain = model(**given).logits
    with guide(model, GUIDANCE, tokens=TOKENS):
        assert_close(model(**given).logits, plain)


def test_a_mechanism_that_was_swapped_in_stays() -> None:
    model, given = bert().eval(), batch()
    with al.swap(model, "top-r:r=2"):
        plain = model(**given).logits
        with guide(model, GUIDANCE, tokens=TOKENS) as term:
            assert_close(model(**given).logits, plain)
            assert term.total() > 0
        with al.record(model) as trace:
            model(**given)
    assert_close(term.total(), guidance_loss(trace, GUIDANCE, **given, tokens=TOKENS).total)


def test_texts_are_generated_without_guidance() -> None:
    model = llama().eval()
    plain = model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    with guide(model, Guidance(heads={"prev": 1})):
        guided = model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert guided.tolist() == plain.tolist()


def test_one_token_and_padding_only() -> None:
    model = bert().eval()
    with guide(model, Guidance(heads={"next": 1, "same": 1}, reduction="row")) as term:
        model(input_ids=torch.tensor([[5]]))
        # The one row attends to the one token, whatever the pattern.
        assert_close(term.total(), torch.tensor(0.0))
        assert term.last_count() == 1
    with guide(model, GUIDANCE, tokens=TOKENS) as term:
        model(input_ids=torch.zeros(2, 5, dtype=torch.long), attention_mask=torch.zeros(2, 5, dtype=torch.long))
        assert (term.total().item(), int(term.last_count())) == (0.0, 0)


def test_refusals() -> None:
    model, given = bert(), batch()
    with guide(model, Guidance(heads={"next": 5})), pytest.raises(ValueError, match="5 guided heads"):
        model(**given)
    with guide(model, Guidance(fraction=0.1)), pytest.raises(ValueError, match="rounds to none"):
        model(**given)
    with (
        guide(model, Guidance(heads={"period": 1}), tokens=SpecialTokens()),
        pytest.raises(ValueError, match="full stop"),
    ):
        model(**given)
    with guide(model, GUIDANCE, tokens=TOKENS) as term, pytest.raises(ValueError, match="no guided layer has run"):
        term.total()
    with (
        pytest.raises(ValueError, match=r"no encoder layers \[7\]"),
        guide(model, Guidance(heads={"next": 1}, layers=(7,))),
    ):
        pass
    with pytest.raises(ValueError, match="cannot be swapped or recorded"), guide(nn.Linear(2, 2), GUIDANCE):
        pass
    with guide(model, GUIDANCE, tokens=TOKENS), pytest.raises(ValueError, match="not called with input_ids"):
        model(inputs_embeds=torch.randn(1, 3, 32))


def test_a_tokenizer_without_a_period() -> None:
    class Words:
        pad_token_id, eos_token_id, bos_token_id = 0, 2, 1

        def get_vocab(self) -> dict[str, int]:
            return {"a": 5}

    assert special_tokens(Words()) == SpecialTokens((), (1, 2))


@pytest.mark.parametrize("make", [ours, bert], ids=["ours", "bert"])
def test_a_bias_through_a_training(make: Callable[[], nn.Module]) -> None:
    given, guidance = batch(), Guidance(heads={"prev": 2, "period": 1})
    model = make().eval()
    n_heads = 4
    bias = pattern_bias(
        guidance,
        given["input_ids"],
        n_heads=n_heads,
        strength=3.0,
        attention_mask=given["attention_mask"],
        tokens=TOKENS,
    )
    with bias_heads(model, guidance, tokens=TOKENS, strength=3.0):
        biased = model(**given).logits
        # Another batch has a bias of its own.
        model(input_ids=given["input_ids"][:1, :5])
    with al.swap(model, LogitBias(bias)):
        wanted = model(**given).logits
    assert_close(biased, wanted)
    assert (biased - model(**given).logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    "make", [llama, mistral, lambda: ours(kind="decoder", max_length=64)], ids=["llama", "mistral", "ours"]
)
def test_a_bias_of_what_a_causal_model_hides_is_refused(make: Callable[[], nn.Module]) -> None:
    given, model = batch(2), make().eval()
    with bias_heads(model, Guidance(heads={"prev": 1})):
        model(**given)
    with (
        bias_heads(model, Guidance(heads={"prev": 1, "next": 1})),
        pytest.raises(ValueError, match="no head of this model can follow 'next'"),
    ):
        model(**given)


def test_a_bias_in_layers_that_take_turns() -> None:
    given, model = batch(1), ours(layers=3).eval()
    with bias_heads(model, TURNS, tokens=TOKENS, strength=1e4), al.record(model) as trace:
        model(**given)
    for layer, names in enumerate((("next", "prev"), ("first", "period"), ("delim", "next"))):
        for head, name in enumerate(names):
            t = pattern_targets(name, **given, tokens=TOKENS)
            rows = (t.rows & ~t.uniform)[:, 0] if name != "period" else t.rows[:, 0]
            wanted = dense(t, keys=11)[:, 0][rows]
            assert_close(trace[layer].weights()[:, head][rows], wanted)


def test_a_bias_keeps_to_the_layers_that_are_named() -> None:
    given, model = batch(1), ours().eval()
    with bias_heads(model, Guidance(heads={"first": 4}, layers=(1,)), strength=1e4), al.record(model) as trace:
        model(**given)
    assert trace[0].weights()[..., 0].max() < 0.9
    assert_close(trace[1].weights()[..., 0], torch.ones(1, 4, 11))


def test_reentrant_checkpointing_is_told_apart_from_evaluation() -> None:
    model, given = bert(), batch()
    with guide(model, GUIDANCE, tokens=TOKENS) as term:
        with torch.no_grad():
            model(**given)
            assert term.total() > 0
        with pytest.raises(ValueError, match="use_reentrant"):
            term.total()


def test_targets_are_never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guided step makes no target of n x n cells: labels and places of some numbers a row are all there is."""
    n, model = 61, ours(max_length=61)
    ids = torch.arange(n).remainder(29)[None] + 2
    made: list[torch.Tensor] = []
    drawn = term_module.layer_targets

    def watched(*given: object, **how: object) -> object:
        targets = drawn(*given, **how)
        parts = [getattr(targets, name) for name in ("positions", "values", "columns", "share")]
        made.extend(t for t in (*parts, *(targets.labels or ())) if t is not None)
        return targets

    monkeypatch.setattr(term_module, "layer_targets", watched)
    for names in (("next", "prev", "first", "period"), ("delim", "same")):
        with guide(model, Guidance(fraction=1.0, patterns=names), tokens=TOKENS) as term:
            term(model, model(ids), {"input_ids": ids}, 0).total.backward()
    assert made
    assert max(t.numel() for t in made) <= 4 * n
