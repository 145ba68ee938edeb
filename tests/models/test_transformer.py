from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import attnlab as al
from attnlab.models import Transformer, TransformerConfig, attentions, named_config
from attnlab.models.positions import rotate, sinusoids
from tests.models.small import BASE, make, some_tokens
from tests.tolerance import assert_close

POSITIONS = ["learned", "sinusoidal", "rotary"]


def test_one_block_by_hand() -> None:
    """Pre-norm, one head, written out with the block's own weights."""
    model = make("decoder", heads=1, layers=1, activation="relu", positions="learned")
    tokens = some_tokens(1, 3)
    block, stack = model.decoder.blocks[0], model.decoder
    h = model.tokens.weight[tokens[0]] + stack.positions.weight[:3]
    t = block.attention_norm(h)
    q, k, v = (
        t @ w.T + b
        for w, b in zip(block.attention.qkv.weight.split(12), block.attention.qkv.bias.split(12), strict=True)
    )
    s = (q @ k.T / 12**0.5).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    h = h + s.softmax(-1) @ v @ block.attention.out.weight.T + block.attention.out.bias
    t = block.feed_norm(h)
    h = h + (t @ block.widen.weight.T + block.widen.bias).relu() @ block.narrow.weight.T + block.narrow.bias
    assert_close(model(tokens).logits[0], stack.norm(h) @ model.tokens.weight.T)


def test_post_norm_by_hand() -> None:
    """With the sublayers silenced, a post-norm block is three norms in a row."""
    model = make("encoder", layers=1, norm="post", positions="rotary")
    block = model.encoder.blocks[0]
    for linear in (block.attention.out, block.narrow):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    tokens = some_tokens(2, 5)
    assert_close(model(tokens).hidden, block.feed_norm(block.attention_norm(model.tokens(tokens))))


def test_sinusoids_and_rotation_by_hand() -> None:
    p = torch.tensor([[2]])
    expected = torch.tensor([2.0, 2.0, 0.02, 0.02])
    expected = torch.stack([expected[0].sin(), expected[1].cos(), expected[2].sin(), expected[3].cos()])
    assert_close(sinusoids(p, 4)[0, 0], expected)
    turned = rotate(torch.tensor([[[[1.0, 0.0, 0.0, 1.0]]]]), p)[0, 0, 0]
    c, s = torch.tensor(2.0).cos(), torch.tensor(2.0).sin()
    assert_close(turned, torch.stack([c, -torch.tensor(0.02).sin(), s, torch.tensor(0.02).cos()]))


def test_rotation_knows_only_distances() -> None:
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def product(i: int, j: int) -> torch.Tensor:
        return (rotate(q, torch.tensor([[i]])) * rotate(k, torch.tensor([[j]]))).sum()

    assert_close(product(3, 1), product(13, 11))
    assert abs(product(3, 1) - product(3, 2)) > 1e-3


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_future_does_not_leak(positions: str, norm: str) -> None:
    model = make("decoder", positions=positions, norm=norm)
    tokens = some_tokens(2, 7)
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 5) % 13
    before, after = model(tokens).logits, model(changed).logits
    assert_close(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any()


def test_the_future_of_the_target_does_not_leak() -> None:
    model = make("encoder-decoder")
    source, target = some_tokens(2, 5), some_tokens(2, 7)
    changed = target.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % 13
    a, b = (model(source, decoder_input_ids=t).logits for t in (target, changed))
    assert_close(a[:, :3], b[:, :3])
    c = model((source + 1) % 13, decoder_input_ids=target).logits
    assert (a[:, 0] != c[:, 0]).any()


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder-decoder"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_changes_nothing(positions: str, kind: str, side: str) -> None:
    model = make(kind, positions=positions)
    left, right = {"left": (3, 0), "right": (0, 3), "both": (1, 2)}[side]
    tokens = some_tokens(2, 5)
    padded = nn.functional.pad(tokens, (left, right), value=9)
    mask = nn.functional.pad(torch.ones_like(tokens), (left, right))
    # Beside a row without padding, which must not move either.
    batch = torch.cat([padded, some_tokens(1, 8)])
    mask = torch.cat([mask, torch.ones(1, 8, dtype=torch.long)])
    if kind == "encoder-decoder":
        target = some_tokens(3, 7)
        alone = model(tokens, decoder_input_ids=target[:2]).logits
        together = model(batch, attention_mask=mask, decoder_input_ids=target).logits[:2]
        padded_target = nn.functional.pad(target, (left, right), value=4)
        target_mask = nn.functional.pad(torch.ones_like(target), (left, right))
        both = model(batch, attention_mask=mask, decoder_input_ids=padded_target, decoder_attention_mask=target_mask)
        assert_close(both.logits[:2, left : left + 7], alone)
    else:
        alone = model(tokens).logits
        together = model(batch, attention_mask=mask).logits[:2, left : left + 5]
    assert_close(together, alone)


@pytest.mark.parametrize("spec", al.all_mechanisms())
def test_every_mechanism_is_an_encoder(spec: str) -> None:
    """Forward and backward through each."""
    model = make("encoder", self_attention=spec, head="mlm")
    model(some_tokens(2, 7)).logits.square().mean().backward()
    if "gradients" in al.mechanism(spec).exempt:
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(g.isfinite().all() for g in grads)
    assert model.encoder.blocks[0].attention.out.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("spec", al.all_mechanisms())
def test_every_causal_mechanism_decodes_with_a_cache(spec: str) -> None:
    """The whole model at once, and prefill followed by one token at a time, with a padded row."""
    mech = al.mechanism(spec)
    if {"causal", "offset", "padding"} & mech.cannot().keys() or "prefill_then_steps_equals_whole" in mech.exempt:
        pytest.skip(f"refused or exempt: {mech.cannot()} {mech.exempt}")
    model = make("decoder", causal_attention=spec)
    tokens, mask = some_tokens(2, 7), torch.ones(2, 7, dtype=torch.bool)
    mask[1, :2] = False
    whole = model(tokens, attention_mask=mask).logits
    cache = model.make_cache(2, 7)
    parts = [model(tokens[:, :3], attention_mask=mask[:, :3], cache=cache).logits]
    parts += [model(tokens[:, i : i + 1], cache=cache).logits for i in range(3, 7)]
    assert_close(torch.cat(parts, 1)[mask], whole[mask])


@pytest.mark.parametrize("spec", al.all_mechanisms())
def test_every_cross_mechanism_translates(spec: str) -> None:
    mech = al.mechanism(spec)
    model = make("encoder-decoder", cross_attention=spec)
    source, target = some_tokens(2, 7), some_tokens(2, 5)
    if "cross" in mech.cannot():
        with pytest.raises(ValueError, match="cross"):
            model(source, decoder_input_ids=target)
        return
    output = model(source, decoder_input_ids=target)
    changed = model((source + 1) % 13, decoder_input_ids=target)
    assert (output.logits != changed.logits).any()


def test_mechanisms_by_layer_and_by_kind() -> None:
    model = make(
        "encoder-decoder",
        decoder_layers=3,
        self_attention=("softmax", "kernel:elu"),
        causal_attention="kernel:exp",
        cross_attention=("softmax", "kernel:poly,degree=2", "softmax"),
    )
    mechanisms = {(a.kind, a.layer): al.spec_of(a.mechanism) for a in attentions(model)}
    assert mechanisms["encoder", 1] == "kernel"
    assert mechanisms["decoder", 2] == "kernel:kernel=exp"
    assert mechanisms["cross", 1] == "kernel:kernel=poly"
    assert mechanisms["cross", 0] == mechanisms["encoder", 0] == "softmax"


def test_swapped_is_undone_even_after_an_error() -> None:
    model = make("decoder")
    tokens = some_tokens(2, 5)
    before = model(tokens).logits
    with al.swap(model, "kernel:elu"):
        assert (model(tokens).logits != before).any()
    with pytest.raises(ValueError, match="31"), al.swap(model, "kernel:elu"):
        model(some_tokens(2, 37))
    assert torch.equal(model(tokens).logits, before)


def test_layer_dropout_skips_layers_in_training_only() -> None:
    model = make("decoder", layers=3, layer_dropout=0.5)
    tokens = some_tokens(2, 5)
    stack = model.decoder
    h = model.tokens(tokens) + stack.positions(torch.arange(5))
    positions = torch.arange(5)[None]
    possible = []
    for keep in range(8):
        t = h
        for i, block in enumerate(stack.blocks):
            t = block(t, positions=positions) if keep >> i & 1 else t
        possible.append(stack.norm(t))
    assert_close(model(tokens).hidden, possible[-1])
    model.train()
    seen = {
        min(range(8), key=lambda i: (out - possible[i]).abs().max().item())
        for out in (model(tokens).hidden for _ in range(60))
    }
    assert len(seen) > 4
    model(tokens).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_dropout_acts_in_training_only() -> None:
    model = make("encoder", dropout=0.3, activation_dropout=0.2)
    tokens = some_tokens(2, 5)
    assert torch.equal(model(tokens).hidden, model(tokens).hidden)
    model.train()
    assert not torch.equal(model(tokens).hidden, model(tokens).hidden)


def test_tying() -> None:
    tied, loose = make("decoder"), make("decoder", tied=False)
    assert sum(p.numel() for p in loose.parameters()) - sum(p.numel() for p in tied.parameters()) == 13 * 12
    assert [n for n, _ in tied.named_parameters() if "head" in n] == []


def test_copies_stay_tied_and_apart() -> None:
    model = make("decoder", activation="gelu-tanh")
    tokens = some_tokens(2, 5)
    before = model(tokens).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(tokens).logits, before)
        twin.tokens.weight.data.zero_()
        # Zero embeddings are zero logits only if the copy's head reads the copy's embedding.
        assert (twin(tokens).logits == 0).all()
    assert torch.equal(model(tokens).logits, before)


def test_initial_weights() -> None:
    wide = replace(BASE, width=96, heads=3, vocab=211)
    normal = Transformer(wide)
    for p in normal.parameters():
        if p.dim() == 2:
            assert 0.018 < p.std() < 0.022
    xavier = Transformer(replace(wide, init="xavier"))
    block = xavier.encoder.blocks[0]
    assert block.attention.qkv.weight.abs().max() <= (6 / (4 * 96)) ** 0.5
    assert block.widen.weight.abs().max() <= (6 / (5 * 96)) ** 0.5
    assert 0.09 < xavier.tokens.weight.std() < 0.115
    for model in (normal, xavier):
        assert all((m.bias == 0).all() for m in model.modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder-decoder"])
def test_autocast_to_bfloat16(kind: str) -> None:
    model = Transformer(replace(BASE, kind=kind, positions="rotary"))
    tokens = some_tokens(2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(tokens, decoder_input_ids=tokens if kind == "encoder-decoder" else None)
    output.logits.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("attnlab-lm", "decoder"),
        pytest.param("attnlab-mlm", "encoder", marks=pytest.mark.slow),
        pytest.param("attnlab-translation", "encoder-decoder", marks=pytest.mark.slow),
    ],
)
def test_compiles_to_one_graph(name: str, kind: str) -> None:
    """No graph breaks, with softmax: a fresh interpreter, since the shape checks of the tests would be traced too."""
    import subprocess
    import sys

    code = f"""
import torch
import copy
import pickle
from dataclasses import replace
from attnlab.models import Transformer, named_config, CausalLM, MaskedLM, Translation
model = Transformer(replace(named_config({name!r}), vocab=97, layers=2, width=32, heads=2, dropout=0.0))
term = {{"encoder": MaskedLM(), "decoder": CausalLM(), "encoder-decoder": Translation()}}[{kind!r}]
tokens, mask = torch.randint(0, 97, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
mask[1, 5:] = False
batch = {{"input_ids": tokens, "labels": tokens, "attention_mask": mask}}
inputs = {{"input_ids": tokens, "attention_mask": mask}}
if {kind!r} == "encoder-decoder":
    inputs["decoder_input_ids"] = tokens
def loss(inputs, batch):
    return term(model, model(**inputs), batch, 0).total
compiled = torch.compile(loss, backend="eager", fullgraph=True)
a, b = loss(inputs, batch), compiled(inputs, batch)
torch.testing.assert_close(a, b)
b.backward()
inputs.pop("attention_mask"); batch.pop("attention_mask")
torch.testing.assert_close(loss(inputs, batch), compiled(inputs, batch))
print("one graph")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "one graph", done.stderr[-3000:]


def test_errors_say_what_to_do() -> None:
    encoder, decoder, both = make("encoder"), make("decoder"), make("encoder-decoder")
    tokens = some_tokens(2, 5)
    with pytest.raises(ValueError, match="needs decoder_input_ids"):
        both(tokens)
    with pytest.raises(ValueError, match="takes no decoder_input_ids"):
        encoder(tokens, decoder_input_ids=tokens)
    with pytest.raises(ValueError, match="has no decoder"):
        encoder.decode(tokens)
    with pytest.raises(ValueError, match="has no encoder"):
        decoder.encode(tokens)
    with pytest.raises(ValueError, match=r"37 positions, but the model learned 31 \(max_length\)"):
        decoder(some_tokens(1, 37))
    with pytest.raises(ValueError, match=r"\(batch, length\) = \(2, 5\)"):
        decoder(tokens, attention_mask=torch.ones(2, 6))
    with pytest.raises(ValueError, match="head='none'"):
        _ = make("encoder", head="none")(tokens).logits


def test_sinusoidal_positions_have_no_limit() -> None:
    assert make("decoder", positions="sinusoidal")(some_tokens(1, 47)).logits.shape == (1, 47, 13)


def test_a_model_of_the_papers_runs() -> None:
    config = replace(named_config("roberta-16"), layers=1, vocab=101)
    assert isinstance(config, TransformerConfig)
    assert attentions(Transformer(config))[0].heads == 16
