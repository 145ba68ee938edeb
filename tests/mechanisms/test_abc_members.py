"""Each member of the family: values by hand, equalities with attention of other names, and what it refuses."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import attnlab as al
from attnlab.conformance.calls import padding, self_call
from attnlab.mechanisms.abc_cluster import cluster
from attnlab.mechanisms.abc_linformer import AbcLinformer
from attnlab.mechanisms.abc_luna import AbcLuna
from attnlab.mechanisms.abc_mlp import AbcMlp
from attnlab.mechanisms.abc_random import drawn_slots, random_slot
from attnlab.mechanisms.abc_workspace import AbcWorkspace
from attnlab.mechanisms.t2r import T2R
from attnlab.models import Transformer, TransformerConfig
from tests.tolerance import assert_close


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[None, None, :, None]


def even(*values: float, causal: bool = False) -> al.AttentionCall:
    """Keys of zero: every slot that is written is read with the same weight."""
    v = column(*values)
    return al.AttentionCall(torch.ones_like(v), torch.zeros_like(v), v, x=v[:, 0], causal=causal)


def test_window_is_softmax_over_the_last_tokens() -> None:
    assert_close(al.mechanism("abc-window:slots=2")(even(1, 3, 7, 9, causal=True)), column(1, 2, 5, 8))
    # Not causal: the queue after the last token.
    assert_close(al.mechanism("abc-window:slots=2")(even(1, 3, 7, 9)), column(8, 8, 8, 8))
    call = replace(self_call(length=67), causal=True, key_visible=torch.rand(2, 67) > 0.3)
    assert_close(al.mechanism("abc-window:slots=5")(call), al.mechanism("window:r=5")(call))


def test_dilated_is_softmax_over_every_other_token() -> None:
    """t = 5 with two slots sees v_3 and v_5."""
    assert_close(al.mechanism("abc-dilated:slots=2")(even(1, 2, 3, 6, 9, causal=True)), column(1, 2, 2, 4, 6))
    call = replace(self_call(length=70), causal=True)
    age = torch.arange(70)[:, None] - torch.arange(70)
    pattern = (age >= 0) & (age % 2 == 0) & (age < 6)
    masked = replace(call, mask=pattern[None, None])
    assert_close(al.mechanism("abc-dilated:slots=3")(call), al.mechanism("softmax")(masked))


def test_global_tokens_are_the_only_ones_read() -> None:
    assert_close(al.mechanism("abc-global:slots=2")(even(1, 3, 70, 90)), column(2, 2, 2, 2))
    assert_close(
        al.mechanism("abc-global:slots=2,stride=2")(even(1, 30, 7, 90, 50, causal=True)), column(1, 1, 4, 4, 4)
    )


def test_compressive_is_mean_pooling() -> None:
    """c = 2: slots (1 + 3) / 2 and (7 + 9) / 2; with 3 tokens the second slot is 7 / 2, or 7 when read as a mean."""
    assert_close(al.mechanism("abc-compressive:slots=2")(even(1, 3, 7, 9)), column(5, 5, 5, 5))
    assert_close(al.mechanism("abc-compressive:slots=2")(even(1, 3, 7)), column(2.75, 2.75, 2.75))
    assert_close(al.mechanism("abc-compressive:slots=2,normalise=read")(even(1, 3, 7)), column(4.5, 4.5, 4.5))
    causal = al.mechanism("abc-compressive:slots=2,length=4")(even(1, 3, 7, 9, causal=True))
    assert_close(causal, column(0.5, 2, 2.75, 5))
    with pytest.raises(ValueError, match="give length="):
        al.mechanism("abc-compressive:slots=2")(even(1, 3, causal=True))
    with pytest.raises(ValueError, match="3 tokens, but length=2"):
        al.mechanism("abc-compressive:slots=2,length=2")(even(1, 3, 7))


def test_random_slots_hold_sums_and_are_drawn_for_each_head_layer_and_seed() -> None:
    places = torch.arange(20_000)[None]
    draws = torch.cat(
        [drawn_slots(places, 3, 7, seed=seed, stream=stream)[0] for seed in (0, 1) for stream in (0, 1, 5)]
    )
    counts = torch.nn.functional.one_hot(draws, 7).sum(1)
    # Multinomial: a count's standard deviation is 50 around 2857.
    assert (counts - 20_000 / 7).abs().max() < 5 * math.sqrt(20_000 / 7)
    for i, j in itertools.combinations(range(len(draws)), 2):
        # Two independent draws agree at one place in seven, also where one is shifted against the other.
        for shift in range(-3, 4):
            agree = (draws[i] == draws[j].roll(shift)).double().mean()
            assert abs(float(agree) - 1 / 7) < 0.02
    for head in draws[:3]:
        assert abs(float((head[1:] == head[:-1]).double().mean()) - 1 / 7) < 0.02
    assert torch.equal(drawn_slots(places[:, :50], 2, 7, seed=0, stream=0)[0], draws[:2, :50])


def test_random_control_is_eq_3_with_its_own_slots_in_each_head() -> None:
    call, mech = self_call(length=9), al.AbcRandom(slots=3, seed=5, stream=2)
    slots = drawn_slots(torch.arange(9)[None], 3, 3, seed=5, stream=2)[0]
    assert not torch.equal(slots[0], slots[1])
    for head, own in enumerate(slots):
        phi = torch.nn.functional.one_hot(own, 3).double()
        phi = phi[:, phi.any(0)]
        memory_k, memory_v = phi.mT @ call.k[:, head], phi.mT @ call.v[:, head]
        expected = (call.q[:, head] @ memory_k.mT * 11**-0.5).softmax(-1) @ memory_v
        assert_close(mech(call)[:, head], expected, what=f"head {head}")


def test_layers_of_a_model_draw_their_own_slots() -> None:
    config = TransformerConfig(
        kind="decoder", vocab=11, width=8, heads=2, layers=2, causal_attention="abc-random:slots=5"
    )
    model, tokens = Transformer(config).eval(), torch.randint(11, (1, 13))
    with torch.no_grad(), al.record(model) as trace:
        model(tokens)
    assert [layer.mechanism.stream for layer in trace] == [1, 4]
    softmax = Transformer(replace(config, causal_attention="softmax")).eval()
    with torch.no_grad(), al.swap(softmax, "abc-random:slots=5"), al.record(softmax) as trace:
        softmax(tokens)
    assert [layer.mechanism.stream for layer in trace] == [1, 4]
    assert al.AbcRandom(stream=7).in_layer("cross", 3).stream == 7


def test_random_slots_hold_means_and_are_uniform() -> None:
    places = torch.arange(30_000)[None]
    counts = torch.bincount(random_slot(places, 7, seed=3)[0], minlength=7)
    # Multinomial: a count's standard deviation is 61 around 4286.
    assert (counts - 30_000 / 7).abs().max() < 5 * math.sqrt(30_000 / 7)
    slots = [random_slot(places, 7, seed=seed)[0] for seed in (3, 4)]
    assert 0.1 < (slots[0] == slots[1]).double().mean() < 0.19
    assert 0.1 < (slots[0][1:] == slots[0][:-1]).double().mean() < 0.19
    values = torch.randn(11, dtype=torch.float64)
    slots_of_places = random_slot(places[:, :11], 3, seed=0)[0]
    means = [values[slots_of_places == i].mean() for i in range(3) if (slots_of_places == i).any()]
    assert_close(
        al.mechanism("abc-random:slots=3,normalise=read,one_draw=true")(even(*values.tolist()))[0, 0, 0, 0],
        torch.stack(means).mean(),
    )


def test_linformer_projects_along_the_length() -> None:
    call, mech = self_call(length=7), AbcLinformer(slots=3, length=11)
    projection = mech.weight[:7].double().mT
    memory_k, memory_v = projection @ call.k, projection @ call.v
    expected = (call.q @ memory_k.mT * 11**-0.5).softmax(-1) @ memory_v
    assert_close(mech(call), expected)
    with pytest.raises(ValueError, match="7 tokens, but this Linformer learned a control for 5"):
        AbcLinformer(slots=3, length=5)(call)
    # Five visible tokens fit, wherever the padding lies.
    AbcLinformer(slots=3, length=5)(replace(call, key_visible=padding([[0, 0, 1, 1, 1, 1, 1], [1] * 5 + [0] * 2])))


def test_clusters_by_hand() -> None:
    """Keys 0, 10, 1, 11 fall into {0, 1} and {10, 11}; the far key that no one sees does not matter."""
    k = column(0, 10, 1, 11, 500)
    seen = padding([[1, 1, 1, 1, 0]])
    assert cluster(k, seen, 2, rounds=5)[0, 0, :4].tolist() == [0, 1, 0, 1]
    call = al.AttentionCall(torch.zeros_like(k), k, column(1, 10, 3, 30, 99), key_visible=seen)
    assert_close(al.mechanism("abc-cluster:slots=2")(call), column(*[11.0] * 5))
    few = replace(self_call(length=5), key_visible=padding([[1] * 5, [0, 1, 1, 0, 1]]))
    assert_close(al.mechanism("abc-cluster:slots=7")(few), al.mechanism("softmax")(few))
    with pytest.raises(ValueError, match="later key would move"):
        al.mechanism("abc-cluster")(replace(few, causal=True))


def test_luna_and_workspace_take_the_previous_memory() -> None:
    call, memory = self_call(length=7), torch.randn(2, 3, 17, dtype=torch.float64)
    assert call.x is not None
    over_tokens = (memory @ call.x.mT * 17**-0.5).softmax(-1)[:, None]
    expected = (call.q @ (over_tokens @ call.k).mT * 11**-0.5).softmax(-1) @ (over_tokens @ call.v)
    with_memory = replace(call, memory=memory)
    assert_close(AbcLuna(slots=3)(with_memory), expected)
    assert_close(AbcWorkspace(slots=3)(with_memory), expected)
    # One winner per slot: three of the tokens' values, as they are.
    winners = (memory @ call.x.mT).argmax(-1)
    weights = AbcWorkspace(slots=3, top=1).weights(with_memory)
    for row in range(2):
        assert set(weights[row].sum((0, 1)).nonzero().flatten().tolist()) == set(winners[row].tolist())
    with pytest.raises(ValueError, match="memory must be"):
        AbcLuna(slots=4)(with_memory)
    for mech in (AbcLuna(slots=3), AbcWorkspace(slots=3)):
        with pytest.raises(ValueError, match="leak the future"):
            mech(replace(with_memory, causal=True))


@pytest.mark.parametrize("activation", ["exp", "relu", "sigmoid"])
def test_mlp_by_hand(activation: str) -> None:
    """One slot, W_phi = 1, x = log(1, 3): alpha = (1, 3), (0, log 3) or (1/2, 3/4)."""
    mech = AbcMlp(slots=1, activation=activation)
    x = torch.tensor([[[0.0], [math.log(3)]]], dtype=torch.float64)
    call = replace(even(8, 16), x=x)
    mech(call)
    assert mech.weight is not None
    with torch.no_grad():
        mech.weight.fill_(1)
    expected = {"exp": (8 + 3 * 16) / 4, "relu": 16.0, "sigmoid": (8 / 2 + 16 * 3 / 4) / (5 / 4)}[activation]
    assert_close(mech(call), column(expected, expected))
    if activation == "relu":
        # The first token is written nowhere: there is nothing to read yet.
        assert_close(mech(replace(call, causal=True)), column(0, 16))


def test_a_gate_lets_the_past_fade() -> None:
    """gamma = 1/2, one slot, alpha = 1: v~_t = (v~_{t-1} z_{t-1} / 2 + v_t / 2) / z_t, z_t = z_{t-1} / 2 + 1/2."""
    call = even(8, 16, 4, causal=True)
    mech = AbcMlp(slots=1, gate=True)
    mech(call)
    assert mech.weight is not None
    assert mech.gate_bias is not None
    with torch.no_grad():
        mech.weight.zero_()
        mech.gate_bias.zero_()
    # Weights 1; 1/3, 2/3; 1/7, 2/7, 4/7.
    expected = column(8, 40 / 3, (8 + 32 + 16) / 7)
    assert_close(mech(call), expected)
    assert_close(mech.weights(call) @ call.v, expected)
    rfa = al.mechanism("rfa:features=64,gate=true")
    rfa(call)
    with torch.no_grad():
        rfa.bias.zero_()
    # Keys of zero: phi is the same for all of them.
    assert_close(rfa(call), expected)
    with pytest.raises(ValueError, match="gate needs normalise='read'"):
        AbcMlp(gate=True, normalise="write")


def test_a_gate_is_exact_over_a_long_text() -> None:
    """After 20,000 tokens the product of gates is exp(-14,000), and a slot still is the mean of the last few."""
    length = 20_000
    v = torch.arange(float(length))[None, None, :, None]
    call = al.AttentionCall(torch.ones_like(v), torch.zeros_like(v), v, x=v[:, 0] * 0, causal=True)
    mech = AbcMlp(slots=1, gate=True)
    mech(replace(call, q=v[:, :, :1], k=v[:, :, :1], v=v[:, :, :1], x=v[:, 0, :1]))
    with torch.no_grad():
        mech.gate_bias.zero_()
        out = mech(call)
    # sum_i i 2^-i = 2: the mean lies one token back.
    assert_close(out[0, 0, 100:, 0], v[0, 0, 100:, 0] - 1)


def test_mlp_learns_per_kv_head_and_is_rebuilt_the_same() -> None:
    call = replace(self_call(length=7, heads=6, groups=2), causal=True)
    mech, again = al.mechanism("abc-mlp:slots=5"), al.mechanism("abc-mlp:slots=5")
    assert_close(mech(call), again(call))
    assert isinstance(mech, AbcMlp)
    assert mech.weight is not None
    assert mech.weight.shape == (3, 5, 17)
    mech(call).square().sum().backward()
    assert mech.weight.grad is not None
    assert (mech.weight.grad.abs().sum((1, 2)) > 0).all()
    with pytest.raises(ValueError, match="make a mechanism for each shape"):
        mech(self_call(length=7, heads=2))
    assert call.x is not None
    with pytest.raises(ValueError, match="decode with make_cache"):
        mech(replace(call, x=call.x[:, -1:]))
    with pytest.raises(ValueError, match="pass x="):
        mech(replace(call, x=None))


def test_t2r_by_hand() -> None:
    """phi = relu(t): kappa = (1 * 1, 1 * 3), and a key of -1 has no features at all."""
    mech = T2R(features=1)
    call = al.AttentionCall(column(1, -1), column(1, 3, -1), column(4, 8, 99))
    mech(call)
    assert mech.weight is not None
    with torch.no_grad():
        mech.weight.fill_(1)
    assert_close(mech(call), column(7, 0))
    mech(call).sum().backward()
    assert mech.bias is not None
    assert mech.bias.grad is not None


def test_rfa_divides_by_no_less_than_it_is_told() -> None:
    """Rows keep their sums: what is below ``least`` stays a part of 1, and the rest is a distribution as before."""
    call = replace(self_call(length=7), causal=True)
    plain, floored = (al.mechanism(f"rfa:features=3,least={least}").weights(call) for least in (0.0, 2.0))
    sums = floored.sum(-1, keepdim=True)
    assert (sums < 0.999).any()
    assert (sums > 0.999).any()
    assert sums.max() < 1 + 1e-5
    assert_close(floored, plain * sums)


@pytest.mark.parametrize("settings", ["least=-1.0", "least=1.0,gate=true"])
def test_rfa_refuses_a_least_sum_that_means_nothing(settings: str) -> None:
    with pytest.raises(ValueError, match="least"):
        al.mechanism(f"rfa:{settings}")


def test_rfa_estimates_softmax_of_unit_vectors() -> None:
    call = self_call(length=7)
    unit = replace(call, q=call.q / call.q.norm(dim=-1, keepdim=True), k=call.k / call.k.norm(dim=-1, keepdim=True))
    exact = al.mechanism("softmax").weights(replace(unit, scale=1.0))
    errors = [(al.mechanism(f"rfa:features={f}").weights(call) - exact).abs().mean() for f in (64, 16384)]
    assert errors[1] < 0.005
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize(
    "spec",
    ["abc-mlp:slots=3", "abc-window:slots=3", "abc-hybrid:slots=3,window=2,sinks=1,block=1", "abc-linformer:slots=3,length=16",
     "t2r"],
)  # fmt: skip
def test_a_model_decodes_as_it_reads(spec: str) -> None:
    """Left-padded rows, prefill and single tokens, through the model's own cache."""
    from attnlab.models.config import TransformerConfig
    from attnlab.models.transformer import Transformer

    config = TransformerConfig(
        kind="decoder", vocab=23, width=16, heads=2, layers=2, max_length=16, causal_attention=spec
    )
    model = Transformer(config).eval()
    tokens, seen = torch.randint(0, 23, (2, 9)), torch.ones(2, 9, dtype=torch.bool)
    seen[0, :3] = False
    with torch.no_grad():
        whole = model(tokens, attention_mask=seen).logits
        cache = model.make_cache(2, 16)
        parts = [
            model(tokens[:, lo:hi], attention_mask=seen[:, lo:hi], cache=cache).logits
            for lo, hi in [(0, 4), *((t, t + 1) for t in range(4, 9))]
        ]
    assert_close(torch.cat(parts, 1)[seen], whole[seen])


@pytest.mark.parametrize("kind", ["encoder", "cross"])
def test_a_model_hands_lunas_memory_on(kind: str) -> None:
    from attnlab.models import Transformer, TransformerConfig, attentions

    field = {"encoder": "self_attention", "cross": "cross_attention"}[kind]
    config = TransformerConfig(
        kind="encoder-decoder", vocab=23, width=16, heads=2, layers=3, **{field: "abc-luna:slots=3"}
    )
    model = Transformer(config).eval()
    # Only the first layer of the kind learns a memory of its own.
    assert [layer.mechanism.first is not None for layer in attentions(model, (kind,))] == [True, False, False]
    source, seen = torch.randint(0, 23, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    seen[1, 4:] = False
    with al.record(model) as trace:
        model(source, attention_mask=seen, decoder_input_ids=source[:, :5])
    calls = [trace[kind, i].call for i in range(3)]
    assert calls[0].memory is None
    for before, after in itertools.pairwise(calls):
        memory = attentions(model, (kind,))[0].mechanism.first if before.memory is None else before.memory[1]
        x = before.x[1, :4]
        assert_close(after.memory[1], (memory @ x.mT / 4).softmax(-1) @ x)
    whole = model(source, attention_mask=seen, decoder_input_ids=source[:, :5]).logits
    cache, encoded = model.make_cache(2, 5), model.encode(source, attention_mask=seen)
    steps = [model.decode(source[:, t : t + 1], encoded, cache=cache).logits for t in range(5)]
    assert_close(torch.cat(steps, 1), whole)


def test_layers_share_their_control_unless_told_otherwise() -> None:
    from attnlab.models.config import TransformerConfig
    from attnlab.models.transformer import Transformer

    def controls(spec: str) -> list[tuple[int, ...]]:
        config = TransformerConfig(kind="encoder", vocab=23, width=16, heads=2, layers=3, self_attention=spec)
        named: list[tuple[str, nn.Parameter]] = list(Transformer(config).named_parameters())
        return [tuple(p.shape) for name, p in named if "mechanism" in name]

    assert controls("abc-mlp:slots=5") == [(2, 5, 16)]
    assert controls("abc-mlp:slots=5,tied=false") == [(2, 5, 16)] * 3
